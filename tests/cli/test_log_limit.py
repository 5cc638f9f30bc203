"""The limit of repeated log lines."""

import logging
from collections.abc import Iterator

import pytest

from pdserve.cli import logs
from pdserve.cli.logs import BURST, LogLimit

log = logging.getLogger("test")


def fail(request: int, level: int = logging.WARNING) -> None:
    log.log(level, "request %d failed", request)


@pytest.fixture
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_repeated_warnings_are_dropped_and_counted(
    restore: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "LogLimit", lambda: LogLimit(lambda: now))
    logs.configure()
    for request in range(1000):
        fail(request)
    log.warning("an instance left")
    now = 60.0
    fail(1000)
    fail(1001)
    lines = [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        *(f"request {request} failed" for request in range(BURST)),
        "an instance left",
        f"request 1000 failed ({1000 - BURST} more since the last line of this kind)",
        "request 1001 failed",
    ]


def test_lines_that_were_asked_for_are_not_limited(restore: None, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    for request in range(1000):
        fail(request, logging.INFO)
    assert len(capsys.readouterr().err.splitlines()) == 1000
