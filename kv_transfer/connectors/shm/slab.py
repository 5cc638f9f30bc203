"""Slab of block slots in a shared-memory segment: lookup, claim, publish, lease and eviction. `segment.py` makes segments.

    superblock    4096 bytes: the segment's geometry, and a counter for numbering its users
    records       one per slot, 128 bytes: state, owner, lease, and the header of the block in the slot. While it is being
                  written, it has no header, but a name, and how many leading bytes of the payload are there
    payloads      one per slot, the block's bytes, page-aligned

Life cycle of a slot: FREE → WRITING (claimed by a user, which copies the payload without a lock) → READY → FREE or WRITING.

Each key maps to two sets of 16 slots, and a claim uses the emptier one. With a single set, a slab would reject leased
blocks when half full; with two, it accepts them until 9 of 10 slots are taken.

Concurrency:
  - Records change only under the lock on byte RECORDS_LOCK_AT. The kernel releases it when its holder dies. The word with
    the state is written first when a slot is freed or claimed and last when it is published, so a death at any point leaves
    the slot FREE or WRITING.
  - Every user holds a lock on its own byte, LIVENESS_AT plus its number, for as long as it lives. A slot left WRITING by a
    user whose byte is unlocked can be claimed. User numbers are never reused.
  - Readers take no lock. They read the record, copy the payload, and accept it only if its checksum matches the header.

The locks are Linux's open file description locks: they belong to one `os.open`, not to a process. So two connectors in one
process exclude each other too, and the locks work across containers, where process ids are not comparable. The bytes need
not exist in the file. Two threads that use the same file descriptor do not exclude each other.
"""

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import xxhash

from pdserve.kv_transfer.header import HEADER_BYTES, Row

# Offsets of bytes that are locked, never written. They lie beyond the end of any segment.
LIVENESS_AT: Final = 1 << 48  # plus the user number: held while that user lives
CREATION_LOCK_AT: Final = LIVENESS_AT - 2
RECORDS_LOCK_AT: Final = LIVENESS_AT - 1

WAYS: Final = 16  # slots per set
RECORD_BYTES: Final = 128
RECORDS_AT: Final = 4096
PAGE: Final = 4096
USER_COUNTER_AT: Final = 64
USER_COUNTER = struct.Struct("<Q")

_MAGIC: Final = b"pdserveS"
_VERSION: Final = 1
_SUPERBLOCK = struct.Struct("<8sIIQQ")  # magic, version, ways, sets, block bytes; a checksum follows
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid

_WORD = struct.Struct("<Q")  # owner and state
# Word (owner and state), lease end, last use, holders or, while it is being written, leading bytes of the payload.
_RECORD = struct.Struct("<QddQ96x")
_GROWTH = struct.Struct("<Q32s")  # these bytes, namespace and key
_GROWTH_AT: Final = 24
_GROWING_NAME_AT: Final = 32
_RECORDS = np.dtype([("word", "<u8"), ("end", "<f8"), ("rest", "V112")])
_SET = struct.Struct("<" + WAYS * "Qdd104x")
_LEASE = struct.Struct("<ddQ")
_LEASE_AT: Final = 8
_LAST_USE_AT: Final = 16
_LAST_USE = struct.Struct("<d")
_HEADER_AT: Final = 64
_NAME_AT: Final = _HEADER_AT + 16  # offset of namespace and key in the header
_SET_BYTES: Final = WAYS * RECORD_BYTES

_FREE, _WRITING, _READY = range(3)
_STATE_BITS: Final = 8


class Geometry(NamedTuple):
    """The sizes of one segment."""

    sets: int
    block_bytes: int
    slots: int
    stride: int
    payloads_at: int
    total_bytes: int

    @classmethod
    def of(cls, sets: int, block_bytes: int) -> "Geometry":
        """Return the geometry of `sets` sets of slots for blocks of `block_bytes`."""
        slots, stride = sets * WAYS, _round_up_to_page(block_bytes)
        payloads_at = RECORDS_AT + _round_up_to_page(slots * RECORD_BYTES)
        return cls(sets, block_bytes, slots, stride, payloads_at, payloads_at + slots * stride)

    @classmethod
    def within(cls, size: int, block_bytes: int) -> "Geometry":
        """Return the geometry of the largest segment of at most `size` bytes."""
        return cls.of(max(0, size - 2 * PAGE) // (WAYS * (_round_up_to_page(block_bytes) + RECORD_BYTES)), block_bytes)

    def pack(self) -> bytes:
        superblock = _SUPERBLOCK.pack(_MAGIC, _VERSION, WAYS, self.sets, self.block_bytes)
        return superblock + xxhash.xxh3_64_digest(superblock)

    @classmethod
    def read(cls, fd: int) -> "Geometry | None":
        """Read the superblock. None if the file is no complete segment: empty, torn by a crash, truncated, other version."""
        superblock = os.pread(fd, _SUPERBLOCK.size, 0)
        if len(superblock) < _SUPERBLOCK.size:
            return None
        geometry = cls.of(*_SUPERBLOCK.unpack(superblock)[3:])
        is_complete = (
            os.pread(fd, len(superblock) + 8, 0) == geometry.pack() and os.fstat(fd).st_size == geometry.total_bytes
        )
        return geometry if is_complete else None


class Slab:
    """One user's mapping of a slab. Thread-safe. Its open file holds the lock that shows that the user is alive."""

    def __init__(self, fd: int, geometry: Geometry, user: int) -> None:
        self.geometry = geometry
        self._fd = fd
        self._user = user
        # MAP_POPULATE maps all pages now. Page faults at first use would halve the speed of the first copies.
        self._map = mmap.mmap(fd, geometry.total_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._thread_lock = threading.Lock()
        self._sets = geometry.sets
        self._writing: set[int] = set()  # slots that this user's threads are copying into
        flat = np.frombuffer(self._map, np.uint8, geometry.slots * geometry.stride, geometry.payloads_at)
        self._payloads: Row = flat.reshape(geometry.slots, geometry.stride)[:, : geometry.block_bytes]

    def close(self) -> None:
        del self._payloads  # the last view of the map, which cannot be closed before
        self._map.close()
        os.close(self._fd)  # also releases the liveness lock

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the lock on the records, which excludes all other users and threads.

        Raises:
            TimeoutError: the lock was not free within `timeout` seconds.
            OSError: the segment has been truncated.
        """
        deadline = time.monotonic() + timeout
        if not self._thread_lock.acquire(timeout=timeout):
            raise TimeoutError("another thread held the slab's lock for too long")
        try:
            lock(self._fd, RECORDS_LOCK_AT, deadline)
            try:
                self.check_length()
                yield
            finally:
                set_lock(self._fd, RECORDS_LOCK_AT, fcntl.F_UNLCK)
        finally:
            self._thread_lock.release()

    def check_length(self) -> None:
        """Raise `OSError` if the file has been truncated: an access beyond its end would be a SIGBUS."""
        if os.fstat(self._fd).st_size < self.geometry.total_bytes:
            raise OSError("the shared-memory segment has been truncated; restart all instances that use it")

    def payload(self, slot: int) -> Row:
        row: Row = self._payloads[slot]
        return row

    # Called without the lock.

    def find(self, name: bytes, name_at: int = _NAME_AT, state: int = _READY) -> int | None:
        """Return the READY slot with this namespace and key, or None. Call `check_length` before, unless the lock is held."""
        for start in self._starts(name):
            records = self._records(start)
            at = records.find(name)
            while at >= 0:
                index, offset = divmod(at, RECORD_BYTES)
                if offset == name_at and records[index * RECORD_BYTES] == state:
                    return start + index
                at = records.find(name, at + 1)
        return None

    def find_growing(self, name: bytes) -> int | None:
        """Return a slot into which this block is being written, or None."""
        return self.find(name, _GROWING_NAME_AT, _WRITING)

    def front(self, slot: int) -> Row:
        """Return what is there of a payload that is being written. If it is that of another block by now, it is any bytes."""
        return self.payload(slot)[: self._record(slot)[3]]

    def grow(self, slot: int, num_bytes: int) -> None:
        """Show how many leading bytes of a claimed slot's payload are there."""
        _WORD.pack_into(self._map, _record_at(slot) + _GROWTH_AT, num_bytes)

    def header(self, slot: int) -> bytes:
        at = _record_at(slot) + _HEADER_AT
        return self._map[at : at + HEADER_BYTES]

    def holds(self, slot: int, header: bytes) -> bool:
        """Return True if the slot still holds the block of this header."""
        return self._map[_record_at(slot)] == _READY and self.header(slot) == header

    def touch(self, slot: int) -> None:
        """Record a use, for eviction. If the slot was reused meanwhile, its new block merely looks more recently used."""
        _LAST_USE.pack_into(self._map, _record_at(slot) + _LAST_USE_AT, time.monotonic())

    def abandon(self, slots: Iterable[int]) -> None:
        """Give up claimed slots without the lock, if it could not be acquired; a later claim may take them."""
        self._writing.difference_update(slots)

    # Called under the lock.

    def find_all(self, namespace: bytes, keys: Iterable[bytes]) -> Iterator[int]:
        """Yield the READY slots of those keys that have one."""
        for key in keys:
            if (slot := self.find(namespace + key)) is not None:
                yield slot

    def claim(self, name: bytes) -> int | None:
        """Claim a slot to write into. None if all slots of this name are leased or being written."""
        slot, most_free = None, 0
        for start in self._starts(name):  # a free slot in the emptier set
            states = self._records(start)[::RECORD_BYTES]
            if states.count(_FREE) > most_free:
                slot, most_free = start + states.find(_FREE), states.count(_FREE)
        if slot is None:
            slot = self._evictable_slot(name)
        if slot is not None:
            _GROWTH.pack_into(self._map, _record_at(slot) + _GROWTH_AT, 0, name)
            self._set_word(slot, _WRITING)
            self._writing.add(slot)
        return slot

    def publish(self, slot: int, header: bytes, lease_s: float) -> None:
        """Make a claimed slot visible, after its payload is complete."""
        at = _record_at(slot) + _HEADER_AT
        self._map[at : at + HEADER_BYTES] = header
        self._set_lease(slot, lease_s, holders=1)
        self._set_word(slot, _READY)
        self._writing.discard(slot)

    def renew(self, slot: int, lease_s: float) -> None:
        """Add a holder to the lease, or none if `lease_s` is 0.

        A lease ends when all holders have released it, or when the longest one has expired.
        """
        _, end, _, holders = self._record(slot)
        remaining_s = end - time.monotonic()
        self._set_lease(slot, max(lease_s, remaining_s), holders + (lease_s > 0) if remaining_s > 0 else 1)

    def prolong(self, slot: int, lease_s: float) -> None:
        """Let the lease end in `lease_s` seconds at the earliest, unless all holders have released it."""
        _, end, _, holders = self._record(slot)
        if holders:
            self._set_lease(slot, max(lease_s, end - time.monotonic()), holders)

    def release(self, slot: int) -> None:
        """Remove one holder from the lease."""
        _, end, last_use, holders = self._record(slot)
        remaining = max(0, holders - 1)
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, end if remaining else 0.0, last_use, remaining)

    def free(self, slot: int) -> None:
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, 0.0, 0.0, 0)
        self._set_word(slot, _FREE)
        self._writing.discard(slot)

    def _evictable_slot(self, name: bytes) -> int | None:
        """Return the least recently used slot that is not leased, or was left WRITING by a dead user."""
        now = time.monotonic()
        unleased: list[tuple[float, int, int]] = []
        for start in self._starts(name):
            values = _SET.unpack(self._records(start))
            records = zip(values[2::3], range(start, start + WAYS), values[::3], values[1::3], strict=True)
            unleased += [(last_use, slot, word) for last_use, slot, word, lease_end in records if lease_end <= now]
        for _, slot, word in sorted(unleased):
            if word & 0xFF == _READY or not self._is_being_written(slot, word >> _STATE_BITS):
                return slot
        return None

    def _is_being_written(self, slot: int, owner: int) -> bool:
        if owner == self._user:
            return slot in self._writing
        return is_locked_by_others(self._fd, LIVENESS_AT + owner)

    def _starts(self, name: bytes) -> tuple[int, int]:
        """Return the first slot of each of the two sets of a name."""
        digest = xxhash.xxh3_64_intdigest(name)
        first = digest % self._sets
        second = (first + 1 + (digest >> 32) % (self._sets - 1)) % self._sets
        return first * WAYS, second * WAYS

    def _records(self, start: int) -> bytes:
        at = RECORDS_AT + start * RECORD_BYTES
        return self._map[at : at + _SET_BYTES]

    def _record(self, slot: int) -> tuple[int, float, float, int]:
        word, lease_end, last_use, holders = _RECORD.unpack_from(self._map, _record_at(slot))
        return word, lease_end, last_use, holders

    def _set_word(self, slot: int, state: int) -> None:
        _WORD.pack_into(self._map, _record_at(slot), self._user << _STATE_BITS | state)

    def _set_lease(self, slot: int, lease_s: float, holders: int) -> None:
        now = time.monotonic()
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, now + lease_s, now, holders)


def count_leases(path: str) -> int:
    """Count the blocks that are leased now in the segment at this path."""
    with open(path, "rb") as file:
        geometry = Geometry.read(file.fileno())
        if geometry is None:
            return 0
        records = np.frombuffer(os.pread(file.fileno(), geometry.slots * RECORD_BYTES, RECORDS_AT), _RECORDS)
    return int(np.count_nonzero((records["word"] & 0xFF == _READY) & (records["end"] > time.monotonic())))


def _record_at(slot: int) -> int:
    return RECORDS_AT + slot * RECORD_BYTES


def _round_up_to_page(size: int) -> int:
    return -(-size // PAGE) * PAGE


def set_lock(fd: int, offset: int, kind: int) -> None:
    """Lock one byte without waiting (F_WRLCK), or unlock it (F_UNLCK)."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, offset, 1, 0))


def try_lock(fd: int, offset: int) -> bool:
    """Try to lock one byte without waiting. Returns True if `fd` holds the lock now."""
    try:
        set_lock(fd, offset, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock(fd: int, offset: int, deadline: float) -> None:
    """Lock one byte, polling, because a stopped holder (SIGSTOP) would block a waiting system call forever.

    Raises:
        TimeoutError: the byte was not free by `deadline` (of `time.monotonic`).
    """
    pause = 20e-6
    while not try_lock(fd, offset):
        if time.monotonic() >= deadline:
            raise TimeoutError("another process held the lock for too long")
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def is_locked_by_others(fd: int, offset: int, length: int = 1) -> bool:
    """Return True if another file descriptor than `fd` holds a lock in this range. Length 0: up to the last offset."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, length, 0))
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)
