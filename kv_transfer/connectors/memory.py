"""`memory://name?size=1GiB`: a store inside one process, shared by all connectors with the same name. For tests.

It is also the example of a connector over a plain key-value transport.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.threaded import Full, ThreadedConnector
from pdserve.kv_transfer.url import Query, split


@dataclass
class _Store:
    """Values by name, least recently used first. Values are immutable, so a reader needs no lock once it has one."""

    values: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    leases: dict[str, float] = field(default_factory=dict)  # end of the lease, monotonic
    bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_stores: dict[str, _Store] = {}


def unlink(url: str) -> None:
    """Remove the store. Connectors already attached keep using it."""
    _stores.pop(split(url).netloc, None)


class MemoryConnector(ThreadedConnector):
    scheme: ClassVar[str] = "memory"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, follows=True, one_process=True)

    def configure(self, query: Query) -> None:
        self._size = query.size("size", 1 << 30)

    def open(self) -> None:
        self._store = _stores.setdefault(split(self.url).netloc, _Store())

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        value = b"".join((header, payload))
        with self._store.lock:
            # Another connector may have stored it since `renew`, for longer.
            lease_end = max(self._store.leases.get(name, 0.0), time.monotonic() + lease_s)
            self._remove(name)
            self._make_room(len(value))
            self._store.values[name] = value
            self._store.leases[name] = lease_end
            self._store.bytes += len(value)

    def renew(self, name: str, lease_s: float) -> bool:
        with self._store.lock:
            if name not in self._store.values:
                return False
            self._store.leases[name] = max(self._store.leases.get(name, 0.0), time.monotonic() + lease_s)
            return True

    def get(self, name: str) -> Buffer | None:
        with self._store.lock:
            value = self._store.values.get(name)
            if value is not None:
                self._store.values.move_to_end(name)
            return value

    def contains(self, name: str) -> bool:
        return name in self._store.values

    def delete(self, name: str) -> None:
        with self._store.lock:
            self._remove(name)

    def release_many(self, keys: Sequence[bytes]) -> None:
        with self._store.lock:
            for key in keys:
                self._store.leases.pop(self._name(key), None)

    def _make_room(self, needed: int) -> None:
        now = time.monotonic()
        expired = (name for name in list(self._store.values) if self._store.leases.get(name, 0.0) <= now)
        while self._store.bytes + needed > self._size:
            victim = next(expired, None)
            if victim is None:
                raise Full
            self._remove(victim)

    def _remove(self, name: str) -> None:
        value = self._store.values.pop(name, None)
        self._store.leases.pop(name, None)
        self._store.bytes -= len(value or b"")
