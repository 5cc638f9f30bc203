"""Changes of a fleet that the controller considers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

CHANGE_COUNTS = (1, 2, 4, 8, 16)  # instances that may change their role, or start, at once
MAX_FLIPPED_SHARE = 0.5  # of the fleet, when it is more than one
ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Change:
    """Instances that change their role, start or end.

    Attributes:
        before: their role; empty if they are started.
        after: their new role; empty if they end.
        others: of a start, instances of the other role that start with them.
    """

    before: str
    after: str
    count: int = 1
    others: int = 0

    def __str__(self) -> str:
        if self.others:
            return " and ".join(map(str, self.parts)).replace("and start", "and")
        if not self.before:
            return f"start {self.count} {self.after}"
        return f"{self.count} {self.before} to {self.after}" if self.after else f"stop {self.count} {self.before}"

    @property
    def is_flip(self) -> bool:
        return bool(self.before and self.after)

    @property
    def parts(self) -> list["Change"]:
        """The same as changes of one role each."""
        both = (
            replace(self, others=0),
            Change("", ROLES[1 - ROLES.index(self.after)] if self.others else "", self.others),
        )
        return [one for one in both if one.count]

    def undoes(self, other: "Change") -> bool:
        """Return whether a part of it is the reverse of a part of the other."""
        return any((one.before, one.after) == (two.after, two.before) for one in self.parts for two in other.parts)

    def apply(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the numbers of instances by role after the change."""
        after = Counter(counts)
        for part in self.parts:
            for role, sign in ((part.before, -1), (part.after, 1)):
                if role:
                    after[role] += sign * part.count
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
    """Yield, for either role and for as many of both, the starts of instances, small ones first."""
    yield from ([Change("", role, number) for number in _numbers(unit)] for role in ROLES)
    yield [Change("", ROLES[0], number, number) for number in _numbers(unit)]


def shifted(change: Change, unit: int = 1) -> list[Change]:
    """Return a start with an instance more of one role and one fewer of the other, for either of them."""
    prefill, decode = (sum(one.count for one in change.parts if one.after == role) for role in ROLES)
    pairs = [(prefill + step, decode - step) for step in (-unit, unit)]
    return [
        Change("", ROLES[0], p, d) if p else Change("", ROLES[1], d) for p, d in pairs if p >= 0 and d >= 0 and p + d
    ]


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> list[Change]:
    """Return changes of roles and starts that turn some numbers of instances into others; ends are left out."""
    gained = {role: after.get(role, 0) - before.get(role, 0) for role in ROLES}
    flipped = min(max(gained.values()), -min(gained.values()))
    fewer, more = sorted(ROLES, key=lambda role: gained[role])
    found = [Change(fewer, more, flipped)] if flipped > 0 else []
    return found + [Change("", role, gained[role]) for role in ROLES if gained[role] > 0 and not found]


def stops(counts: Mapping[str, int], least: Mapping[str, int], unit: int = 1) -> Iterator[Change]:
    """Yield the ends of `unit` instances that leave at least `least` instances of each role."""
    yield from (Change(role, "", unit) for role in ROLES if counts[role] - unit >= max(1, least[role]))


def _numbers(unit: int) -> list[int]:
    return [unit * count for count in CHANGE_COUNTS]
