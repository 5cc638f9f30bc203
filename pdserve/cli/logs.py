"""How log lines look: text for people, JSON for programs. Where a record is about an instance or a request, it says so in
`extra`, which JSON shows as fields of their own."""

import json
import logging
from datetime import UTC, datetime

from pdserve.config import LOG_FORMATS
from pdserve.errors import SetupError

TEXT = "%(asctime)s %(levelname).1s %(message)s"
FIELDS = ("event", "instance", "request_id", "request")  # that records may have in `extra`


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line: time (UTC), level, logger, message, what there is of FIELDS, and the traceback of an error."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None))}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(form: str = "text") -> None:
    """Has the root logger write to stderr in this form, from now on.

    Raises:
        SetupError: there is no such form.
    """
    if form not in LOG_FORMATS:
        raise SetupError(f"--log-format is {' or '.join(LOG_FORMATS)}, not {form!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT, "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "transformers", "asyncio", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
