"""What keeps a late worker away from rows that are no longer its own."""

import threading
from types import TracebackType


class Expired(Exception):
    """The operation was answered at its deadline: its rows must not be touched any more."""


class Fence:
    """Open while the operation's rows may be touched. `with fence:` raises `Expired` once it is closed. It also does so
    once `left` is set, which waits for nothing: a copy may be under way."""

    __slots__ = ("_closed", "_lock", "left")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.left = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed or self.left:
            self._lock.release()
            raise Expired

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def close(self) -> bool:
        """Whether this call closed it. Waits for the one copy that may be under way."""
        with self._lock:
            first = not self._closed
            self._closed = True
        return first
