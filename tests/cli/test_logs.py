"""Log lines, as text and as JSON."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.cli.logs import JsonFormatter
from pdserve.lifetime import Stage
from pdserve.router.telemetry.timeline import Timeline, log_finished


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """JSON lines of the logger "pdserve", as they are written."""
    logger, handler = logging.getLogger("pdserve"), logging.Handler()
    handler.setFormatter(JsonFormatter())
    written: list[str] = []
    handler.emit = lambda record: written.append(handler.format(record))  # type: ignore[method-assign]  # the rest of a handler is not needed
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_record_becomes_one_json_object(lines: list[str]) -> None:
    log = logging.getLogger("pdserve.router.instances.fleet")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("%s failed", "é", extra={"event": "failed", "request_id": "r", "other": 1})
    log.info("no extra fields")
    first, second = map(json.loads, lines)
    assert {name: first[name] for name in first if name not in ("time", "traceback")} == {
        "level": "ERROR",
        "logger": "pdserve.router.instances.fleet",
        "message": "é failed",
        "event": "failed",
        "request_id": "r",
    }
    assert first["traceback"].endswith("ValueError: two\nlines") and first["time"].endswith("+00:00")
    assert set(second) == {"time", "level", "logger", "message"}


def test_finished_request_is_logged_with_its_latencies(lines: list[str]) -> None:
    timeline = Timeline("r", prompt_tokens=5, output_tokens=2, finish_reason="stop", decode_instance="d")
    timeline.stamps = {Stage.RECEIVED: 10.0, Stage.FIRST_TOKEN: 10.25, Stage.FINISHED: 11.0}
    log_finished(timeline)
    log_finished(Timeline("s", finish_reason="cancelled"))
    first, second = map(json.loads, lines)
    assert first["request_id"] == "r" and "r ended: finish_reason=stop prompt_tokens=5" in first["message"]
    assert (first["request"]["ttft_ms"], first["request"]["e2e_ms"], first["request"]["decode_instance"]) == (
        250,
        1000,
        "d",
    )
    assert second["request"]["ttft_ms"] is None


def test_process_logs_json_to_stderr() -> None:
    code = (
        "from pdserve.cli import logs; logs.configure('json'); import logging; logging.getLogger('pdserve').info('up')"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    (line,) = finished.stderr.splitlines()
    assert json.loads(line)["message"] == "up"


@pytest.mark.parametrize("command", ["router(RouterConfig())", 'instance(InstanceConfig(), "decode")'])
def test_messages_of_the_hub_are_written_once(command: str, pdserve: Callable[..., Any]) -> None:
    """Its library writes them itself, and passes them on."""
    code = f"""
import logging
from pdserve.cli import commands
from pdserve.config import InstanceConfig, RouterConfig

def serve(*_):
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")

import pdserve.router.server, pdserve.instance.process
pdserve.router.server.serve = pdserve.instance.process.serve = serve
commands.{command}
"""
    finished = pdserve("-c", code)
    [line] = [line for line in finished.stderr.splitlines() if "Retrying" in line]
    assert line.endswith(" W Retrying in 1s"), finished.stderr


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_clients_cannot_write_lines_or_escape_sequences(log_format: str) -> None:
    forged = "\x1b[2J\n12:00:00 E forged\r\x00\x7f\x9b\u2028\u202e"
    code = f"""
from pdserve.cli import logs
logs.configure({log_format!r})
import logging
log = logging.getLogger("pdserve")
log.warning("invalid: %s", {forged!r})
try:
    raise ValueError({forged!r})
except ValueError:
    log.exception("failed", extra={{"request_id": {forged!r}}})
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=1200)
    output = finished.stderr.decode()
    assert not set(forged) & set(output) & set("\x1b\r\x00\x7f\x9b\u2028\u202e")
    lines = output.removesuffix("\n").split("\n")
    assert not any(line.startswith("12:00:00") for line in lines)
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert first["message"] == f"invalid: {forged}"
        assert second["request_id"] == forged and second["traceback"].endswith(f"ValueError: {forged}")
    else:
        escaped = r"\x1b[2J\n12:00:00 E forged\r\x00\x7f\x9b\u2028\u202e"
        assert lines[0].endswith(f" W invalid: {escaped}")
        assert lines[1].endswith(" E failed") and lines[2] == "  Traceback (most recent call last):"
        assert lines[-2:] == [r"  ValueError: \x1b[2J", r"  12:00:00 E forged\r\x00\x7f\x9b\u2028\u202e"]
