"""Connectors that break one rule each. `BROKEN` says which, and what the kit should say.

What is wrong with them must not depend on chance, on a busy machine least of all: where two have to meet, they wait for each
other.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import takewhile
from typing import Any, ClassVar

from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Result, Stats
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer


def key_in(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])


class Wrong(MemoryConnector):
    """Flips a byte of large blocks, and signs the result."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if len(payload) == 8 << 20:
            changed = bytearray(payload)
            changed[12345] ^= 1
            header, payload = self.seal.pack(key_in(name), changed), memoryview(changed)
        super().put(name, header, payload, lease_s)


class Elsewhere(MemoryConnector):
    """Uses the pool's first row for itself."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        super().get_many(blocks)
        self.memory.rows[0] = 0


class Merging(MemoryConnector):
    """Gives one outcome for a key that is asked for twice."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        rows = dict(zip(keys, block_ids, strict=True))
        return super().load(list(rows), list(rows.values()))


class Silent(MemoryConnector):
    """Its loads never end."""

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return Future()


class PastTheGap(MemoryConnector):
    """Counts all keys that are there, not the leading ones."""

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return sorted(super().contains_many(keys), reverse=True)


class GivesUp(MemoryConnector):
    """Loads nothing after the first missing block."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        found = list(self.contains_many([block.key for block in blocks]))
        first = found.index(False) if False in found else len(found)
        super().get_many(blocks[:first])
        for block in blocks[first:]:
            block.missing()


class Raises(MemoryConnector):
    """A missing block is an exception."""

    def get(self, name: str) -> Buffer | None:
        return self._store.values[name]


class Impatient(MemoryConnector):
    """Follows by loading what is there."""

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self.load(keys, block_ids)


class Early(MemoryConnector):
    """Publishes a block before its bytes are there: the first one for as long as it takes until it is read."""

    read: ClassVar[threading.Event] = threading.Event()

    def open(self) -> None:
        super().open()
        self.read.clear()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, memoryview(bytes(len(payload))), lease_s)
        self.read.wait(60)
        super().put(name, header, payload, lease_s)

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        if value is not None:
            self.read.set()
        return value


class OneAtATime(MemoryConnector):
    """Fails if another one is storing the same block; the first waits for that to happen once."""

    busy: ClassVar[set[str]] = set()
    met: ClassVar[threading.Event] = threading.Event()

    def open(self) -> None:
        super().open()
        self.met.clear()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if name in self.busy:
            self.met.set()
            raise OSError("another one is storing this")
        self.busy.add(name)
        self.met.wait(60)
        super().put(name, header, payload, lease_s)
        self.busy.discard(name)


class OneProcess(FileConnector):
    """Fails if another process is storing; threads take turns."""

    turns: ClassVar[threading.Lock] = threading.Lock()

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        with self.turns, open(f"{self._root}/busy", "w") as busy:
            fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
            super()._write(block, path, lease_s)


class InPlace(FileConnector):
    """Writes under the block's own name, in two steps."""

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        header, payload = block.read()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            file.write(header)
            time.sleep(0.02)
            file.write(payload)
        block.stored()


class LockFile(FileConnector):
    """Takes turns by a file that the dead do not remove."""

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        give_up = time.monotonic() + 1.0
        while True:
            try:
                os.close(os.open(f"{self._root}/turn", os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.001)
        super()._write(block, path, lease_s)
        time.sleep(0.02)
        os.unlink(f"{self._root}/turn")


class Trusting(MemoryConnector):
    """Signs whatever it finds in the store."""

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        return None if value is None else self.seal.pack(key_in(name), value[HEADER_BYTES:]) + value[HEADER_BYTES:]


class Sticky(MemoryConnector):
    """Never stores a block again, even if it was corrupt."""

    def delete(self, name: str) -> None:
        if not threading.current_thread().name.startswith("kv-"):  # the kit may, to tamper with it
            super().delete(name)


class NoNamespace(Trusting):
    """Every model's blocks under the same names."""

    def _name(self, key: bytes) -> str:
        return key.hex()


class AnyVersion(MemoryConnector):
    """Overlooks the versions in the header."""

    def get(self, name: str) -> Buffer | None:
        value = super().get(name)
        if value is None:
            return None
        right = self.seal.pack(key_in(name), b"")
        return bytes(value[:8]) + right[8:16] + bytes(value[16:])


class Forgetful(MemoryConnector):
    """Keeps blocks for 0.2 seconds."""

    def get(self, name: str) -> Buffer | None:
        return super().get(name) if self.contains(name) else None

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload, min(lease_s, 0.2))

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name)

    def contains(self, name: str) -> bool:
        return self._store.leases.get(name, 0.0) > time.monotonic()


class Strict(MemoryConnector):
    """Raises when a key is released that it does not have."""

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        for key in keys:
            if self._name(key) not in self._store.values:
                raise KeyError(key.hex())
        super().release(keys)


class Greedy(MemoryConnector):
    """Evicts leased blocks when it is full."""

    def _make_room(self, needed: int) -> None:
        self._store.leases.clear()
        super()._make_room(needed)


class MixedUp(MemoryConnector):
    """When it is full, the evicted block's name stays, with the new block's bytes."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        before = list(self._store.values)
        super().put(name, header, payload, lease_s)
        for victim in set(before) - set(self._store.values):
            self._store.values[victim] = self.seal.pack(key_in(victim), payload) + bytes(payload)


class NoDeadline(MemoryConnector):
    """Waits for its store for as long as that takes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._watchdog.watch = lambda operation: None  # type: ignore[method-assign]  # what is broken about it


class NoFence(MemoryConnector):
    """Loads into rows after the deadline."""

    def _blocks(self, kind: Any, operation: Any, pairs: Any) -> Any:
        blocks = super()._blocks(kind, operation, pairs)
        for block in blocks if kind is Incoming else ():
            block._fence = threading.Lock()
        return blocks


class Cancellable(MemoryConnector):
    """Its loads can be cancelled, and go on all the same."""

    def get(self, name: str) -> Buffer | None:
        time.sleep(0.02)
        return super().get(name)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        given: Future[Result] = Future()

        def pass_on(done: Future[Result]) -> None:
            if given.set_running_or_notify_cancel():
                given.set_result(done.result())

        super().load(keys, block_ids).add_done_callback(pass_on)
        return given


class SharedBuffer(MemoryConnector):
    """All connectors of the process send from one buffer. The first one to fill it waits until another has, too."""

    buffer: ClassVar[bytes] = b""
    filled: ClassVar[threading.Barrier] = threading.Barrier(2)

    def open(self) -> None:
        super().open()
        self.filled.reset()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        SharedBuffer.buffer = bytes(payload)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.filled.wait(1)
        super().put(name, header, memoryview(SharedBuffer.buffer), lease_s)


class Waits(MemoryConnector):
    """Its caller waits for the store."""

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        future = super().store(keys, block_ids, lease_s=lease_s)
        wait([future])
        return future


class ReleaseWaits(MemoryConnector):
    """Its caller waits for the store, for what has no future."""

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self.match(keys).result()
        super().release(keys)


class InTheCall(MemoryConnector):
    """Its caller asks the store itself."""

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        found: Future[int] = Future()
        found.set_result(sum(takewhile(bool, self.contains_many(keys))))
        return found


class OpenBooks(MemoryConnector):
    """Hands out the counts themselves."""

    def stats(self) -> Stats:
        return self._stats


class Wipes(MemoryConnector):
    """Takes the blocks with it when it is closed."""

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


# Class, the rule that it breaks, and a piece of what the kit says.
BROKEN: list[tuple[type, str, str]] = [
    (Wrong, "round-trip", "1 wrong bytes"),
    (Elsewhere, "round-trip", "only the given rows to change"),
    (Merging, "results", "expected 2 outcomes of load, saw 1"),
    (Silent, "results", "within the time-out of 0.3 s"),
    (PastTheGap, "leading-match", "3 leading keys, the fourth being missing, saw 5"),
    (GivesUp, "missing", "saw ok, missing, missing"),
    (Raises, "missing", "saw its future raise KeyError"),
    (Impatient, "following", "saw ok, missing"),
    (Early, "whole-blocks", "whole or missing, saw a load that said corrupt"),
    (OneAtATime, "concurrent-stores", "all 8 blocks stored"),
    (OneProcess, "between-processes", "every process to store all blocks"),
    (InPlace, "whole-blocks", "saw a load that said corrupt"),
    (InPlace, "killed-writer", "saw a load that said corrupt"),
    (LockFile, "killed-writer", "expected all 8 blocks stored"),
    (Trusting, "flipped-bytes", "byte 0 changed to be reported, saw ok"),
    (Sticky, "flipped-bytes", "all 3 blocks loaded, saw 2 ok, 1 corrupt"),
    (NoNamespace, "foreign-namespace", "0 foreign blocks to match, saw 2"),
    (AnyVersion, "older-layout", "another header version in its header to be refused"),
    (Forgetful, "lease", "4 blocks to stay while they are leased"),
    (Strict, "release", "saw KeyError"),
    (Greedy, "leases-under-pressure", "leased blocks to stay"),
    (MixedUp, "capacity", "wrong bytes"),
    (NoDeadline, "deadline", "not done after"),
    (NoFence, "deadline", "rows to be left alone after the deadline"),
    (Cancellable, "cancelled", "the rows of a cancelled load"),
    (SharedBuffer, "many-threads", "all 4 blocks"),
    (Waits, "caller-never-waits", "expected store to return while the store hangs"),
    (ReleaseWaits, "caller-never-waits", "expected release to return while the store hangs"),
    (InTheCall, "caller-never-waits", "contains_many called in the caller's"),
    (OpenBooks, "counts", "a snapshot"),
    (Wipes, "content-stays", "all 16 blocks loaded"),
    (LeavesThread, "clean-close", "left-behind"),
    (LeavesFile, "clean-close", "open files as before"),
]

# The kit waits for what these never do, and need not be as patient about it as with others.
NEVER = (Silent, NoDeadline, Waits, ReleaseWaits, LeavesThread, LeavesFile)
