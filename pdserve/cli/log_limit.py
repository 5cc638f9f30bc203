"""Log filter that drops warnings which repeat too often, so that no client or peer can fill the disk."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 20  # lines of one kind in a period
PERIOD_S = 60.0


@dataclass
class _Period:
    start: float
    lines: int = 0
    dropped: int = 0


class LogLimit(logging.Filter):
    """Passes at most `BURST` warnings and errors a minute from one place in the code; the next one says how many it dropped.

    Lines below WARNING are not limited: pdserve writes none for a request unless `--log-requests` asks for them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._periods: dict[tuple[str, int], _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record; it may get a note about those dropped before."""
        if record.levelno < logging.WARNING:
            return True
        now, place = self._clock(), (record.pathname, record.lineno)
        period = self._periods.get(place)
        if period is None or now - period.start >= PERIOD_S:
            dropped = period.dropped if period else 0
            period = self._periods[place] = _Period(now)
            if dropped:
                record.msg = f"{record.getMessage()} ({dropped} more since the last line of this kind)"
                record.args = ()
        period.lines += 1
        if period.lines > BURST:
            period.dropped += 1
            return False
        return True
