"""Sets of characters as ranges of code points, without surrogates."""

from collections.abc import Iterable
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class CharacterSet:
    """Ranges in ascending order, apart from each other, both ends included."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, characters: str) -> "CharacterSet":
        return cls.from_ranges((ord(character), ord(character)) for character in characters)

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> "CharacterSet":
        merged = list[tuple[int, int]]()
        first, last = SURROGATES
        split = [part for low, high in ranges for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
        for low, high in sorted(split):
            if high < low:
                continue
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        return cls(tuple(merged))

    def complement(self) -> "CharacterSet":
        edges = [-1, *(edge for low, high in self.ranges for edge in (low, high)), LAST + 1]
        return CharacterSet.from_ranges((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2))

    def overlaps(self, other: "CharacterSet") -> bool:
        return any(low <= last and first <= high for low, high in self.ranges for first, last in other.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, code_point: int) -> bool:
        return any(low <= code_point <= high for low, high in self.ranges)

    @property
    def regex(self) -> str:
        """The regular expression of one of the characters, in Rust's syntax."""
        parts = (rf"\x{{{low:x}}}" + (rf"-\x{{{high:x}}}" if high > low else "") for low, high in self.ranges)
        return f"[{''.join(parts)}]"
