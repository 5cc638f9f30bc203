"""The controller: decides from observations and forecasts whether to change the fleet. Plain decisions: others act.

It holds while a change is under way, and for a cooldown after it. Then it forecasts the fleet as it is. If that would miss
the SLO, or too many requests, it forecasts role changes and, if there is a budget, more instances of one role or of both, and
takes what promises most, if that is clearly more than it has. If the fleet would meet the SLO with one instance fewer and
room to spare, that one ends. What is decided must hold in a second draw of the expected load, too: requests that come a
little otherwise decide much where a fleet is about to be too small.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from pdserve.tools.autoscaler.cell import cell_share
from pdserve.tools.autoscaler.change import Change, MadeChange, difference, flips, shifted, starts, stops
from pdserve.tools.autoscaler.forecast import Rating, rate
from pdserve.tools.autoscaler.load import (
    answer_lengths,
    answer_seconds,
    expected_load,
    expected_rate,
    replayed,
    since_change,
)
from pdserve.tools.autoscaler.observation import Observation
from pdserve.tools.autoscaler.situation import Situation
from pdserve.tools.planner.targets import Target

MIN_REQUESTS = 20  # in the window, with fewer of which there is no forecast
MIN_GOOD = 0.9  # share of good requests, with fewer of which a better fleet is looked for although it meets the SLO
MIN_GAIN = 0.05  # of attainment, for which the fleet is changed
NEARER = 0.9  # factor of the worst figure ÷ target, at which a change is in the right direction
FAR = 2.0  # worst figure ÷ target, beyond which requests are late whatever is done now, and the queue counts
SHORTER = 0.75  # factor of the worst figure, at which a queue is clearly shorter
SPARE = 0.8  # worst figure ÷ target that a fleet may have with one instance fewer
PEAK_S = 900.0  # seconds: a smaller fleet must bear the highest rate of any window within them
HOUR = 3600.0
ANSWERED = 90  # percentile of the answers' durations that a forecast is for, if it is more than the horizon
MAX_LONGER = 5.0  # factor by which it may be more: a forecast takes the longer to make
CLIFF = 0.1  # relative distance from what suffices, within which a second draw decides
LEAST_KEPT_S = 60.0  # seconds for which no change is undone
REPLAY_S = 20.0  # of the window, with which a forecast begins: it fills caches and batches
FAILED_START_PAUSE = 600.0  # seconds without another start


@dataclass(frozen=True)
class Limits:
    """Limits of the controller: how far it looks, how long it waits, and how many instances it keeps.

    Attributes:
        window: seconds of traffic that a forecast is made from.
        horizon: seconds that it is for; up to five times as many if answers take longer.
        cooldown: seconds after a change without another one.
        start_timeout: seconds after which a started instance that has not joined is given up.
        least: by role, instances that always remain.
        most: instances altogether, beyond which none is started.
        max_changes: within an hour.
    """

    window: float = 120.0
    horizon: float = 60.0
    cooldown: float = 30.0
    start_timeout: float = 300.0
    least: Counter[str] = field(default_factory=lambda: Counter(prefill=1, decode=1))
    most: int = 0
    max_changes: int = 60


@dataclass(frozen=True)
class Considered:
    """A change that was forecast, or why it was not."""

    change: str
    rating: Rating | None = None
    rejected: str = ""


@dataclass(frozen=True)
class Decision:
    """Decision of the controller, with the observation and the forecasts behind it.

    Attributes:
        at: seconds on the routers' clock.
        fleet: instances by role.
        seen: of the requests in the window; None if there were none.
        rate: requests per second that are expected.
        horizon: seconds that the forecasts were for; 0 if there were none.
        considered: the fleet as it is, and the changes.
        change: None if there is none.
        reason: in one sentence.
    """

    at: float
    fleet: dict[str, int]
    reason: str
    seen: Rating | None = None
    rate: float = 0.0
    horizon: float = 0.0
    considered: tuple[Considered, ...] = ()
    change: Change | None = None

    @property
    def state(self) -> str:
        """`holds` if there was no forecast; else whether the fleet as it is `meets` the SLO or `misses` it."""
        now = self.considered[0].rating if self.considered else None
        return "holds" if now is None else "meets" if now.meets else "misses"

    def __str__(self) -> str:
        return f"{self.change}: {self.reason}" if self.change else f"no change: {self.reason}"


Forecast = Callable[[Situation, Change | None], Rating]


class Controller:
    """Decides for one fleet. Observations come in order of time.

    Args:
        forecast: rates a situation with a change.
        can_start: instances can be started and ended; otherwise only roles are changed.
    """

    def __init__(self, limits: Limits, targets: Sequence[Target], forecast: Forecast, *, can_start: bool) -> None:
        self._limits = limits
        self._targets = targets
        self._forecast = forecast
        self._can_start = can_start
        self._snapshots: deque[tuple[float, dict[str, str]]] = deque()
        self._changes: deque[MadeChange] = deque(maxlen=limits.max_changes)
        self._pending: Change | None = None  # the newest change, as long as it has not come about
        self._before = Counter[str]()  # instances by role, when it was made
        self._expected: Counter[str] | None = None  # the same, when it has come about
        self._hold_until = 0.0
        self._hold_reason = ""
        self._rates: deque[tuple[float, float]] = deque()  # of the windows that ended lately, with their ends
        self._stop_tried_at = self._no_starts_until = self._seen_at = 0.0
        self._quiet_at = math.inf  # time of the newest observation, if there were no requests
        self._start_up_s = 0.0  # that the newest start has taken at least

    def decide(self, seen: Observation) -> Decision:
        """Return what to do now. The caller makes the change, or advises it only, and goes on observing."""
        limits = self._limits
        self._remember(seen)
        requests = [one for one in seen.requests if one.at > seen.at - limits.window]
        samples = [sample for one in requests if (sample := one.sample(seen.at)) is not None]
        draft = Decision(seen.at, dict(seen.counts), "", rate(self._targets, samples) if samples else None)
        reason, self._seen_at = self._reason_to_hold(seen, len(requests)), seen.at
        quiet_at, self._quiet_at = self._quiet_at, math.inf if requests else seen.at
        if reason:
            return replace(draft, reason=reason)
        expected = expected_rate([one.at for one in requests], seen.at, limits.window, limits.horizon, quiet_at)
        situation = self._situation(seen, expected)
        draft = replace(draft, rate=expected, horizon=situation.horizon)
        again = cache(lambda: self._situation(seen, expected, draw=1))
        now = judged = self._forecast(situation, None)
        margin = max(now.ratio, MIN_GOOD / max(now.attainment, 1e-9))
        if 1 - CLIFF < margin < 1 + CLIFF:
            judged = _mean(now, self._forecast(again(), None))
        suffices = judged.meets and judged.attainment >= MIN_GOOD
        decision = self._shrink(draft, seen, judged) if suffices else self._improve(draft, seen, situation, again, now)
        if decision.change is not None:
            self._begin(seen, decision.change, decision.horizon)
        return decision

    def forget(self) -> None:
        """Undo the newest decision, which was not carried out."""
        assert self._pending is not None
        for _ in self._pending.parts:
            self._changes.pop()
        self._expected, self._pending = None, None
        self._hold(self._seen_at, "after the advice")

    @property
    def changes(self) -> Sequence[MadeChange]:
        """Those of the last hour or more, in order of time."""
        return tuple(self._changes)

    def recall(self, changes: Sequence[MadeChange]) -> None:
        """Respect changes of an earlier controller as its own."""
        newest = self._changes[-1].at if self._changes else -math.inf
        self._changes.extend(change for change in changes if change.at > newest)

    # ---- when nothing may be changed ------------------------------------------------------------------------------

    def _remember(self, seen: Observation) -> None:
        """Keep the roles within the window, and the rates of late."""
        began_at = seen.at - self._limits.window
        self._snapshots.append((seen.at, {member.name: member.role for member in seen.members}))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= began_at:
            self._snapshots.popleft()
        self._rates.append((seen.at, sum(one.at > began_at for one in seen.requests) / self._limits.window))
        while self._rates[0][0] < seen.at - PEAK_S:
            self._rates.popleft()

    def _begin(self, seen: Observation, change: Change, horizon: float) -> None:
        self._protect(seen.at, change, horizon)
        self._before, self._expected, self._pending = seen.counts, change.apply(seen.counts), change
        self._hold(seen.at, f"after the change {change}")

    def _protect(self, at: float, change: Change, horizon: float) -> None:
        """Remember a change, so that it is not undone within the time of its forecast."""
        until = at + max(LEAST_KEPT_S, horizon + self._limits.cooldown)
        self._changes.extend(MadeChange(at, one.before, one.after, one.count, until) for one in change.parts)

    def _hold(self, at: float, reason: str) -> None:
        self._hold_until, self._hold_reason = at + self._limits.cooldown, reason

    def _reason_to_hold(self, seen: Observation, num_requests: int) -> str:
        """Return why nothing may be changed now; empty if something may."""
        if draining := [member.name for member in seen.members if member.is_draining]:
            return f"{', '.join(draining)} drains"
        if reason := self._compare_fleet(seen):
            return reason
        if seen.at < self._hold_until:
            return f"{self._hold_until - seen.at:.0f} s more to wait {self._hold_reason}"
        if num_requests < MIN_REQUESTS:
            return f"{num_requests} requests in {self._limits.window:.0f} s tell too little"
        if sum(seen.at - one.at < HOUR for one in self._changes) >= self._limits.max_changes:
            return f"there were {self._limits.max_changes} changes within an hour"
        return ""

    def _compare_fleet(self, seen: Observation) -> str:
        """Compare the fleet with the expected one, and return why it is not complete; empty if it is."""
        if seen.counts == self._expected:
            if self._pending is not None:
                self._end_pending(self._pending)
            return ""
        if (change := self._pending) is not None and self._is_on_the_way(seen.counts):
            if seen.at < self._changes[-1].at + self._limits.start_timeout:
                return f"the change {change} is under way"
            self._hold(seen.at, f"because the change {change} did not come about in {self._limits.start_timeout:.0f} s")
            if not change.before:
                self._no_starts_until = seen.at + FAILED_START_PAUSE
        elif self._expected is not None:
            self._hold(seen.at, f"because others changed the fleet, which was {_text(self._expected)}")
            for theirs in difference(self._expected if change is None else self._before, seen.counts):
                self._protect(seen.at, theirs, self._limits.horizon)
        self._expected, self._pending = seen.counts, None
        return ""

    def _is_on_the_way(self, counts: Counter[str]) -> bool:
        """Return whether numbers of instances are between those before and after the change under way, and nobody else's."""
        assert self._expected is not None
        before, after = self._before, self._expected
        roles = counts.keys() | before.keys() | after.keys()
        return all(min(before[one], after[one]) <= counts[one] <= max(before[one], after[one]) for one in roles)

    def _end_pending(self, change: Change) -> None:
        """The newest change has come about. A start is protected for as long from now on as it was from its beginning."""
        self._pending = None
        if not change.before:
            made = [self._changes.pop() for _ in change.parts]
            self._start_up_s = max(0.0, self._seen_at - made[0].at)  # it had not joined at the last observation
            self._changes.extend(replace(one, until=one.until + self._start_up_s) for one in reversed(made))

    # ---- what to change -------------------------------------------------------------------------------------------

    def _situation(self, seen: Observation, expected: float, draw: int = 0) -> Situation:
        """Return the input of a forecast in which `expected` requests arrive per second; `draw` is which of several."""
        limits = self._limits
        began_at = seen.at - min(REPLAY_S, limits.window)
        lengths, first = _mix(seen, limits.window)
        admitted = [pair for pair in zip(seen.requests, lengths, strict=True) if not pair[0].is_refused]
        running = [(one, length) for one, length in admitted if one.ended_at > began_at]
        waiting = frozenset(n for n, (one, _) in enumerate(running) if one.ttft_s is None and not one.finish_reason)
        received = replayed(running, began_at, seen.at)
        # What comes next resembles the requests since the newest change, and the newer half of the window.
        newest_at = seen.at - limits.window / 2
        latest = list(zip(seen.requests, lengths, strict=True))[first:]
        whole = [replace(one.request, output_tokens=n) for one, n in latest]
        newer = [request for request in whole if (request.at or 0.0) > newest_at] or whole
        longest = float(np.percentile(answer_seconds(admitted, seen.at) or [0.0], ANSWERED))
        # Long enough for most answers, and for seeing what a started instance is good for.
        horizon = max(limits.horizon, min(longest, MAX_LONGER * limits.horizon), self._start_up_s + limits.horizon / 2)
        load = expected_load(newer, seen.at, expected, horizon, len(received), draw)
        members, moves = self._roles_since(began_at)
        return Situation(began_at, seen.at, members, moves, received, waiting, load, horizon, self._start_up_s)

    def _roles_since(self, began_at: float) -> tuple[dict[str, str], list[tuple[float, str, str]]]:
        """Return the roles at a time, and those that instances took since then, with the time; an empty role: it left."""
        snapshots = list(self._snapshots)
        first = max((n for n, (at, _) in enumerate(snapshots) if at <= began_at), default=0)
        members = before = snapshots[first][1]
        moves = list[tuple[float, str, str]]()
        for at, roles in snapshots[first + 1 :]:
            changed = {name for name in before.keys() | roles.keys() if before.get(name) != roles.get(name)}
            moves += [(at, name, roles.get(name, "")) for name in sorted(changed)]
            before = roles
        return members, moves

    def _improve(
        self, draft: Decision, seen: Observation, situation: Situation, again: Callable[[], Situation], now: Rating
    ) -> Decision:
        """Return the change that promises most, if it is clearly better than none; `again` returns the second draw."""
        considered = [Considered("none", now)]
        best: tuple[Rating, Change] | None = None
        for changes in self._candidates(seen):
            for change in changes:
                if best is not None and best[0].meets and not change.is_flip:
                    break  # a change of roles, or a smaller start, suffices
                if reason := self._rejection(seen, change):
                    considered.append(Considered(str(change), rejected=reason))
                    break
                rating = self._forecast(situation, change)
                considered.append(Considered(str(change), rating))
                if _is_better(rating, best[0] if best else now):
                    best = rating, change
                if rating.meets or not (_is_towards(rating, now) or now.ratio > FAR):
                    break  # more instances at once are not needed, or would not help
        if best is not None:
            best = self._best_mix(seen, situation, best, considered)
            rating = _mean(best[0], self._forecast(again(), best[1]))
            before = _mean(now, self._forecast(again(), None))
            considered.append(Considered(f"{best[1]}, in the mean of two draws", rating))
            best = (rating, best[1]) if _is_better(rating, before) else None
        draft = replace(draft, considered=tuple(considered))
        if best is None:
            within = f" within {self._limits.most} instances" if self._can_start else ""
            return replace(draft, reason=f"{now.worst} expected, and no change{within} would help")
        rating, change = best
        reason = f"{now.worst} expected, {now.attainment:.0%} good; with it {rating.worst}, {rating.attainment:.0%}"
        return replace(draft, change=change, reason=reason)

    def _best_mix(
        self, seen: Observation, situation: Situation, best: tuple[Rating, Change], considered: list[Considered]
    ) -> tuple[Rating, Change]:
        """Return a start of as many instances with the roles that promise most."""
        rating, change = best
        tried = {change}
        while not change.before and not rating.meets:
            options = [one for one in shifted(change, _unit(seen.counts)) if one not in tried]
            tried.update(options)
            ratings = {one: self._forecast(situation, one) for one in options if not self._rejection(seen, one)}
            considered += [Considered(str(one), found) for one, found in ratings.items()]
            found = max(ratings, key=lambda one: (ratings[one].attainment, -ratings[one].ratio), default=change)
            if found == change or (ratings[found].attainment, -ratings[found].ratio) <= (
                rating.attainment,
                -rating.ratio,
            ):
                break
            rating, change = ratings[found], found
        return rating, change

    def _candidates(self, seen: Observation) -> Iterator[list[Change]]:
        """Yield changes of one kind, small ones first."""
        unit = _unit(seen.counts)
        yield from flips(seen.counts, self._limits.least, unit)
        if self._can_start:
            yield from starts(unit)

    def _rejection(self, seen: Observation, change: Change) -> str:
        """Return why a change is not even forecast; empty if it is."""
        if any(change.undoes(other.change) and seen.at < other.until for other in self._changes):
            return "it would undo a change within its forecast"
        if change.apply(seen.counts).total() > max(self._limits.most, seen.counts.total()):
            return f"the budget is {self._limits.most} instances"
        if not change.before and seen.at < self._no_starts_until:
            return "an instance that was started lately has not become ready"
        return ""

    def _shrink(self, draft: Decision, seen: Observation, now: Rating) -> Decision:
        """Return the end of an instance, if the fleet would meet the SLO without it also at the highest rate of late."""
        considered = [Considered("none", now)]
        reason = f"{now.worst} expected, {now.attainment:.0%} good"
        if self._can_start and seen.at >= self._stop_tried_at + self._limits.window:
            self._stop_tried_at = seen.at
            highest = max(draft.rate, *(rate for _, rate in self._rates))
            situation = self._situation(seen, highest)
            ratings = dict[Change, Rating]()
            for change in stops(seen.counts, self._limits.least, _unit(seen.counts)):
                if not (rejected := self._rejection(seen, change)):
                    ratings[change] = self._forecast(situation, change)
                considered.append(Considered(str(change), ratings.get(change), rejected))
            if ratings:
                change = min(ratings, key=lambda one: ratings[one].ratio)
                again = self._situation(seen, highest, draw=1)
                if ratings[change].ratio <= SPARE and self._forecast(again, change).ratio <= SPARE:
                    reason = f"{ratings[change].worst} expected without it"
                    return replace(draft, change=change, reason=reason, considered=tuple(considered))
        return replace(draft, reason=reason, considered=tuple(considered))


def _mix(seen: Observation, window: float) -> tuple[list[int], int]:
    """Return the lengths that answers will have, and the index of the first request since the newest change of the mix."""
    first = since_change([one.request.input_tokens for one in seen.requests])
    parts = seen.requests[:first], seen.requests[first:]
    return [length for part in parts for length in answer_lengths(part, seen.at - window, seen.at)], first


def _mean(one: Rating, other: Rating) -> Rating:
    """Return the mean of two ratings, with the words and values of the worse one."""
    worse = max(one, other, key=lambda rating: rating.ratio)
    mean = (one.attainment + other.attainment) / 2, (one.ratio + other.ratio) / 2
    return replace(worse, attainment=mean[0], ratio=mean[1])


def _is_better(rating: Rating, other: Rating) -> bool:
    """Return whether a change is worth making: clearly more good requests, and no longer a queue; or as many, and the SLO
    met or a long queue clearly shorter."""
    if rating.attainment >= other.attainment + MIN_GAIN:
        return rating.ratio <= max(1.0, other.ratio)
    if rating.attainment < other.attainment:
        return False
    return (rating.meets and not other.meets) or (other.ratio > FAR and rating.ratio < SHORTER * other.ratio)


def _is_towards(rating: Rating, other: Rating) -> bool:
    """Return whether a change is in the right direction: far from the SLO, one instance may save no request, but shortens
    the queue."""
    return _is_better(rating, other) or rating.ratio < NEARER * other.ratio


def _unit(counts: Counter[str]) -> int:
    """Return the smallest number of instances whose change a forecast can show: one of its cell stands for so many."""
    return max(1, round(1 / cell_share(counts)))


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()) if count)
