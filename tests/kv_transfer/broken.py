"""Connectors that break one rule each. `BROKEN` lists the rule and part of the expected report.

Their faults must not depend on chance or on the load of the machine: threads that have to meet wait for each other.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import takewhile
from typing import ClassVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import OperationFuture, Result, Stats
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer
from pdserve.kv_transfer.url import Query


def key_in(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])


class FlipsByte(MemoryConnector):
    """Flips a byte of large blocks and writes a valid header for the result."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if len(payload) == 8 << 20:
            changed = bytearray(payload)
            changed[12345] ^= 1
            header, payload = self.header_format.pack(key_in(name), changed), memoryview(changed)
        super().put(name, header, payload, lease_s)


class WritesOtherRow(MemoryConnector):
    """Overwrites the pool's first row in loads."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        super().get_many(blocks)
        self.memory.rows[0] = 0


class MergesDuplicates(MemoryConnector):
    """Returns one outcome for a key that is loaded twice in a call."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        rows = dict(zip(keys, block_ids, strict=True))
        return super().load(list(rows), list(rows.values()))


class NeverCompletes(MemoryConnector):
    """Never completes its loads."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return Future()


class CountsPastGap(MemoryConnector):
    """Counts all stored keys in a match, not the leading ones."""

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return sorted(super().contains_many(keys), reverse=True)


class StopsAtMissing(MemoryConnector):
    """Loads nothing after the first missing block."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        found = list(self.contains_many([block.key for block in blocks]))
        first = found.index(False) if False in found else len(found)
        super().get_many(blocks[:first])
        for block in blocks[first:]:
            block.missing()


class RaisesForMissing(MemoryConnector):
    """Raises an exception for a missing block."""

    def get(self, name: str) -> Buffer | None:
        return self._store.values[name]


class DoesNotFollow(MemoryConnector):
    """Loads only blocks already stored in `follow`, without waiting."""

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self.load(keys, block_ids)


class PublishesEarly(MemoryConnector):
    """Publishes a block of 256 KiB before its bytes are complete, and completes the first one only after it was read."""

    read: ClassVar[threading.Event] = threading.Event()

    def open(self) -> None:
        super().open()
        self.read.clear()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if len(payload) == 256 << 10:
            super().put(name, header, memoryview(bytes(len(payload))), lease_s)
            self.read.wait(60)
        super().put(name, header, payload, lease_s)

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        if value is not None:
            self.read.set()
        return value


class RejectsConcurrentStores(MemoryConnector):
    """Fails if another connector is storing the same block. Of four, the first waits until that has happened once."""

    attached: ClassVar[int] = 0

    busy: ClassVar[set[str]] = set()
    met: ClassVar[threading.Event] = threading.Event()

    def open(self) -> None:
        super().open()
        RejectsConcurrentStores.attached += 1
        self.met.clear()

    def shut(self) -> None:
        RejectsConcurrentStores.attached -= 1

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if name in self.busy:
            self.met.set()
            raise OSError("another connector is storing this block")
        self.busy.add(name)
        if self.attached == 4:
            self.met.wait(60)
        super().put(name, header, payload, lease_s)
        self.busy.discard(name)


class RejectsOtherProcesses(FileConnector):
    """Fails if another process is storing; threads of one process wait for each other."""

    turns: ClassVar[threading.Lock] = threading.Lock()

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        with self.turns, open(f"{self._root}/busy", "w") as busy:
            fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
            super()._write(block, path, lease_s)


class WritesInPlace(FileConnector):
    """Writes to the final path in two steps."""

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        header, payload = block.read()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            file.write(header)
            time.sleep(0.02)
            file.write(payload)
        block.stored()


class LeavesLockFile(FileConnector):
    """Locks by creating a file, which a killed process leaves behind."""

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        give_up_at = time.monotonic() + 3.0
        while True:
            try:
                os.close(os.open(f"{self._root}/turn", os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.001)
        try:
            super()._write(block, path, lease_s)
            time.sleep(0.002)  # longer than the rest, so that most kills hit it
        finally:
            os.unlink(f"{self._root}/turn")


class SignsAnything(MemoryConnector):
    """Writes a valid header for any stored bytes."""

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        return (
            None
            if value is None
            else self.header_format.pack(key_in(name), value[HEADER_BYTES:]) + value[HEADER_BYTES:]
        )


class NeverReplacesCorrupt(MemoryConnector):
    """Never replaces a stored block, even if it is corrupt."""

    def delete(self, name: str) -> None:
        if not threading.current_thread().name.startswith("kv-"):  # allows the kit to tamper
            super().delete(name)


class IgnoresNamespace(MemoryConnector):
    """Stores the blocks of all models under the same names, and makes headers of other models its own."""

    def open(self) -> None:
        super().open()
        self._name = lambda key: f"{self.memory.layout.version}/{key.hex()}"  # type: ignore[method-assign]

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        if value is None or value[16:32] == self.namespace:
            return value
        return self.header_format.pack(key_in(name), value[HEADER_BYTES:]) + value[HEADER_BYTES:]


class IgnoresVersions(MemoryConnector):
    """Ignores the versions in the header."""

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        if value is None:
            return None
        right = self.header_format.pack(key_in(name), b"")
        return bytes(value[:8]) + right[8:16] + bytes(value[16:])


class EndsLeasesEarly(MemoryConnector):
    """Keeps blocks for 0.2 seconds, whatever their lease."""

    def get(self, name: str) -> Buffer | None:
        return super().get(name) if self.contains(name) else None

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload, min(lease_s, 0.2))

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name)

    def contains(self, name: str) -> bool:
        return self._store.leases.get(name, 0.0) > time.monotonic()


class ShortensLease(MemoryConnector):
    """Sets the lease of a block to that of its latest store, and deletes the block when that ends before an earlier one."""

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._shortened: dict[str, float] = {}  # end of the lease by name, monotonic

    def renew(self, name: str, lease_s: float) -> bool:
        end = time.monotonic() + lease_s
        if end < self._store.leases.get(name, 0.0):
            self._shortened[name] = end
        return super().renew(name, lease_s)

    def get(self, name: str) -> Buffer | None:
        return super().get(name) if self.contains(name) else None

    def contains(self, name: str) -> bool:
        if self._shortened.get(name, float("inf")) < time.monotonic():
            del self._shortened[name]
            self.delete(name)
        return super().contains(name)


class ExpiresAfterFirstLease(MemoryConnector):
    """Deletes a small block when the lease of its first store ends, whatever later stores asked for."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload, lease_s)
        if not lease_s:
            del self._store.leases[name]  # stays until it is evicted

    def get(self, name: str) -> Buffer | None:
        return super().get(name) if self.contains(name) else None

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name) if self._is_small(name) else super().renew(name, lease_s)

    def contains(self, name: str) -> bool:
        has_lease = self._store.leases.get(name, float("inf")) > time.monotonic()
        return super().contains(name) and (has_lease or not self._is_small(name))

    def _is_small(self, name: str) -> bool:
        return len(self._store.values.get(name, b"")) < 1 << 20


class KeepsFirstLease(MemoryConnector):
    """Leaves the lease of a block that is already there as it is, and evicts the block when that has ended."""

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name)


class RaisesOnRelease(MemoryConnector):
    """Raises an exception for the release of an unknown key."""

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        for key in keys:
            if self._name(key) not in self._store.values:
                raise KeyError(key.hex())
        super().release(keys)


class DoesNotProlong(MemoryConnector):
    """Declares that it prolongs leases, and does nothing."""

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None: ...


class ReleasesForEver(MemoryConnector):
    """Hides a released block, also from loads after it has been stored again."""

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._released: set[str] = set()

    def release_many(self, keys: Sequence[bytes]) -> None:
        super().release_many(keys)
        self._released |= {self._name(key) for key in keys} & self._store.values.keys()

    def get(self, name: str) -> Buffer | None:
        return super().get(name) if self.contains(name) else None

    def contains(self, name: str) -> bool:
        return super().contains(name) and name not in self._released


class EvictsLeased(MemoryConnector):
    """Evicts leased blocks when the store is full."""

    def _make_room(self, needed: int) -> None:
        self._store.leases.clear()
        super()._make_room(needed)


class MixesUpBlocks(MemoryConnector):
    """Stores a new block under the evicted block's name once the store is full."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        before = list(self._store.values)
        super().put(name, header, payload, lease_s)
        for victim in set(before) - set(self._store.values):
            self._store.values[victim] = self.header_format.pack(key_in(victim), payload) + bytes(payload)


class IgnoresDeadline(MemoryConnector):
    """Waits for its store without a deadline."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._watchdog.watch = lambda operation: None  # type: ignore[method-assign]  # the fault


class WritesAfterDeadline(MemoryConnector):
    """Writes into rows after the deadline, because its blocks have no fence."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            block._fence = threading.Lock()  # type: ignore[assignment]
        super().get_many(blocks)


class WritesAfterCancel(MemoryConnector):
    """Lets its loads be cancelled, but continues to write into the rows. Of eight MiB, it writes when it is closed."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        while len(blocks) == 8 and len(self.memory.rows[0]) == 1 << 20 and not self._closed:
            time.sleep(0.001)
        super().get_many(blocks)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        cancellable: Future[Result] = Future()

        def copy_result(done: Future[Result]) -> None:
            if cancellable.set_running_or_notify_cancel():
                cancellable.set_result(done.result())

        super().load(keys, block_ids).add_done_callback(copy_result)
        return cancellable


class IgnoresCancel(MemoryConnector):
    """Returns futures that accept a request to cancel, and moves all blocks all the same."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        future: OperationFuture[Result] = OperationFuture(lambda: None)
        super().load(keys, block_ids).add_done_callback(lambda done: future.set_result(done.result()))
        return future


class HidesCancel(MemoryConnector):
    """Claims that its operations can be cancelled, and returns plain futures."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        super().load(keys, block_ids).add_done_callback(lambda done: future.set_result(done.result()))
        return future


class ClosesForAll(MemoryConnector):
    """Shares a client among the connectors of a URL, and closes it with the first of them."""

    clients: ClassVar[dict[str, threading.Event]] = {}  # set while it is usable

    def open(self) -> None:
        super().open()
        self._client = self.clients.setdefault(self.url, threading.Event())
        self._client.set()

    def shut(self) -> None:
        self._client.clear()
        self.clients.pop(self.url, None)

    def renew(self, name: str, lease_s: float) -> bool:
        if not self._client.is_set():
            raise OSError("the client is closed")
        return super().renew(name, lease_s)


class RefusesSecond(MemoryConnector):
    """Refuses to attach while another connector of the process is attached, as libraries with a global state do."""

    attached: ClassVar[set[str]] = set()

    def open(self) -> None:
        if self.url in self.attached:
            raise SetupError("the store is open in this process already")
        super().open()
        self.attached.add(self.url)

    def shut(self) -> None:
        self.attached.discard(self.url)


class LimitsClients(MemoryConnector):
    """Fails in all but the first five connectors of a URL that are attached, as servers do that limit their clients."""

    attached: ClassVar[dict[str, list[MemoryConnector]]] = {}

    def open(self) -> None:
        super().open()
        self._attached = self.attached.setdefault(self.url, [])
        self._attached.append(self)

    def shut(self) -> None:
        self._attached.remove(self)

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if self not in self._attached[:5]:
            raise OSError("too many clients")
        super().put(name, header, payload, lease_s)


class SharedBuffer(MemoryConnector):
    """Sends from one buffer shared by all connectors of the process. The first waits until another has filled it, too."""

    buffer: ClassVar[bytes] = b""
    filled: ClassVar[threading.Barrier] = threading.Barrier(2)

    def open(self) -> None:
        super().open()
        self.filled.reset()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        SharedBuffer.buffer = bytes(payload)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.filled.wait(10)
            self.filled.abort()
        super().put(name, header, memoryview(SharedBuffer.buffer), lease_s)


class StoreWaits(MemoryConnector):
    """Makes the caller of `store` wait for the store."""

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        future = super().store(keys, block_ids, lease_s=lease_s)
        wait([future])
        return future


class ReleaseWaits(MemoryConnector):
    """Makes the caller of `release` wait for the store."""

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self.match(keys).result()
        super().release(keys)


class MatchesInCaller(MemoryConnector):
    """Queries the store in the thread of the caller of `match`."""

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        found: Future[int] = Future()
        found.set_result(sum(takewhile(bool, self.contains_many(keys))))
        return found


class ReturnsLiveStats(MemoryConnector):
    """Returns its counters themselves instead of a snapshot."""

    def stats(self) -> Stats:
        return self._stats


class DeletesOnClose(MemoryConnector):
    """Deletes all blocks when closed."""

    def shut(self) -> None:
        self._store.values.clear()


class LeavesThread(MemoryConnector):
    """Leaves a thread behind."""

    def open(self) -> None:
        super().open()
        threading.Thread(target=time.sleep, args=(600,), name="left-behind", daemon=True).start()


class LeavesFile(MemoryConnector):
    """Leaves an open file behind."""

    def open(self) -> None:
        super().open()
        os.open(os.devnull, os.O_RDONLY)


# Class, the rule it breaks, and part of the detail that the kit reports.
BROKEN: list[tuple[type, str, str]] = [
    (FlipsByte, "round-trip", "1 wrong bytes"),
    (WritesOtherRow, "round-trip", "only the given rows to change"),
    (MergesDuplicates, "results", "expected 2 outcomes of load, saw 1"),
    (NeverCompletes, "results", "within the timeout of 3 s"),
    (CountsPastGap, "leading-match", "3 leading keys, the fourth being missing, saw 5"),
    (StopsAtMissing, "missing", "saw ok, missing, missing"),
    (RaisesForMissing, "missing", "saw its future raise KeyError"),
    (DoesNotFollow, "following", "saw ok, missing"),
    (PublishesEarly, "whole-blocks", "OK or missing, saw a load that returned corrupt"),
    (RejectsConcurrentStores, "concurrent-stores", "all 8 blocks stored"),
    (RejectsOtherProcesses, "between-processes", "every process to store all blocks"),
    (WritesInPlace, "whole-blocks", "saw a load that returned corrupt"),
    (WritesInPlace, "killed-writer", "saw a load that returned corrupt"),
    (LeavesLockFile, "killed-writer", "expected all 8 blocks stored"),
    (SignsAnything, "flipped-bytes", "byte 0 changed to be reported, saw ok"),
    (NeverReplacesCorrupt, "flipped-bytes", "all 3 blocks loaded, saw 2 ok, 1 corrupt"),
    (IgnoresNamespace, "foreign-namespace", "0 foreign blocks to match, saw 2"),
    (IgnoresVersions, "older-layout", "another header version in its header to be rejected"),
    (EndsLeasesEarly, "lease", "4 blocks to stay while they are leased"),
    (ShortensLease, "lease", "4 blocks to stay while they are leased"),
    (ExpiresAfterFirstLease, "longer-lease", "to stay for the longer of two leases, saw 0 of 4"),
    (RaisesOnRelease, "release", "saw KeyError"),
    (ReleasesForEver, "release", "expected all 4 blocks loaded"),
    (DoesNotProlong, "prolonged-lease", "with prolonged leases to stay in a full store, saw 0 left"),
    (EvictsLeased, "leases-under-pressure", "leased blocks to stay"),
    (KeepsFirstLease, "leases-under-pressure", "leased blocks to stay"),
    (MixesUpBlocks, "capacity", "wrong bytes"),
    (IgnoresDeadline, "deadline", "not done after"),
    (WritesAfterDeadline, "deadline", "rows to be left alone after the deadline"),
    (WritesAfterCancel, "cancelled", "the rows of a cancelled load"),
    (IgnoresCancel, "requested-cancel", "expected 2 cancelled, saw 2 ok"),
    (HidesCancel, "requested-cancel", "expected load to return an OperationFuture, saw Future"),
    (ClosesForAll, "two-connectors", "expected all 2 blocks stored, saw 2 unavailable"),
    (RefusesSecond, "two-connectors", "another connector of this URL to attach in the same process, saw SetupError"),
    (RefusesSecond, "many-threads", "another connector of this URL to attach in the same process, saw SetupError"),
    (LimitsClients, "many-threads", "expected all 4 blocks stored"),
    (SharedBuffer, "many-threads", "all 4 blocks"),
    (StoreWaits, "caller-never-waits", "expected store to return while the store hangs"),
    (ReleaseWaits, "caller-never-waits", "expected release to return while the store hangs"),
    (MatchesInCaller, "caller-never-waits", "contains_many called in the caller's"),
    (ReturnsLiveStats, "counts", "a snapshot"),
    (DeletesOnClose, "content-stays", "all 16 blocks loaded"),
    (LeavesThread, "clean-close", "left-behind"),
    (LeavesFile, "clean-close", "open files as before"),
]

# The kit reports these after its wait limits, which tests reduce.
# Rules that see what the first one names. Operations at scale see much of what all others name.
ALSO_SEEN = {
    "similar-keys": {"between-processes", "killed-writer"},
    "stored-again": {"prolonged-lease", "leases-under-pressure", "capacity"},
    "concurrent-stores": {"results"},
}


def seen_by(rule: str) -> set[str]:
    """Return the rules that may see a variant which a rule names, that one included."""
    return {rule, "concurrent-operations", "large-operations", "random-loads"} | ALSO_SEEN.get(rule, set())


SLOW_TO_DETECT = (NeverCompletes, IgnoresDeadline, StoreWaits, ReleaseWaits, LeavesThread, LeavesFile)
