"""Log formats: text for people, JSON for programs.

Records about an instance or a request name it in `extra`; the JSON format turns those attributes into fields.

Log messages can contain text of clients, in the errors of libraries and instances for example. Control characters are
therefore escaped: a line break would forge a line, and an escape sequence would reach the operator's terminal.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

TEXT_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
EXTRA_FIELDS = ("event", "instance", "request_id", "request")
# C0 and C1 controls and DEL, Unicode's line and paragraph separators, and the characters that reorder a line.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class TextFormatter(logging.Formatter):
    """Format a record as one line of text, and its traceback, if any, as indented lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, with control characters as \\x1b or \\u2028."""
        return _escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback with its line breaks. The indentation tells its lines from those of other records."""
        return "\n".join(f"  {_escape(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time (UTC), level, logger, message, the EXTRA_FIELDS that are set, and the traceback if any."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name in EXTRA_FIELDS if (value := getattr(record, name, None))}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # JSON itself escapes the others; all of them can only be inside of strings here.
        return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(line, ensure_ascii=False))


def configure(log_format: str = "text") -> None:
    """Make the root logger write to stderr in this format, `text` or `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT_FORMAT, "%H:%M:%S"))
    handler.addFilter(LogLimit())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "transformers", "asyncio", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def take_over() -> None:
    """Remove the handlers of libraries whose messages the root logger writes, too. They must have been imported."""
    logging.getLogger("huggingface_hub").handlers.clear()


def _escape(text: str) -> str:
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
