"""A cache with two bounds: the number of its entries and the sum of their sizes. The least recently used one goes first."""

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Maps strings to values, at most `max_entries` of them and at most `max_bytes` in all, keys included."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Value | None:
        """Return the value, which becomes the most recently used one; None if it is not cached."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: str, value: Value, size: int) -> None:
        """Store a value of `size` bytes and evict until the bounds hold. A value beyond the bound itself is not stored."""
        if key in self._entries:
            self._evict(key)
        self._entries[key] = value, size + len(key)
        self.num_bytes += size + len(key)
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            self._evict(next(iter(self._entries)))

    def _evict(self, key: str) -> None:
        self.num_bytes -= self._entries.pop(key)[1]
