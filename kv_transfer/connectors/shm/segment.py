"""Shared-memory segments of `shm://`: creating, attaching to and removing files that survive the death of any user.

Pools with different block lengths use separate segments under the same name.

    superblock    4096 bytes: the segment's geometry, and a counter for numbering its users
    records       one per slot: see `slab.py`
    payloads      one per slot, the block's bytes, page-aligned

All space is allocated at creation, so a full /dev/shm is an error at start and never a SIGBUS later.

Users exclude each other by locks on single bytes of the file, which the kernel releases when the holding process dies in any
way. These are Linux's open file description locks: they belong to one `os.open`, not to a process. So two connectors in one
process exclude each other too, and the locks work across containers, where process ids are not comparable. The bytes need
not exist in the file. Two threads that use the same file descriptor do not exclude each other.
"""

import contextlib
import errno
import fcntl
import glob
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import xxhash

from pdserve.errors import SetupError

log = logging.getLogger(__name__)

DIRECTORY: Final = "/dev/shm"
DEFAULT_BYTES: Final = 512 << 20
MIN_BLOCKS: Final = 32
CREATION_TIMEOUT_S: Final = 60.0
FIRST_TOUCH_BYTES_PER_S: Final = 0.2e9  # a tenth of the speed of an idle machine

# Offsets of bytes that are locked, never written. They lie beyond the end of any segment.
LIVENESS_AT: Final = 1 << 48  # plus the user number: held while that user lives
CREATION_LOCK_AT: Final = LIVENESS_AT - 2
RECORDS_LOCK_AT: Final = LIVENESS_AT - 1

WAYS: Final = 16  # slots per set
RECORD_BYTES: Final = 128
RECORDS_AT: Final = 4096

_MAGIC: Final = b"pdserveS"
_VERSION: Final = 1
_PAGE: Final = 4096
_SUPERBLOCK = struct.Struct("<8sIIQQ")  # magic, version, ways, sets, block bytes; a checksum follows
_USER_COUNTER_AT: Final = 64
_USER_COUNTER = struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


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
        return cls.of(max(0, size - 2 * _PAGE) // (WAYS * (_round_up_to_page(block_bytes) + RECORD_BYTES)), block_bytes)

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


class Segment:
    """One user's mapping of a segment. The open file holds the lock that shows that the user is alive."""

    def __init__(self, fd: int, geometry: Geometry, user: int) -> None:
        self.fd = fd
        self.geometry = geometry
        self.user = user
        # MAP_POPULATE maps all pages now. Page faults at first use would halve the speed of the first copies.
        self.map = mmap.mmap(fd, geometry.total_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._thread_lock = threading.Lock()

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
            lock(self.fd, RECORDS_LOCK_AT, deadline)
            try:
                self.check_length()
                yield
            finally:
                set_lock(self.fd, RECORDS_LOCK_AT, fcntl.F_UNLCK)
        finally:
            self._thread_lock.release()

    def check_length(self) -> None:
        """Raise `OSError` if the file has been truncated: an access beyond its end would be a SIGBUS."""
        if os.fstat(self.fd).st_size < self.geometry.total_bytes:
            raise OSError("the shared-memory segment has been truncated; restart all instances that use it")

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)  # also releases the liveness lock


def attach(name: str, block_bytes: int, size: int | None) -> Segment:
    """Attach to the segment of this name for blocks of `block_bytes`; create it if it does not exist or is not usable.

    If another process is creating the segment, waits for as long as touching that much memory for the first time may take.
    Removes unused segments of the same name for other block lengths.

    Args:
        size: segment size in bytes. None: keep the size of an existing segment, or use the default.

    Raises:
        SetupError: not enough space, in use by another version, or not accessible.
    """
    deadline = time.monotonic() + CREATION_TIMEOUT_S + (size or DEFAULT_BYTES) / FIRST_TOUCH_BYTES_PER_S
    path = f"{_prefix(name)}{block_bytes}"
    remove_unused(other for other in paths(name) if other != path)
    while True:
        fd = _open(name, path)
        try:
            lock(fd, CREATION_LOCK_AT, deadline)
            if not _is_current(fd, path):  # unlinked, perhaps recreated, since it was opened
                os.close(fd)
                continue
            geometry = _adopt(fd, name, block_bytes, size) or _create(fd, name, path, block_bytes, size)
            segment = Segment(fd, geometry, _register_user(fd))
            set_lock(fd, CREATION_LOCK_AT, fcntl.F_UNLCK)
            return segment
        except TimeoutError:
            os.close(fd)
            raise SetupError(f"shm://{name}: another process takes too long to create this segment.") from None
        except OSError as error:
            os.close(fd)
            raise SetupError(f"shm://{name} cannot be set up: {error.strerror}.") from error
        except SetupError:
            os.close(fd)
            raise


def unlink(name: str) -> bool:
    """Remove the segments of this name; memory is freed when the last user detaches. Returns True if there were any."""
    found = paths(name)
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return bool(found)


def paths(name: str) -> list[str]:
    """Return the paths of all segments of this name."""
    return glob.glob(f"{glob.escape(_prefix(name))}*")


def remove_unused(segments: Iterable[str]) -> None:
    """Remove those of the segments at these paths that are not in use."""
    for path in segments:
        with contextlib.suppress(OSError):  # removed meanwhile, or owned by another user
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(fd, CREATION_LOCK_AT) and not is_locked_by_others(fd, LIVENESS_AT, 0):
                    os.unlink(path)
            finally:
                os.close(fd)


def _open(name: str, path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)  # a prompt can be reconstructed from its KV
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
    """Return the geometry of an existing segment that can be used. None if the segment may be created anew."""
    existing = Geometry.read(fd)
    is_usable = existing is not None and existing.block_bytes == block_bytes
    if is_usable and (size is None or existing == Geometry.within(size, block_bytes)):
        return existing
    if not is_locked_by_others(fd, LIVENESS_AT, 0):
        return None
    if is_usable:
        assert existing is not None
        log.info("shm://%s is in use with %d MiB; its size is not changed", name, existing.total_bytes >> 20)
        return existing
    raise SetupError(
        f"shm://{name} is in use by a running process of another pdserve version; choose another name, or stop that "
        "process."
    )


def _create(fd: int, name: str, path: str, block_bytes: int, size: int | None) -> Geometry:
    os.ftruncate(fd, 0)
    file_system = os.statvfs(fd)
    free = file_system.f_bavail * file_system.f_frsize
    min_bytes = Geometry.of(MIN_BLOCKS // WAYS, block_bytes).total_bytes + _PAGE
    requested_bytes = size if size is not None else max(min_bytes, min(DEFAULT_BYTES, free // 2))
    geometry = Geometry.within(requested_bytes, block_bytes)
    if geometry.slots < MIN_BLOCKS:
        raise SetupError(f"shm://{name}?size={size} is too small: {MIN_BLOCKS} blocks need {min_bytes} bytes.")
    if geometry.total_bytes > free:
        _raise_no_space(name, path, geometry.total_bytes, free)
    try:
        os.posix_fallocate(fd, 0, geometry.total_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.ftruncate(fd, 0)
        _raise_no_space(name, path, geometry.total_bytes, free)
    # The superblock is written last: a segment whose creation was interrupted has none, and is created again.
    os.pwrite(fd, geometry.pack(), 0)
    return geometry


def _raise_no_space(name: str, path: str, needed: int, free: int) -> None:
    os.unlink(path)
    raise SetupError(
        f"shm://{name} needs {_mib(needed)} of shared memory and {DIRECTORY} has {_mib(free)} free; use a smaller "
        "?size=, or provide more shared memory (Docker: --shm-size)."
    )


def _register_user(fd: int) -> int:
    """Allocate the next user number and take its liveness lock. Returns the number."""
    user = int(_USER_COUNTER.unpack(os.pread(fd, _USER_COUNTER.size, _USER_COUNTER_AT))[0]) + 1
    os.pwrite(fd, _USER_COUNTER.pack(user), _USER_COUNTER_AT)
    if not try_lock(fd, LIVENESS_AT + user):
        raise SetupError("The user counter of the shared-memory segment is corrupt; remove the segment.")
    return user


def _prefix(name: str) -> str:
    """Return the common prefix of the paths of this name's segments; the block length follows. Names contain no @."""
    return f"{DIRECTORY}/pdserve-{name}@"


def _round_up_to_page(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


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
