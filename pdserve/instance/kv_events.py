"""Which block keys an instance's pool has: what each router has yet to be told of it.

There is no log of events, only the difference between what the pool has and what a router has been told. So nothing can be
missed, a new router needs no snapshot of its own (it has been told nothing yet), and a router that reads slowly costs no
more than the pool's size, however much comes and goes in the meantime.
"""

import threading
from itertools import islice


class KVEventPublisher:
    """Thread-safe: the engine thread says what changes, the links take what is to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}
        self._routers: list[PendingKVEvents] = []

    def changed(self, key: bytes, cached: bool) -> None:
        """The pool has a key now that it had not, or the other way round."""
        with self._lock:
            if cached:
                self._keys[key] = None
            else:
                del self._keys[key]
            for untold in self._routers:
                untold.changed(key, cached)

    def open(self) -> "PendingKVEvents":
        """For a router that has been told nothing."""
        with self._lock:
            untold = PendingKVEvents(self._lock, self._keys)
            self._routers.append(untold)
        return untold

    def close(self, untold: "PendingKVEvents") -> None:
        with self._lock:
            self._routers.remove(untold)


class PendingKVEvents:
    """What one router has yet to be told. Its length is the number of keys."""

    def __init__(self, lock: threading.Lock, keys: dict[bytes, None]) -> None:
        self._lock = lock
        self._added = dict(keys)  # in the order in which they came: heads of prompts before tails
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._added) + len(self._removed)

    def changed(self, key: bytes, cached: bool) -> None:
        """Called under the lock."""
        news, withdrawn = (self._added, self._removed) if cached else (self._removed, self._added)
        if key in withdrawn:
            del withdrawn[key]  # the router has never heard that it was otherwise
        else:
            news[key] = None

    def take(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """What to tell next: removed and added keys, `limit` of them at most. Removed ones come first, so that the router
        never believes in more blocks than the pool can have."""
        with self._lock:
            removed = _pop(self._removed, limit)
            return removed, _pop(self._added, limit - len(removed))


def _pop(keys: dict[bytes, None], limit: int) -> list[bytes]:
    """The first keys, which are taken out."""
    first = list(islice(keys, limit))
    for key in first:
        del keys[key]
    return first
