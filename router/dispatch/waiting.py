"""Requests that wait because no instance is eligible: new ones, and streams that have lost theirs. Their tokens are known, so
any instance that attaches can take them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.errors import RequestError, Unavailable
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Wait

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WaitingGroup:
    """Choices of one prompt that wait together, or a single stream.

    Attributes:
        states: all of them, also those that have ended meanwhile.
        error: ends them if no instance comes in time.
        since: when they began to wait, on the fleet's `AwakeClock`.
    """

    states: Sequence[RequestState]
    error: Unavailable
    since: float

    @property
    def waiting(self) -> list[RequestState]:
        return [state for state in self.states if state.machine.state is State.WAITING]


class WaitingRequests:
    """The requests that wait.

    Args:
        timeout_s: seconds for which a group waits; 0: nothing waits.
        place: submits those of a group that still wait, or returns the error with which they end; raises `Unavailable` if
            no instance is eligible.
        fail: ends a request with an error.

    Attributes:
        groups: as keys, in order of arrival.
    """

    def __init__(
        self,
        timeout_s: float,
        fleet: Fleet,
        metrics: Metrics,
        place: Callable[[Sequence[RequestState]], RequestError | None],
        fail: Callable[[RequestState, RequestError], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._fleet = fleet
        self._metrics = metrics
        self._place = place
        self._fail = fail
        self.groups: dict[WaitingGroup, None] = {}
        self._suspects: dict[WaitingGroup, None] = {}  # those of them that wait to hear from an instance
        metrics.waiting_for_instance.set_function(lambda: sum(len(group.waiting) for group in self.groups))

    def add(self, states: Sequence[RequestState], error: Unavailable) -> None:
        """Let requests wait, which are on no instance."""
        if not self.groups:
            message = "no instance is available: requests wait for one for up to %g s (%s)"
            log.warning(message, self.timeout_s, error, extra={"event": "waiting"})
        for state in states:
            state.machine.wait()
            state.timeline.waits.append(Wait(self._fleet.now()))
        group = WaitingGroup(states, error, self._fleet.awake_now())
        self.groups[group] = None
        if states[0].is_suspect:
            self._suspects[group] = None
            self._fleet.on_heard = self._place_suspects

    def place(self) -> None:
        """Submit those for which an instance is eligible, in order of arrival."""
        self._place_of(self.groups)

    def _place_suspects(self) -> None:
        """Submit those for which an instance is eligible now that it has been heard from, in order of arrival."""
        self._place_of(self._suspects)

    def _place_of(self, groups: Iterable[WaitingGroup]) -> None:
        if not any(self._fleet.serving.values()):
            return
        for group in self._unfinished(groups):
            states = group.waiting
            try:
                error = self._place(states)
            except Unavailable:
                continue
            if error is not None:
                self._end(group, error, "refused")
                continue
            self._forget(group)
            for state in states:
                self.record_end(state, "placed")

    def end_overdue(self, now: float) -> None:
        """End those that have waited for too long."""
        for group in self._unfinished(self.groups):
            if now - group.since > self.timeout_s:
                self._end_unplaced(group, f"and none has come within {self.timeout_s:g} s")

    def end_all(self, reason: str) -> None:
        """End all of them for a reason, which follows the text of their errors."""
        for group in self._unfinished(self.groups):
            self._end_unplaced(group, reason)

    def record_end(self, state: RequestState, outcome: str) -> None:
        """Record that a request no longer waits, if it has."""
        if state.timeline.waits and (wait := state.timeline.waits[-1]).seconds is None:
            wait.seconds = self._fleet.now() - wait.at
            self._metrics.instance_waits.labels(outcome=outcome).inc()

    def _unfinished(self, groups: Iterable[WaitingGroup]) -> Iterator[WaitingGroup]:
        """Yield those of the groups of which some still wait, and forget the others."""
        for group in list(groups):
            if group.waiting:
                yield group
            else:
                self._forget(group)

    def _forget(self, group: WaitingGroup) -> None:
        del self.groups[group]
        self._suspects.pop(group, None)
        if not self._suspects:
            self._fleet.on_heard = None

    def _end_unplaced(self, group: WaitingGroup, reason: str) -> None:
        error = Unavailable(f"{group.error}, {reason}", kind=group.error.kind, retry_after_s=1)
        self._end(group, error, "expired")

    def _end(self, group: WaitingGroup, error: RequestError, outcome: str) -> None:
        for state in group.waiting:
            self.record_end(state, outcome)
            self._fail(state, error)
        self._forget(group)
