"""The shared memory under `shm://`: a file that survives the death of any of its users; how it is made, adopted and removed.
Pools with blocks of another length have a segment of their own under the same name.

    superblock    4096 bytes: what the segment is made for; a counter that numbers its users
    records       one per slot: see `slab.py`
    payloads      one per slot, the block's bytes, aligned to pages

Space is reserved when it is made, so a full /dev/shm is an error at start and never a SIGBUS later.
"""

import contextlib
import errno
import glob
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

from pdserve.errors import SetupError
from pdserve.kv_transfer.connectors import rangelock

log = logging.getLogger(__name__)

DIRECTORY: Final = "/dev/shm"
DEFAULT_BYTES: Final = 512 << 20
MIN_BLOCKS: Final = 32
MAKING_S: Final = 60.0
FIRST_TOUCH_BYTES_PER_S: Final = 0.2e9  # a tenth of what an idle machine does

# Bytes that are locked, not written. They lie behind the end of any segment.
ALIVE: Final = 1 << 48
CREATE: Final = ALIVE - 2
LOCK: Final = ALIVE - 1

WAYS: Final = 16  # slots of a set
RECORD_BYTES: Final = 128
RECORDS_AT: Final = 4096

_MAGIC: Final = b"pdserveS"
_VERSION: Final = 1
_PAGE: Final = 4096
_SUPERBLOCK = struct.Struct("<8sIIQQ")  # magic, version, ways, sets, block bytes; then its checksum
_USERS_AT: Final = 64
_USER = struct.Struct("<Q")


@dataclass(frozen=True)
class Geometry:
    """The sizes of one segment."""

    sets: int
    block_bytes: int

    @property
    def slots(self) -> int:
        return self.sets * WAYS

    @property
    def stride(self) -> int:
        return _up(self.block_bytes)

    @property
    def payload_at(self) -> int:
        return RECORDS_AT + _up(self.slots * RECORD_BYTES)

    @property
    def total(self) -> int:
        return self.payload_at + self.slots * self.stride

    @classmethod
    def within(cls, size: int, block_bytes: int) -> "Geometry":
        """The largest segment of at most `size` bytes."""
        return cls(max(0, size - 2 * _PAGE) // (WAYS * (_up(block_bytes) + RECORD_BYTES)), block_bytes)

    def pack(self) -> bytes:
        front = _SUPERBLOCK.pack(_MAGIC, _VERSION, WAYS, self.sets, self.block_bytes)
        return front + xxhash.xxh3_64_digest(front)

    @classmethod
    def read(cls, fd: int) -> "Geometry | None":
        """None for a file that is no whole segment: empty, torn by a crash, shortened, or of another version."""
        front = os.pread(fd, _SUPERBLOCK.size, 0)
        if len(front) < _SUPERBLOCK.size:
            return None
        geometry = cls(*_SUPERBLOCK.unpack(front)[3:])
        whole = os.pread(fd, len(front) + 8, 0) == geometry.pack() and os.fstat(fd).st_size == geometry.total
        return geometry if whole else None


class Segment:
    """A segment as one of its users has it, and the byte that says the user is alive."""

    def __init__(self, fd: int, geometry: Geometry, user: int) -> None:
        self.fd = fd
        self.geometry = geometry
        self.user = user
        # Populating maps all pages now. Otherwise each first touch of a page is a fault, which halves the first copies.
        self.map = mmap.mmap(fd, geometry.total, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)  # and with it the byte that says we are alive


def attach(name: str, block_bytes: int, size: int | None) -> Segment:
    """The segment of this name for blocks of so many bytes, made if need be. `size` None takes what is there, or the default.

    Waits for another process that is making it as long as touching that much memory for the first time may take. Segments of
    the same name for other blocks that nobody uses make room.

    Raises:
        SetupError: no room, in use by another version, or not accessible.
    """
    deadline = time.monotonic() + MAKING_S + (size or DEFAULT_BYTES) / FIRST_TOUCH_BYTES_PER_S
    path = f"{_prefix(name)}{block_bytes}"
    remove_unused(other for other in paths(name) if other != path)
    while True:
        fd = _open(name, path)
        try:
            rangelock.lock(fd, CREATE, deadline)
            if not _is_current(fd, path):  # unlinked, perhaps remade, since it was opened
                os.close(fd)
                continue
            geometry = _adopt(fd, name, block_bytes, size) or _create(fd, name, path, block_bytes, size)
            segment = Segment(fd, geometry, _sign_in(fd))
            rangelock.unlock(fd, CREATE)
            return segment
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
    """Removes the segments of this name; their memory is free when the last user has gone. Whether there was one."""
    found = paths(name)
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return bool(found)


def paths(name: str) -> list[str]:
    """Of all segments of this name."""
    return glob.glob(f"{glob.escape(_prefix(name))}*")


def remove_unused(segments: Iterable[str]) -> None:
    """Of segments at these paths, removes those that nobody uses."""
    for path in segments:
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
    least = Geometry(MIN_BLOCKS // WAYS, block_bytes).total + _PAGE
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
    # The superblock comes last: without it, a segment whose making was cut short is made again.
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
    user = int(_USER.unpack(os.pread(fd, _USER.size, _USERS_AT))[0]) + 1
    os.pwrite(fd, _USER.pack(user), _USERS_AT)
    if not rangelock.try_lock(fd, ALIVE + user):
        raise SetupError("The shared-memory segment's user numbers are damaged; remove it.")
    return user


def _prefix(name: str) -> str:
    """Of the paths of all segments of this name; the bytes of a block follow. No name has an @ in it."""
    return f"{DIRECTORY}/pdserve-{name}@"


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
