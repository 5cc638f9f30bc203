"""Priorities of processes, and the CPU time that they have used."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from pdserve import priority


@pytest.fixture
def process() -> Iterator[int]:
    """The id of a process that leads its session, and waits."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as waiting:
        yield waiting.pid


def test_a_process_is_lowered_once_and_never_raised(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask worker is lowered while it loads, and when its masks have taken long."""
    normal = os.getpriority(os.PRIO_PROCESS, process)
    monkeypatch.setattr(priority, "NORMAL", normal)
    for by, expected in ((1, 1), (1, 1), (3, 3), (2, 3)):
        priority.lower(process, by)
        assert os.getpriority(os.PRIO_PROCESS, process) == min(priority.LOWEST, normal + expected)


def test_a_process_that_has_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    priority.lower(ended.pid)
    assert priority.cpu_seconds(ended.pid) == 0.0
