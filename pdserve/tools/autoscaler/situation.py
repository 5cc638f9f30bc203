"""The situation of a fleet: what a forecast begins with, and the requests that it is for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.tools.bench.requests import Request


@dataclass(frozen=True)
class Situation:
    """Input of a forecast: the fleet and its requests up to now, and the requests that are expected.

    Attributes:
        began_at: beginning of the replayed part of the window, on the routers' clock in seconds.
        now: its end.
        members: roles of the instances at `began_at`, by name.
        moves: (time, name, new role) since then, in order of time; an empty role: the instance left.
        received: requests since then.
        waiting: indices of those without a token.
        expected: requests after `now`.
        horizon: seconds after `now` in which they come.
        start_up_s: that the newest start has taken at least, if that is more than the profile says.
    """

    began_at: float
    now: float
    members: Mapping[str, str]
    moves: Sequence[tuple[float, str, str]]
    received: Sequence[Request]
    waiting: frozenset[int]
    expected: Sequence[Request]
    horizon: float
    start_up_s: float = 0.0

    @property
    def names(self) -> set[str]:
        """All instances that there are at some time."""
        return {*self.members, *(name for _, name, _ in self.moves)}

    @property
    def counts(self) -> Counter[str]:
        """Numbers of instances by role now."""
        roles = dict(self.members) | {name: role for _, name, role in self.moves}
        return Counter(role for role in roles.values() if role)
