"""Locks on bytes of a file that the kernel drops when their holder dies, however it dies.

These are Linux's open file description locks: they belong to one `os.open`, not to a process, so two connectors in one
process exclude each other too, and they work across containers, where process ids mean nothing. The bytes need not
exist in the file. Two threads on one file descriptor do not exclude each other.
"""

import errno
import fcntl
import struct
import time

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def try_lock(fd: int, offset: int) -> bool:
    """Whether this byte is locked now by `fd`."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock(fd: int, offset: int, deadline: float) -> None:
    """Locks this byte. Polls, because a holder that was stopped (SIGSTOP) would block a waiting call for ever.

    Raises:
        TimeoutError: not free until `deadline` (of `time.monotonic`).
    """
    pause = 20e-6
    while not try_lock(fd, offset):
        if time.monotonic() >= deadline:
            raise TimeoutError("another process has held the lock for too long")
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def unlock(fd: int, offset: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))


def held_by_others(fd: int, offset: int, length: int = 1) -> bool:
    """Whether anyone but `fd` holds a lock in this range; a length of 0 means to the end of all offsets."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, length, 0))
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)
