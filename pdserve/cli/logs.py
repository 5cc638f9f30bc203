"""Log formats: text for people, JSON for programs.

Records about an instance or a request name it in `extra`; the JSON format turns those attributes into fields.
"""

import json
import logging
from datetime import UTC, datetime

from pdserve.cli.log_limit import LogLimit
from pdserve.config import LOG_FORMATS
from pdserve.errors import SetupError

TEXT_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
EXTRA_FIELDS = ("event", "instance", "request_id", "request")


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time (UTC), level, logger, message, the EXTRA_FIELDS that are set, and the traceback if any."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name in EXTRA_FIELDS if (value := getattr(record, name, None))}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(log_format: str = "text") -> None:
    """Make the root logger write to stderr in this format.

    Raises:
        SetupError: the format is unknown.
    """
    if log_format not in LOG_FORMATS:
        raise SetupError(f"--log-format must be {' or '.join(LOG_FORMATS)}, not {log_format!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT, "%H:%M:%S"))
    handler.addFilter(LogLimit())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "transformers", "asyncio", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
