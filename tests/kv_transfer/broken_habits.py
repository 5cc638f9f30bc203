"""Mistakes that authors of connectors to a server make, as variants of the correct `WireConnector`.

Each costs a few lines, and most work in a quick trial. `BROKEN` lists the rule that finds each.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Result, Stats
from pdserve.kv_transfer.threaded import Full
from pdserve.kv_transfer.url import Query

if TYPE_CHECKING:
    from tests.kv_transfer.broken_clients import REQUEST, WireConnector
else:
    from pdserve_broken_clients import REQUEST, WireConnector


# Several operations at once.


class OneClient(WireConnector):
    """Uses one connection for all worker threads."""

    def _socket(self) -> socket.socket:
        return self._sockets[0] if self._sockets else self._connect()

    def _give_up(self, server: socket.socket, fault: OSError) -> None:
        if server in self._sockets:
            self._sockets.remove(server)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # not closed: another thread may be reading, and its number be used again


class OneReceiveBuffer(WireConnector):
    """Passes every loaded value through one buffer."""

    def open(self) -> None:
        self._buffer = bytearray(1 << 20)
        super().open()

    def get(self, name: str) -> memoryview | None:  # type: ignore[override]
        value = super().get(name)
        if value is None:
            return None
        self._buffer[: len(value)] = value
        return memoryview(self._buffer)[: len(value)]


class OneSendBuffer(WireConnector):
    """Copies every value into one buffer, and sends it from there."""

    def open(self) -> None:
        self._buffer = bytearray(1 << 20)
        super().open()

    def _send(self, server: socket.socket, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> None:
        self._buffer[: len(value)] = value
        server.sendall(REQUEST.pack(op, len(name), lease_s, len(value)) + name.encode())
        server.sendall(memoryview(self._buffer)[: len(value)])


class NameInAttribute(WireConnector):
    """Keeps the name of the value that it asks for in an attribute."""

    def get(self, name: str) -> bytes | None:
        self._asked = name
        self._socket()  # may have to connect first
        return super().get(self._asked)


class FailsIfBusy(WireConnector):
    """Raises a fault where it should wait for its lock."""

    def open(self) -> None:
        self._one_at_a_time = threading.Lock()
        super().open()

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        if not self._one_at_a_time.acquire(blocking=False):
            raise OSError("busy")
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(self._one_at_a_time.release)
            return super()._call(op, name, lease_s, value)


class LocksName(WireConnector):
    """Raises a fault where it should wait for another store of the same block."""

    def open(self) -> None:
        self._names: set[str] = set()
        super().open()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if name in self._names:
            raise OSError("this block is being stored")
        self._names.add(name)
        super().put(name, header, payload, lease_s)
        self._names.discard(name)


class CountsInTwoSteps(WireConnector):
    """Counts its blocks without a lock."""

    def open(self) -> None:
        self._loaded = 0
        super().open()

    def get(self, name: str) -> bytes | None:
        loaded = self._loaded
        value = super().get(name)
        self._loaded = loaded + (value is not None)
        return value

    def stats(self) -> Stats:
        stats = super().stats()
        stats.blocks["load"] = self._loaded
        return stats


# Many blocks.


class CutsBatch(WireConnector):
    """Loses the last byte of each block in a store of more than 64."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        self._cut = len(blocks) > 64
        super().put_many(blocks, lease_s)

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload[:-1] if self._cut else payload, lease_s)


class StoresFirst64(WireConnector):
    """Stores the first 64 blocks of an operation, and reports all as stored."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        super().put_many(blocks[:64], lease_s)
        for block in blocks[64:]:
            block.stored()


class LoadsFirst64(WireConnector):
    """Loads the first 64 blocks of an operation, and calls the others missing."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        super().get_many(blocks[:64])
        for block in blocks[64:]:
            block.missing()


class MatchesFirst100(WireConnector):
    """Asks for at most 100 keys in a match."""

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return super().contains_many(keys[:100])


class IndexInOneByte(WireConnector):
    """Numbers the blocks of an operation modulo 256."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        values = {i & 0xFF: super(IndexInOneByte, self).get(self._name(block.key)) for i, block in enumerate(blocks)}
        for i, block in enumerate(blocks):
            value = values[i & 0xFF]
            if value is None:
                block.missing()
            else:
                block.accept(value[:64], [memoryview(value)[64:]])


class SortsResults(WireConnector):
    """Loads in the order of the keys, and returns the outcomes in that order."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        pairs = sorted(zip(keys, block_ids, strict=True))
        return super().load([key for key, _ in pairs], [row for _, row in pairs])


class ReversesRows(WireConnector):
    """Loads the first block into the last row, and so on."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return super().load(keys, list(block_ids)[::-1])


class StoresHalf(WireConnector):
    """Reports an operation as stored of which it stored every other block."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        super().put_many(blocks[::2], lease_s)
        for block in blocks[1::2]:
            block.stored()


# Rare faults.


class RareStaleValue(WireConnector):
    """Returns the value before, once in 500 times."""

    def open(self) -> None:
        self._gets, self._before = itertools.count(1), b""
        super().open()

    def get(self, name: str) -> bytes | None:
        value, before = super().get(name), self._before
        self._before = value or b""
        return before if next(self._gets) % 500 == 0 else value


class RareMiss(RareStaleValue):
    """Does not find a value that is there, once in 500 times."""

    def get(self, name: str) -> bytes | None:
        return None if next(self._gets) % 500 == 0 else WireConnector.get(self, name)


class RareDelay(RareStaleValue):
    """Answers after the deadline, once in 500 times."""

    def get(self, name: str) -> bytes | None:
        if next(self._gets) % 500 == 0:
            time.sleep(1.2 * self.timeout)
        return WireConnector.get(self, name)


class FailsAfter1000(RareStaleValue):
    """Fails from its thousandth load on."""

    def get(self, name: str) -> bytes | None:
        if next(self._gets) > 1000:
            raise OSError("too many requests")
        return WireConnector.get(self, name)


# What was stored, and when.


class RemembersStored(WireConnector):
    """Does not send again what it has stored once."""

    def open(self) -> None:
        self._sent: set[str] = set()
        super().open()

    def renew(self, name: str, lease_s: float) -> bool:
        return name in self._sent

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload, lease_s)
        self._sent.add(name)


class ReturnsBeforeStored(WireConnector):
    """Stores half a second after it has said so."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        value = memoryview(bytes(payload))
        threading.Timer(0.5, self._put_later, (name, header, value, lease_s)).start()

    def _put_later(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        with contextlib.suppress(OSError):
            super().put(name, header, payload, lease_s)


class ReadsRowLater(ReturnsBeforeStored):
    """Stores half a second after it has said so, what the row holds then."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        threading.Timer(0.5, self._put_later, (name, header, payload, lease_s)).start()


class CachesValues(WireConnector):
    """Keeps what it has loaded, for ever."""

    def open(self) -> None:
        self._cache: dict[str, bytes | None] = {}
        super().open()

    def get(self, name: str) -> bytes | None:
        if name not in self._cache:
            self._cache[name] = super().get(name)
        return self._cache[name]


class AddsOnly(WireConnector):
    """Never replaces a value, and deletes none."""

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name)

    def delete(self, name: str) -> None:
        if not threading.current_thread().name.startswith("kv-"):  # allows the kit to tamper
            super().delete(name)


class IgnoresLease(WireConnector):
    """Stores everything without a lease."""

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        return super()._call(op, name, 0.0, value)


class FullIsStored(WireConnector):
    """Reports what a full server refuses as stored."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        with contextlib.suppress(Full):
            super().put(name, header, payload, lease_s)


# Names.


class CutsNames(WireConnector):
    """Uses names without their last eight digits, as where names are limited."""

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        return super()._call(op, name[:-8], lease_s, value)


class NamesWithoutNamespace(WireConnector):
    """Uses the key alone as the name."""

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        return super()._call(op, name.rpartition("/")[2], lease_s, value)


# Faults.


class FaultIsMiss(WireConnector):
    """Reports a fault of the server as a block that is not there."""

    def get(self, name: str) -> bytes | None:
        try:
            return super().get(name)
        except OSError:
            return None


class FaultIsFull(WireConnector):
    """Reports a fault of the server as a full one."""

    def renew(self, name: str, lease_s: float) -> bool:
        return False

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        try:
            super().put(name, header, payload, lease_s)
        except OSError:
            raise Full from None


class FaultIsStored(WireConnector):
    """Ignores a fault of the server in a store."""

    def renew(self, name: str, lease_s: float) -> bool:
        return False

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        with contextlib.suppress(OSError):
            super().put(name, header, payload, lease_s)


class ConnectsOnce(WireConnector):
    """Keeps a connection that was closed."""

    def _give_up(self, server: socket.socket, fault: OSError) -> None: ...


class MatchWaits(WireConnector):
    """Makes the caller of `match` wait for the server."""

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        future = super().match(keys)
        future.result()
        return future


class LeaksConnections(WireConnector):
    """Opens a connection for each operation, and closes none of them."""

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._open: list[socket.socket] = _LEAKED

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._open.append(socket.create_connection(self._address))
        super().get_many(blocks)


_LEAKED: list[socket.socket] = []  # keeps them from the garbage collector

# Class, the rule that finds it, and part of the detail that the kit reports.
BROKEN: list[tuple[type, str, str]] = [
    (OneClient, "concurrent-operations", "expected"),  # wrong blocks, or threads that wait for each other's answers
    (OneReceiveBuffer, "concurrent-operations", "blocks loaded, saw"),
    (OneSendBuffer, "concurrent-operations", "blocks loaded, saw"),
    (NameInAttribute, "concurrent-operations", "blocks loaded, saw"),
    (FailsIfBusy, "concurrent-operations", "failed: OSError: busy"),
    (LocksName, "concurrent-operations", "unavailable"),
    (CountsInTwoSteps, "concurrent-operations", "loaded in stats"),
    (CutsBatch, "large-operations", "128 corrupt"),
    (StoresFirst64, "large-operations", "128 keys to match, saw 64"),
    (LoadsFirst64, "large-operations", "saw 64 ok, 64 missing"),
    (MatchesFirst100, "large-operations", "128 keys to match, saw 100"),
    (IndexInOneByte, "large-operations", "saw 256 ok, 256 corrupt"),
    (SortsResults, "large-operations", "expected"),
    (ReversesRows, "round-trip", "wrong bytes"),
    (StoresHalf, "round-trip", "saw 2 ok, 2 missing"),
    (RareStaleValue, "random-loads", "1 corrupt"),
    (RareMiss, "random-loads", "missing, and there after all"),
    (RareDelay, "random-loads", "1 unavailable"),
    (FailsAfter1000, "random-loads", "1 unavailable"),
    (RemembersStored, "stored-again", "saw 1 ok, 3 missing"),
    (ReturnsBeforeStored, "round-trip", "missing"),
    (ReadsRowLater, "round-trip", "missing"),
    (CachesValues, "flipped-bytes", "byte 0 changed to be reported, saw ok"),
    (AddsOnly, "flipped-bytes", "all 3 blocks loaded, saw 2 ok, 1 corrupt"),
    (IgnoresLease, "leases-under-pressure", "leased blocks to stay"),
    (FullIsStored, "leases-under-pressure", "leased blocks to stay"),
    (CutsNames, "similar-keys", "corrupt"),
    (NamesWithoutNamespace, "foreign-namespace", "0 foreign blocks to match, saw 2"),
    (FaultIsMiss, "refused-operations", "a load to be unavailable while the store is gone, saw 2 missing"),
    (FaultIsFull, "refused-operations", "a store to be unavailable while the store is gone, saw 1 full"),
    (FaultIsStored, "refused-operations", "a store to be unavailable while the store is gone, saw 1 ok"),
    (ConnectsOnce, "resumption", "to be used again after it hung"),
    (MatchWaits, "caller-never-waits", "expected match to return while the store hangs"),
    (LeaksConnections, "clean-close", "expected"),
]

# The kit reports these after its wait limits, which tests reduce.
SLOW_TO_DETECT = (OneClient, ConnectsOnce, MatchWaits, LeaksConnections)
