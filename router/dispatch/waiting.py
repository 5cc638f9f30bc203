"""Requests that wait because no instance is eligible: new ones, and streams that have lost theirs. Their tokens are known, so
any instance that attaches can take them. The current time is an argument.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.errors import Unavailable
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import InstanceHandle


@dataclass(eq=False)
class WaitingGroup:
    """Choices of one prompt that wait together, or a single stream.

    Attributes:
        states: all of them, also those that have ended meanwhile.
        error: ends them if no instance comes in time.
        since: when they began to wait.
        failed: the instance that a stream has lost, and that does not take it again without a new connection; None for new
            requests.
    """

    states: Sequence[RequestState]
    error: Unavailable
    since: float
    failed: InstanceHandle | None = None

    @property
    def waiting(self) -> list[RequestState]:
        return [state for state in self.states if state.machine.state is State.WAITING]


class WaitingRequests:
    """The waiting groups, in order of arrival."""

    def __init__(self, timeout_s: float) -> None:
        """0 seconds: nothing waits."""
        self.timeout_s = timeout_s
        self._groups: dict[WaitingGroup, None] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        """Yield the groups that have not ended; the caller may remove them meanwhile."""
        for group in list(self._groups):
            if group.waiting:
                yield group
            else:
                del self._groups[group]

    @property
    def num_requests(self) -> int:
        return sum(len(group.waiting) for group in self._groups)

    def add(self, group: WaitingGroup) -> None:
        self._groups[group] = None

    def remove(self, group: WaitingGroup) -> None:
        del self._groups[group]

    def pop_expired(self, now: float) -> list[WaitingGroup]:
        """Remove and return the groups that have waited for too long."""
        expired = [group for group in self if now - group.since > self.timeout_s]
        for group in expired:
            self.remove(group)
        return expired
