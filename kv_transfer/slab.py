"""The shared-memory segment under `shm://`: one file of block slots that survives the death of any of its users. Pools with
blocks of another length have a segment of their own under the same name.

    superblock    4096 bytes: what the slab is made for; a counter that numbers its users
    records       one per slot, 128 bytes: state, owner, lease, and the header of the block in the slot
    payloads      one per slot, the block's bytes, aligned to pages

Life of a slot: FREE → WRITING (claimed by a user, who copies the payload without any lock) → READY → FREE or WRITING.

A key has two sets of 16 slots it may go to, and a claim takes the emptier one: with one set, a slab would turn down
leased blocks when half full; with two, it takes them until 9 of 10 slots are taken.

Who may do what:
  - Records change under the lock of byte LOCK only. The kernel drops it when its holder dies. The word with the state
    is written first on the way down and last on the way up, so a death at any point leaves a slot FREE or WRITING.
  - Every user holds a lock on a byte of its own, at ALIVE plus its number, for as long as it lives. A slot left WRITING
    by a user whose byte is free can be claimed. Numbers are never reused.
  - Readers take no lock. They read the record, copy the payload, and believe it only if its checksum fits the header.

Space is reserved when the slab is made, so a full /dev/shm is an error at start and never a SIGBUS later.
"""

import contextlib
import errno
import glob
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from pdserve.errors import SetupError
from pdserve.kv_transfer import rangelock
from pdserve.kv_transfer.header import HEADER_BYTES, Row

log = logging.getLogger(__name__)

DIRECTORY: Final = "/dev/shm"
DEFAULT_BYTES: Final = 512 << 20
MIN_BLOCKS: Final = 32
MAKING_S: Final = 60.0
FIRST_TOUCH_BYTES_PER_S: Final = 0.2e9  # a tenth of what an idle machine does

# Bytes that are locked, not written. They lie behind the end of any slab.
ALIVE: Final = 1 << 48
CREATE: Final = ALIVE - 2
LOCK: Final = ALIVE - 1

_MAGIC: Final = b"pdserveS"
_VERSION: Final = 1
_PAGE: Final = 4096
_WAYS: Final = 16
_SUPERBLOCK = struct.Struct("<8sIIQQ")  # magic, version, ways, sets, block bytes; then its checksum
_USERS_AT: Final = 64
_WORD = struct.Struct("<Q")

_RECORD_BYTES: Final = 128
_RECORD = struct.Struct("<QddQ96x")  # word (owner and state), lease's end, last use, holders
_RECORDS = np.dtype([("word", "<u8"), ("end", "<f8"), ("rest", "V112")])
_SET = struct.Struct("<" + _WAYS * "Qdd104x")
_LEASE = struct.Struct("<ddQ")
_LEASE_AT: Final = 8
_USED_AT: Final = 16
_USED = struct.Struct("<d")
_HEADER_AT: Final = 64
_NAME_AT: Final = _HEADER_AT + 16  # namespace and key inside the header
_SET_BYTES: Final = _WAYS * _RECORD_BYTES

_FREE, _WRITING, _READY = range(3)
_STATE_BITS: Final = 8


@dataclass(frozen=True)
class Geometry:
    """The sizes of one slab."""

    sets: int
    block_bytes: int

    @property
    def slots(self) -> int:
        return self.sets * _WAYS

    @property
    def stride(self) -> int:
        return _up(self.block_bytes)

    @property
    def payload_at(self) -> int:
        return _PAGE + _up(self.slots * _RECORD_BYTES)

    @property
    def total(self) -> int:
        return self.payload_at + self.slots * self.stride

    @classmethod
    def within(cls, size: int, block_bytes: int) -> "Geometry":
        """The largest slab of at most `size` bytes."""
        return cls(max(0, size - 2 * _PAGE) // (_WAYS * (_up(block_bytes) + _RECORD_BYTES)), block_bytes)

    def pack(self) -> bytes:
        front = _SUPERBLOCK.pack(_MAGIC, _VERSION, _WAYS, self.sets, self.block_bytes)
        return front + xxhash.xxh3_64_digest(front)

    @classmethod
    def read(cls, fd: int) -> "Geometry | None":
        """None for a file that is no whole slab: empty, torn by a crash, shortened, or of another version."""
        front = os.pread(fd, _SUPERBLOCK.size, 0)
        if len(front) < _SUPERBLOCK.size:
            return None
        geometry = cls(*_SUPERBLOCK.unpack(front)[3:])
        whole = os.pread(fd, len(front) + 8, 0) == geometry.pack() and os.fstat(fd).st_size == geometry.total
        return geometry if whole else None


class Slab:
    """One user's view of a slab. Threads may share it."""

    def __init__(self, fd: int, geometry: Geometry, user: int) -> None:
        self.geometry = geometry
        self._fd = fd
        self._user = user
        self._sets = geometry.sets
        self._threads = threading.Lock()
        self._writing: set[int] = set()  # slots that our threads are copying into
        # Populating maps all pages now. Otherwise each first touch of a page is a fault, which halves the first copies.
        self._map = mmap.mmap(fd, geometry.total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        flat = np.frombuffer(self._map, np.uint8, geometry.slots * geometry.stride, geometry.payload_at)
        self._payloads: Row = flat.reshape(geometry.slots, geometry.stride)[:, : geometry.block_bytes]

    def close(self) -> None:
        del self._payloads  # the last view; the map cannot be closed under it
        self._map.close()
        os.close(self._fd)  # and with it the byte that says we are alive

    def payload(self, slot: int) -> Row:
        row: Row = self._payloads[slot]
        return row

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Excludes all other users and threads. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        if not self._threads.acquire(timeout=timeout):
            raise TimeoutError("another thread has held the slab's lock for too long")
        try:
            rangelock.lock(self._fd, LOCK, deadline)
            try:
                yield
            finally:
                rangelock.unlock(self._fd, LOCK)
        finally:
            self._threads.release()

    # Without the lock.

    def find(self, name: bytes) -> int | None:
        """The slot that holds this namespace and key."""
        for start in self._starts(name):
            records = self._records(start)
            at = records.find(name)
            while at >= 0:
                here, inside = divmod(at, _RECORD_BYTES)
                if inside == _NAME_AT and records[here * _RECORD_BYTES] == _READY:
                    return start + here
                at = records.find(name, at + 1)
        return None

    def header(self, slot: int) -> bytes:
        at = _record_at(slot) + _HEADER_AT
        return self._map[at : at + HEADER_BYTES]

    def holds(self, slot: int, header: bytes) -> bool:
        """Whether the slot still holds what it held when this header was read."""
        return self._map[_record_at(slot)] == _READY and self.header(slot) == header

    def touch(self, slot: int) -> None:
        """Notes a use, for eviction. If the slot has a new owner by now, that one looks a little younger than it is."""
        _USED.pack_into(self._map, _record_at(slot) + _USED_AT, time.monotonic())

    def abandon(self, slots: Iterable[int]) -> None:
        """Gives claimed slots up when the lock cannot be had to free them; the next claim may take them."""
        self._writing.difference_update(slots)

    # Under the lock.

    def claim(self, name: bytes) -> int | None:
        """A slot to write into, or None if all that this name may use are leased or being written."""
        slot = self._free_slot(name)
        if slot is None:
            slot = self._stale_slot(name)
        if slot is not None:
            self._set_word(slot, _WRITING)
            self._writing.add(slot)
        return slot

    def publish(self, slot: int, header: bytes, lease_s: float) -> None:
        """Makes a claimed slot visible, its payload being complete."""
        at = _record_at(slot) + _HEADER_AT
        self._map[at : at + HEADER_BYTES] = header
        self._set_lease(slot, lease_s, holders=1)
        self._set_word(slot, _READY)
        self._writing.discard(slot)

    def renew(self, slot: int, lease_s: float) -> None:
        """One more holder, but for a lease of 0. It ends when all have released it, or when the longest has run out."""
        _, end, _, holders = self._record(slot)
        left = end - time.monotonic()
        self._set_lease(slot, max(lease_s, left), holders + (lease_s > 0) if left > 0 else 1)

    def release(self, slot: int) -> None:
        _, end, used, holders = self._record(slot)
        left = max(0, holders - 1)
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, end if left else 0.0, used, left)

    def free(self, slot: int) -> None:
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, 0.0, 0.0, 0)
        self._set_word(slot, _FREE)
        self._writing.discard(slot)

    def _free_slot(self, name: bytes) -> int | None:
        """A free slot in the emptier set."""
        one, other = ((start, self._records(start)[::_RECORD_BYTES]) for start in self._starts(name))
        start, states = max(one, other, key=lambda both: both[1].count(_FREE))
        at = states.find(_FREE)
        return start + at if at >= 0 else None

    def _stale_slot(self, name: bytes) -> int | None:
        """The slot whose last use is longest ago, among those without a lease and those left by the dead."""
        now = time.monotonic()
        stale: list[tuple[float, int, int]] = []
        for start in self._starts(name):
            values = _SET.unpack(self._records(start))
            each = zip(values[2::3], range(start, start + _WAYS), values[::3], values[1::3], strict=True)
            stale += [(used, slot, word) for used, slot, word, lease_end in each if lease_end <= now]
        for _, slot, word in sorted(stale):
            if word & 0xFF == _READY or not self._being_written(slot, word >> _STATE_BITS):
                return slot
        return None

    def _being_written(self, slot: int, owner: int) -> bool:
        if owner == self._user:
            return slot in self._writing
        return rangelock.held_by_others(self._fd, ALIVE + owner)

    def _starts(self, name: bytes) -> tuple[int, int]:
        """The first slots of the two sets of a name."""
        digest = xxhash.xxh3_64_intdigest(name)
        one = digest % self._sets
        other = (one + 1 + (digest >> 32) % (self._sets - 1)) % self._sets
        return one * _WAYS, other * _WAYS

    def _records(self, start: int) -> bytes:
        at = _record_at(start)
        return self._map[at : at + _SET_BYTES]

    def _record(self, slot: int) -> tuple[int, float, float, int]:
        word, end, used, holders = _RECORD.unpack_from(self._map, _record_at(slot))
        return word, end, used, holders

    def _set_word(self, slot: int, state: int) -> None:
        _WORD.pack_into(self._map, _record_at(slot), self._user << _STATE_BITS | state)

    def _set_lease(self, slot: int, lease_s: float, holders: int) -> None:
        now = time.monotonic()
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, now + lease_s, now, holders)


def attach(name: str, block_bytes: int, size: int | None) -> Slab:
    """The slab of this name for blocks of so many bytes, made if need be. `size` None takes what is there, or the default.

    Waits for another process that is making it as long as touching that much memory for the first time may take. Slabs of
    the same name for other blocks that nobody uses make room.

    Raises:
        SetupError: no room, in use by another version, or not accessible.
    """
    deadline = time.monotonic() + MAKING_S + (size or DEFAULT_BYTES) / FIRST_TOUCH_BYTES_PER_S
    path = f"{_prefix(name)}{block_bytes}"
    _remove_unused(other for other in _paths(name) if other != path)
    while True:
        fd = _open(name, path)
        try:
            rangelock.lock(fd, CREATE, deadline)
            if not _is_current(fd, path):  # unlinked, perhaps remade, since it was opened
                os.close(fd)
                continue
            geometry = _adopt(fd, name, block_bytes, size) or _create(fd, name, path, block_bytes, size)
            slab = Slab(fd, geometry, _sign_in(fd))
            rangelock.unlock(fd, CREATE)
            return slab
        except TimeoutError:
            os.close(fd)
            raise SetupError(f"shm://{name}: another process has been making this segment for too long.") from None
        except OSError as error:
            os.close(fd)
            raise SetupError(f"shm://{name} cannot be set up: {error.strerror}.") from error
        except SetupError:
            os.close(fd)
            raise


def unlink(name: str) -> bool:
    """Removes the slabs of this name; their memory is free when the last user has gone. Whether there was one."""
    paths = _paths(name)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return bool(paths)


def leases(name: str) -> int:
    """How many blocks in the slabs of this name are leased at the moment."""
    return sum(_leases(path) for path in _paths(name))


def _leases(path: str) -> int:
    with open(path, "rb") as file:
        geometry = Geometry.read(file.fileno())
        if geometry is None:
            return 0
        records = np.frombuffer(os.pread(file.fileno(), geometry.slots * _RECORD_BYTES, _PAGE), _RECORDS)
    return int(np.count_nonzero((records["word"] & 0xFF == _READY) & (records["end"] > time.monotonic())))


def _remove_unused(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # it has gone meanwhile, or is not ours to remove
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if rangelock.try_lock(fd, CREATE) and not rangelock.held_by_others(fd, ALIVE, 0):
                    os.unlink(path)
            finally:
                os.close(fd)


def _open(name: str, path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)  # a prompt can be read back from its KV
    except OSError as error:
        raise SetupError(f"shm://{name}: {path} cannot be opened: {error.strerror}.") from error
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise SetupError(f"shm://{name}: {path} belongs to another user.")
    return fd


def _is_current(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _adopt(fd: int, name: str, block_bytes: int, size: int | None) -> Geometry | None:
    """The geometry of what is there, if it can be used; None if it may be made anew."""
    there = Geometry.read(fd)
    suits = there is not None and there.block_bytes == block_bytes
    if suits and (size is None or there == Geometry.within(size, block_bytes)):
        return there
    if not rangelock.held_by_others(fd, ALIVE, 0):
        return None
    if suits:
        assert there is not None
        log.info("shm://%s is in use with %d MiB; its size stays", name, there.total >> 20)
        return there
    raise SetupError(
        f"shm://{name} is in use by a running process of another version of pdserve; choose another name, or stop that "
        "process."
    )


def _create(fd: int, name: str, path: str, block_bytes: int, size: int | None) -> Geometry:
    os.ftruncate(fd, 0)
    file_system = os.statvfs(fd)
    free = file_system.f_bavail * file_system.f_frsize
    least = Geometry(MIN_BLOCKS // _WAYS, block_bytes).total + _PAGE
    wanted = size if size is not None else max(least, min(DEFAULT_BYTES, free // 2))
    geometry = Geometry.within(wanted, block_bytes)
    if geometry.slots < MIN_BLOCKS:
        raise SetupError(f"shm://{name}?size={size} is too small: {MIN_BLOCKS} blocks need {least} bytes.")
    if geometry.total > free:
        _no_room(name, path, geometry.total, free)
    try:
        os.posix_fallocate(fd, 0, geometry.total)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.ftruncate(fd, 0)
        _no_room(name, path, geometry.total, free)
    # The superblock comes last: without it, a slab whose making was cut short is made again.
    os.pwrite(fd, geometry.pack(), 0)
    return geometry


def _no_room(name: str, path: str, needed: int, free: int) -> None:
    os.unlink(path)
    raise SetupError(
        f"shm://{name} needs {_mib(needed)} of shared memory and {DIRECTORY} has {_mib(free)} free; give a smaller "
        "?size=, or more shared memory (Docker: --shm-size)."
    )


def _sign_in(fd: int) -> int:
    """Takes the next user number and the lock that shows its holder is alive."""
    user = int(_WORD.unpack(os.pread(fd, _WORD.size, _USERS_AT))[0]) + 1
    os.pwrite(fd, _WORD.pack(user), _USERS_AT)
    if not rangelock.try_lock(fd, ALIVE + user):
        raise SetupError("The shared-memory segment's user numbers are damaged; remove it.")
    return user


def _prefix(name: str) -> str:
    """Of the paths of all slabs of this name; the bytes of a block follow. No name has an @ in it."""
    return f"{DIRECTORY}/pdserve-{name}@"


def _paths(name: str) -> list[str]:
    return glob.glob(f"{glob.escape(_prefix(name))}*")


def _record_at(slot: int) -> int:
    return _PAGE + slot * _RECORD_BYTES


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
