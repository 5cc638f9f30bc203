"""Warnings about a store."""

import logging
import threading
import time

log = logging.getLogger(__name__)

_EVERY_S = 60.0


class RateLimitedLog:
    """Logs each kind of trouble at once, then once a minute with a count: a dead store must not fill the disk."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def add(self, text: str, kind: str | None = None) -> None:
        kind = kind or text
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -_EVERY_S) < _EVERY_S:
                self._silent[kind] = self._silent.get(kind, 0) + 1
                return
            self._last[kind] = now
            silent = self._silent.pop(kind, 0)
        log.warning("%s: %s%s", self._name, text, f" ({silent} more since the last report)" if silent else "")
