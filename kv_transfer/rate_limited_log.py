"""Rate-limited warnings about a store."""

import logging
import threading
import time

log = logging.getLogger(__name__)

_INTERVAL_S = 60.0


class RateLimitedLog:
    """Logs the first warning of each kind at once, then at most one a minute with a count of those suppressed.

    A store that is down must not fill the disk with log lines.

    Attributes:
        last: the latest warning, logged or not.
    """

    def __init__(self, name: str) -> None:
        self.last = ""
        self._name = name
        self._lock = threading.Lock()
        self._last_logged: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warning(self, text: str, kind: str | None = None) -> None:
        """Log `text`, limited per `kind` (by default the text itself)."""
        self.last, kind = text, kind or text
        now = time.monotonic()
        with self._lock:
            if now - self._last_logged.get(kind, -_INTERVAL_S) < _INTERVAL_S:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._last_logged[kind] = now
            suppressed = self._suppressed.pop(kind, 0)
        log.warning("%s: %s%s", self._name, text, f" ({suppressed} more since the last report)" if suppressed else "")
