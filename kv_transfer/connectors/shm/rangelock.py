"""Locks on single bytes of a file, which the kernel releases when the holding process dies in any way.

These are Linux's open file description locks: they belong to one `os.open`, not to a process. So two connectors in one
process exclude each other too, and the locks work across containers, where process ids are not comparable. The bytes need
not exist in the file. Two threads that use the same file descriptor do not exclude each other.
"""

import errno
import fcntl
import struct
import time

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def try_lock(fd: int, offset: int) -> bool:
    """Try to lock one byte without waiting. Returns True if `fd` holds the lock now."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
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


def unlock(fd: int, offset: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))


def is_locked_by_others(fd: int, offset: int, length: int = 1) -> bool:
    """Return True if another file descriptor than `fd` holds a lock in this range. Length 0: up to the last offset."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, length, 0))
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)
