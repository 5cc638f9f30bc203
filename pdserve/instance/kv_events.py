"""KV events of an instance: the changes of its pool's block keys that each router has not received yet.

Keys of further groups of blocks have names of their own (`group_key`).

There is no event log, only the difference between the pool's keys and those sent to each router. So no change can be missed,
a new router needs no separate snapshot (its difference is the whole pool), and a router that reads slowly costs at most the
pool's size in memory, however many blocks come and go.
"""

import threading
from collections.abc import Sequence
from itertools import islice

from pdserve.keys import group_key


class KVEventPublisher:
    """Distributes changes of the pool's keys to all subscribed routers.

    Thread-safe: the engine thread publishes, the router links consume.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}
        self._subscribers: list[PendingKVEvents] = []

    def store(self, key: bytes, parent: bytes | None = None, tokens: Sequence[int] = (), group: int = 0) -> None:
        """Record that a key was added to a group of the pool."""
        key = group_key(key, group) if group else key
        with self._lock:
            self._keys[key] = None
            for pending in self._subscribers:
                pending.add(key, cached=True)

    def remove(self, key: bytes, group: int = 0) -> None:
        """Record that a key was removed from a group of the pool."""
        key = group_key(key, group) if group else key
        with self._lock:
            del self._keys[key]
            for pending in self._subscribers:
                pending.add(key, cached=False)

    def subscribe(self) -> "PendingKVEvents":
        """Return the pending events of a new router, at first one for each key of the pool."""
        with self._lock:
            pending = PendingKVEvents(self._lock, self._keys)
            self._subscribers.append(pending)
        return pending

    def unsubscribe(self, pending: "PendingKVEvents") -> None:
        with self._lock:
            self._subscribers.remove(pending)


class PendingKVEvents:
    """Events that one router has not received yet. `len()` is the number of keys."""

    def __init__(self, lock: threading.Lock, keys: dict[bytes, None]) -> None:
        self._lock = lock
        self._added = dict(keys)  # in order of insertion: the first blocks of a prompt before the later ones
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._added) + len(self._removed)

    def add(self, key: bytes, cached: bool) -> None:
        """Add an event; it cancels a pending opposite one. The caller holds the lock."""
        events, opposite = (self._added, self._removed) if cached else (self._removed, self._added)
        if key in opposite:
            del opposite[key]
        else:
            events[key] = None

    def pop_batch(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Remove and return the next events as (removed keys, added keys), at most `limit` in all.

        Removals come first, so that a router never counts more blocks than the pool can hold.
        """
        with self._lock:
            removed = _pop(self._removed, limit)
            return removed, _pop(self._added, limit - len(removed))


def _pop(keys: dict[bytes, None], limit: int) -> list[bytes]:
    """Remove and return the first `limit` keys."""
    first = list(islice(keys, limit))
    for key in first:
        del keys[key]
    return first
