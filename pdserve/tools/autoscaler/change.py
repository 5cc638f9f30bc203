"""Changes of a fleet that the controller considers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CHANGE_COUNTS = (1, 2, 4, 8, 16)  # instances that may change their role, or start, at once
MAX_FLIPPED_SHARE = 0.5  # of the fleet, when it is more than one
ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Change:
    """Instances that change their role, start or end.

    Attributes:
        before: their role; empty if they are started.
        after: their new role; empty if they end.
    """

    before: str
    after: str
    count: int = 1

    def __str__(self) -> str:
        if not self.before:
            return f"start {self.count} {self.after}"
        return f"{self.count} {self.before} to {self.after}" if self.after else f"stop {self.count} {self.before}"

    @property
    def is_flip(self) -> bool:
        return bool(self.before and self.after)

    def undoes(self, other: "Change") -> bool:
        return (self.before, self.after) == (other.after, other.before)

    def apply(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the numbers of instances by role after the change."""
        after = Counter(counts)
        for role, sign in ((self.before, -1), (self.after, 1)):
            if role:
                after[role] += sign * self.count
        return after


@dataclass(frozen=True)
class MadeChange:
    """A change as routers keep it, made at a time on their clock in seconds, and not to be undone until another one."""

    at: float
    before: str
    after: str
    count: int
    until: float

    @property
    def change(self) -> Change:
        return Change(self.before, self.after, self.count)


def flips(counts: Mapping[str, int], least: Mapping[str, int], unit: int = 1) -> Iterator[list[Change]]:
    """Yield, for either direction, the changes that leave at least `least` instances of each role, small ones first.

    Args:
        unit: the smallest one, of which the others are multiples.
    """
    size = counts[ROLES[0]] + counts[ROLES[1]]
    for before, after in (ROLES, ROLES[::-1]):
        most = min(counts[before] - max(1, least[before]), max(1, int(MAX_FLIPPED_SHARE * size)))
        yield [Change(before, after, number) for number in _numbers(unit) if number <= most]


def starts(unit: int = 1) -> Iterator[list[Change]]:
    """Yield, for either role, the starts of instances, small ones first."""
    yield from ([Change("", role, number) for number in _numbers(unit)] for role in ROLES)


def stops(counts: Mapping[str, int], least: Mapping[str, int], unit: int = 1) -> Iterator[Change]:
    """Yield the ends of `unit` instances that leave at least `least` instances of each role."""
    yield from (Change(role, "", unit) for role in ROLES if counts[role] - unit >= max(1, least[role]))


def _numbers(unit: int) -> list[int]:
    return [unit * count for count in CHANGE_COUNTS]
