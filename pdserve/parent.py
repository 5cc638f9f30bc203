"""A child process that ends with its parent, even if the parent is killed.

The parent puts `environment()` into the child's environment, and the child calls `end_with_parent()` when it starts. The
kernel sends the signal when the thread ends that started the child (PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal

_VARIABLE = "PDSERVE_PARENT"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded at import: dlopen is not safe between fork and exec


def environment(signum: signal.Signals = signal.SIGTERM) -> dict[str, str]:
    """Return the variable by which a child learns of its parent, and the signal that it is to receive at its end."""
    return {_VARIABLE: f"{os.getpid()} {int(signum)}"}


def end_with_parent() -> None:
    """Make this process receive the signal when its parent dies, if it was started with `environment()`."""
    if value := os.environ.pop(_VARIABLE, ""):
        parent, signum = map(int, value.split())
        receive_at_end(signum)
        if os.getppid() != parent:  # it died before the line above
            raise SystemExit(128 + signum)


def receive_at_end(signum: int = signal.SIGTERM) -> None:
    """Make the calling process receive the signal when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum)
