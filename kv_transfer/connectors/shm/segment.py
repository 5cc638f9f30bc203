"""Shared-memory segments of `shm://`: creating, attaching to and removing files that survive the death of any user.

Pools with different block lengths use separate segments under the same name; what is in one, `slab.py` says. All space
is allocated at creation, so a full /dev/shm is an error at start and never a SIGBUS later.
"""

import contextlib
import errno
import fcntl
import glob
import logging
import os
import time
from collections.abc import Iterable
from typing import Final

from pdserve.errors import SetupError
from pdserve.kv_transfer.connectors.shm.slab import (
    CREATION_LOCK_AT,
    LIVENESS_AT,
    PAGE,
    USER_COUNTER,
    USER_COUNTER_AT,
    WAYS,
    Geometry,
    Slab,
    is_locked_by_others,
    lock,
    set_lock,
    try_lock,
)

log = logging.getLogger(__name__)

DIRECTORY: Final = "/dev/shm"
PRIVATE: Final = "up-"  # how names begin that belong to one process: its id follows
DEFAULT_BYTES: Final = 512 << 20
MIN_BLOCKS: Final = 32
CREATION_TIMEOUT_S: Final = 60.0
FIRST_TOUCH_BYTES_PER_S: Final = 0.2e9  # a tenth of the speed of an idle machine


def attach(name: str, block_bytes: int, size: int | None) -> Slab:
    """Attach to the segment of this name for blocks of `block_bytes`; create it if it does not exist or is not usable.

    If another process is creating the segment, waits for as long as touching that much memory for the first time may take.
    Removes unused segments of the same name for other block lengths, and those of deployments that were killed.

    Args:
        size: segment size in bytes. None: keep the size of an existing segment, or use the default.

    Raises:
        SetupError: not enough space, in use by another version, or not accessible.
    """
    deadline = time.monotonic() + CREATION_TIMEOUT_S + (size or DEFAULT_BYTES) / FIRST_TOUCH_BYTES_PER_S
    path = f"{_prefix(name)}{block_bytes}"
    remove_unused(other for other in paths(name) if other != path)
    remove_abandoned()
    while True:
        fd = _open(name, path)
        try:
            lock(fd, CREATION_LOCK_AT, deadline)
            if not _is_current(fd, path):  # unlinked, perhaps recreated, since it was opened
                os.close(fd)
                continue
            geometry = _adopt(fd, name, block_bytes, size) or _create(fd, name, path, block_bytes, size)
            slab = Slab(fd, geometry, _register_user(fd))
            set_lock(fd, CREATION_LOCK_AT, fcntl.F_UNLCK)
            return slab
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


def remove_abandoned() -> None:
    """Remove unused private segments of `pdserve up`, `demo` and `LLM` whose process has ended without doing so."""
    for path in glob.glob(f"{DIRECTORY}/pdserve-{PRIVATE}*@*"):
        pid = path.partition(f"-{PRIVATE}")[2].partition("@")[0].partition("-")[0]
        if pid.isdecimal() and not _is_running(pid):
            remove_unused([path])


def _is_running(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


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
    min_bytes = Geometry.of(MIN_BLOCKS // WAYS, block_bytes).total_bytes + PAGE
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
    user = int(USER_COUNTER.unpack(os.pread(fd, USER_COUNTER.size, USER_COUNTER_AT))[0]) + 1
    os.pwrite(fd, USER_COUNTER.pack(user), USER_COUNTER_AT)
    if not try_lock(fd, LIVENESS_AT + user):
        raise SetupError("The user counter of the shared-memory segment is corrupt; remove the segment.")
    return user


def _prefix(name: str) -> str:
    """Return the common prefix of the paths of this name's segments; the block length follows. Names contain no @."""
    return f"{DIRECTORY}/pdserve-{name}@"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
