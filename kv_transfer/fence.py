"""A lock that keeps a late worker thread from touching pool rows that now belong to another sequence."""

import threading
from types import TracebackType


class Expired(Exception):
    """The operation is closed or cancelled: its rows must not be touched any more."""


class Fence:
    """Guards the pool rows of one operation. `with fence:` permits access while the fence is open.

    Entering raises `Expired` once the fence is closed, or after `cancel`, which does not wait for a copy in progress;
    `close` does.
    """

    __slots__ = ("_closed", "_lock", "cancelled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.cancelled = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed or self.cancelled:
            self._lock.release()
            raise Expired

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def cancel(self) -> None:
        """Refuse further access. Returns at once."""
        self.cancelled = True

    def close(self) -> bool:
        """Close the fence, after waiting for a copy in progress. Returns True if this call closed it."""
        with self._lock:
            first = not self._closed
            self._closed = True
        return first
