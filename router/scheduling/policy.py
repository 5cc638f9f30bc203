"""Who gets the next request: pure functions of a snapshot of the candidates.

A policy scores candidates, and the lowest gets the request. Ties go to who has the least to compute of it, since that is good
for whoever comes next, then to who has the fewest requests, then the least work, then round. Prefill and decode instances are
picked by a policy each. What a policy cannot judge (a session policy and no session) it leaves to another by name, and the
decision says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import xxhash

from pdserve.costs import Costs

NAME = attrgetter("instance_id")
UNKNOWN = Costs()  # of an instance that has not told its own yet
SHOWN = 8  # candidates in a decision's explanation
SPREAD = 64  # tokens over which a wait before the second one counts as spread, when a decode instance is picked


class Load(NamedTuple):
    """What is left to do, in tokens.

    Attributes:
        prefill_tokens: of prompts, still to be computed.
        output_tokens: still to be generated, at most.
        context_tokens: whose KV is read in each decode step.
        prefills: requests that have prompt tokens to be computed.
        attended_tokens: of these, as in `costs.attended`.
    """

    requests: int = 1
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    prefills: int = 0
    attended_tokens: int = 0


NOTHING = Load(requests=0)


@dataclass(slots=True, eq=False)
class Candidate:
    """One instance as a policy sees it: all that is left to do there, for whichever router, and what that takes.

    Attributes:
        both: it may compute the prompts that it decodes.
        token_bytes: of KV.
        capacity_tokens: of its pool.
    """

    instance_id: str
    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    prefills: int = 0
    attended_tokens: int = 0
    costs: Costs = UNKNOWN
    both: bool = False
    token_bytes: int = 1
    capacity_tokens: int = 1 << 62
    # Hundreds of candidates are scored for a request, and few have changed since the one before.
    _prefill_terms: tuple[float, float, float] | None = field(default=None, init=False, repr=False)
    _decode_terms: tuple[float, float, float, float, int] | None = field(default=None, init=False, repr=False)

    def prefill_terms(self) -> tuple[float, float, float]:
        """Forecasts, in seconds: for what is queued there, one more prompt of no tokens, and one step of what it decodes; for
        each token of the prompt; for each pair that it attends to."""
        if self._prefill_terms is None:
            seconds = self.costs.prefills_seconds(self.prefills + 1, self.prefill_tokens, self.attended_tokens)
            if self.context_tokens:
                seconds += self.costs.step_seconds(self.requests - self.prefills, self.context_tokens)
            self._prefill_terms = (seconds, *self.costs.prefill[1:])
        return self._prefill_terms

    def decode_terms(self) -> tuple[float, float, float, float, int]:
        """Forecasts, in seconds: for a step with one more sequence of no tokens in it; for each of its tokens; for a
        transfer; for each token of it. And how many tokens there is room for."""
        if self._decode_terms is None:
            step, (first, byte) = self.costs.step_seconds(self.requests + 1, self.context_tokens), self.costs.transfer
            room = self.capacity_tokens - self.context_tokens
            first = first if self.token_bytes else 0.0
            self._decode_terms = step, self.costs.decode[2], first, byte * self.token_bytes, room
        return self._decode_terms

    @property
    def work_tokens(self) -> int:
        return self.prefill_tokens + self.output_tokens

    def replace(self, old: Load, new: Load) -> None:
        """Takes `old` off the load and puts `new` on it."""
        self.requests += new.requests - old.requests
        self.prefill_tokens += new.prefill_tokens - old.prefill_tokens
        self.output_tokens += new.output_tokens - old.output_tokens
        self.context_tokens += new.context_tokens - old.context_tokens
        self.prefills += new.prefills - old.prefills
        self.attended_tokens += new.attended_tokens - old.attended_tokens
        self._prefill_terms = self._decode_terms = None

    def learn(self, costs: Costs) -> None:
        """What things take there by now."""
        self.costs = costs
        self._prefill_terms = self._decode_terms = None


class PlacementRequest(NamedTuple):
    """What is to be placed.

    Attributes:
        tokens: of the prompt and of what was generated before a move.
        turn: differs from request to request, by 1 within a router.
        session: the client's name for what belongs together; empty: none.
        cached: instance id → how many leading tokens its pool has, as far as the router knows.
        output_tokens: to be generated at most.
        decode: an instance to decode is wanted, else one to prefill.
        alone: there is nobody to prefill but those who decode.
    """

    tokens: int
    turn: int = 0
    session: str = ""
    cached: Mapping[str, int] = MappingProxyType({})
    output_tokens: int = 1
    decode: bool = False
    alone: bool = False

    @property
    def spread(self) -> int:
        """Over how many tokens a wait before the second one counts as spread."""
        return max(1, min(SPREAD, self.output_tokens))

    def cached_on(self, candidate: Candidate) -> int:
        return self.cached.get(candidate.instance_id, 0)

    def uncached(self, candidate: Candidate) -> int:
        return self.tokens - self.cached_on(candidate)


Scores = list[tuple[float, Candidate]]
Policy = Callable[[Sequence[Candidate], PlacementRequest], Scores]


class Scored(NamedTuple):
    """A candidate as it was when it was scored."""

    instance: str
    score: float
    requests: int
    prefill_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Decision:
    """What was picked, and from what.

    Attributes:
        policy: the one that decided in the end.
        why: in words.
        candidates: the best few, the chosen one first.
        considered: how many there were.
    """

    policy: str
    chosen: str
    why: str
    candidates: list[Scored]
    considered: int

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "candidates": [one._asdict() for one in self.candidates]}


def round_robin(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """One after the other, in order of their names."""
    ordered = sorted(candidates, key=NAME)
    return [((rank - request.turn) % len(ordered), candidate) for rank, candidate in enumerate(ordered)]


def least_loaded(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """The least work left, in tokens."""
    return [(c.work_tokens, c) for c in candidates]


def power_of_two(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """The less loaded of two drawn at random: several routers with the same news do not all run to the same instance."""
    ordered = sorted(candidates, key=NAME)
    return least_loaded(Random(request.turn).sample(ordered, min(2, len(ordered))), request)


def session(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """The instance of the session, by rendezvous hashing: one that leaves moves its own sessions only, a new one takes
    those that are its own from now on."""
    seed, drawn = xxhash.xxh3_64_intdigest(request.session.encode()), xxhash.xxh3_64_intdigest
    return [(drawn(c.instance_id.encode(), seed) / 2**64, c) for c in candidates]


def prefix_aware(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """The fewest tokens to compute before this request has its turn and its KV: what is queued, and what is not cached."""
    tokens, cached = request.tokens, request.cached
    return [(c.work_tokens + tokens - cached.get(c.instance_id, 0), c) for c in candidates]


def auto(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Prefill: the earliest first token. Decode: the shortest time between tokens. Both in seconds, by forecast."""
    if request.decode:
        return _times_between_tokens(candidates, request)
    return _times_to_first_token(candidates, request)


def time_to_first_token(candidate: Candidate, request: PlacementRequest) -> float:
    """Forecast, in seconds: what is queued there, one step of what it decodes, and what is not cached."""
    return _times_to_first_token([candidate], request)[0][0]


def _times_to_first_token(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """One loop without calls, since there may be hundreds of them for each request."""
    tokens, cached_on = request.tokens, request.cached.get
    scores = []
    for c in candidates:
        queued, token, pair = c._prefill_terms or c.prefill_terms()
        cached = cached_on(c.instance_id, 0)
        uncached = tokens - cached
        scores.append((queued + (token + pair * (cached + uncached / 2)) * uncached, c))  # `attended`, written out
    return scores


def time_between_tokens(candidate: Candidate, request: PlacementRequest) -> float:
    """Forecast, in seconds: a step with this request in it, and its share of the wait for KV and for room in the pool."""
    return _times_between_tokens([candidate], request)[0][0]


def _times_between_tokens(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Like `_times_to_first_token`."""
    tokens, cached_on, spread, alone = request.tokens, request.cached.get, request.spread, request.alone
    scores = []
    for c in candidates:
        step, token, first, moved_token, room = c._decode_terms or c.decode_terms()
        step += token * tokens
        if alone and c.both:
            wait = time_to_first_token(c, request)
        else:
            uncached = tokens - cached_on(c.instance_id, 0)
            wait = first + moved_token * uncached if uncached else 0.0
        if tokens > room:
            wait += step * c.output_tokens / max(1, c.requests)  # until one of them ends
        scores.append((step + wait / spread, c))
    return scores


POLICIES: dict[str, Policy] = {
    "auto": auto,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "session": session,
    "prefix_aware": prefix_aware,
}
AUTO_DECODE = "the shortest time between tokens by forecast, in seconds"
TOLERANCE = {"auto": 0.1}  # forecasts are no better than that
WHY = {
    "auto": "the earliest first token by forecast, in seconds",
    "round_robin": "its turn",
    "least_loaded": "the least work left, in tokens",
    "power_of_two": "the less work left, in tokens, of two drawn at random",
    "session": "the session's place",
    "prefix_aware": "the fewest tokens to compute, queued ones and those not cached",
}


def decide(policy: str, candidates: Sequence[Candidate], request: PlacementRequest) -> Decision:
    """Picks one of the candidates, of which there is at least one."""
    why = ""
    if policy == "session" and not request.session:
        policy, why = "least_loaded", "there is no session to go by; "
    scores = POLICIES[policy](candidates, request)
    best = sorted([score for score, _ in scores])[:SHOWN]
    limit = best[0] * (1 + TOLERANCE.get(policy, 0))
    near = [scored for scored in scores if scored[0] <= limit]
    if not request.decode:
        near = _least(near, [request.uncached(c) for _, c in near])
    near = _least(near, [c.requests for _, c in near])
    equal = sorted(_least(near, [c.work_tokens for _, c in near]), key=_rank)
    chosen = equal[request.turn % len(equal)]
    few = sorted([scored for scored in scores if scored[0] <= best[-1]], key=_rank)[:SHOWN]
    others = [scored for scored in few if scored is not chosen]
    shown = [_shown(score, candidate, request) for score, candidate in (chosen, *others[: SHOWN - 1])]
    why += AUTO_DECODE if policy == "auto" and request.decode else WHY[policy]
    return Decision(policy, chosen[1].instance_id, why, shown, len(candidates))


def _least(scores: Scores, amounts: list[int]) -> Scores:
    """Those that have the least of something."""
    least = min(amounts)
    return [scored for scored, amount in zip(scores, amounts, strict=True) if amount == least]


def _rank(scored: tuple[float, Candidate]) -> tuple[float, str]:
    """By name where the scores are equal."""
    return scored[0], scored[1].instance_id


def _shown(score: float, candidate: Candidate, request: PlacementRequest) -> Scored:
    work = candidate.requests, candidate.prefill_tokens, candidate.output_tokens
    return Scored(candidate.instance_id, score, *work, request.cached_on(candidate))
