"""Restarts of child processes; tests/integration covers whole deployments."""

import io
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.cli.supervisor import (
    RESTART_BACKOFF_S,
    SETUP_ERROR_EXIT_CODE,
    STOP_TIMEOUT_S,
    Child,
    Supervisor,
    print_line,
)
from pdserve.config import INTERRUPT_GRACE_S
from pdserve.errors import SetupError


def test_lines_of_several_children_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "write", written.append)
    monkeypatch.setattr(sys, "stdout", stdout)
    print_line("[decode-0] ready")
    assert [*filter(None, written)] == ["[decode-0] ready\n"], "in one piece, between which no thread prints"


class PythonSupervisor(Supervisor):
    """Runs `python -c` instead of `pdserve`."""

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


def wait_for_exit(child: Child) -> None:
    assert child.process is not None
    child.process.wait(600)


def test_exited_child_is_restarted_after_its_back_off() -> None:
    child, lines = Child("child", ["print('hello'); raise SystemExit(7)"]), list[str]()
    with PythonSupervisor([child], lines.append) as supervisor:
        wait_for_exit(child)
        first, reader = child.process, child.reader
        supervisor.check_children()
        assert child.restart_at is not None and child.restart_at - time.monotonic() <= RESTART_BACKOFF_S[0]
        child.restart_at += 600  # this process may get no core for longer than the back-off
        supervisor.check_children()
        assert child.process is first, "the back-off is not over"
        child.restart_at = 0.0
        supervisor.check_children()
        assert child.process is not first and child.failures == 1
        assert reader is not None
        reader.join(600)
    assert "[child] exited (exit code 7); restarting in 0.5 s" in lines and "[child] hello" in lines


def test_output_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as the message of a library in another encoding; what is printed after it is still read."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf 'a\\351b\\nmore\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    child, lines = Child("child", []), list[str]()
    with Supervisor([child], lines.append):
        wait_for_exit(child)
        assert child.reader is not None
        child.reader.join(600)
    assert lines[:2] == ["[child] a\N{REPLACEMENT CHARACTER}b", "[child] more"]


@pytest.mark.parametrize("code", [0, SETUP_ERROR_EXIT_CODE])
def test_the_last_lines_of_a_child_are_not_lost(code: int) -> None:
    """Printing them may take a while, on a busy machine or a slow terminal."""
    lines = list[str]()

    def print_slowly(line: str) -> None:
        time.sleep(0.1)
        lines.append(line)

    child = Child("child", [f"[print(i) for i in range(20)]; raise SystemExit({code})"])
    with pytest.raises(SetupError) if code else nullcontext(), PythonSupervisor([child], print_slowly) as supervisor:
        wait_for_exit(child)
        if code:
            supervisor.check_children()
    assert lines == [f"[child] {i}" for i in range(20)]


def test_start_up_error_is_raised() -> None:
    child = Child("child", [f"raise SystemExit({SETUP_ERROR_EXIT_CODE})"])
    with PythonSupervisor([child], lambda line: None) as supervisor:
        wait_for_exit(child)
        with pytest.raises(SetupError, match="child could not start; see its error above"):
            supervisor.check_children()


def test_added_child_starts_and_removed_child_ends_for_good() -> None:
    sleep = "import time; print('up', flush=True); time.sleep(600)"
    first, second, lines = Child("first", [sleep]), Child("second", [sleep]), list[str]()
    with PythonSupervisor([first], lines.append) as supervisor:
        supervisor.add(second)
        supervisor.check_children()
        assert second.running
        process = first.process
        supervisor.remove(first, drain_s=600)
        supervisor.check_children()
        wait_for_exit(first)
        supervisor.check_children()
        assert supervisor.children == [second] and first.process is process and second.running
    assert "[first] stopped" in lines and not [line for line in lines if "restarting" in line]


def test_removed_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.supervisor.STOP_TIMEOUT_S", 0.0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child, lines = Child("child", [deaf]), list[str]()
    with PythonSupervisor([child], lines.append) as supervisor:
        while "[child] up" not in lines:
            time.sleep(0.02)
        supervisor.remove(child, drain_s=0.0)
        supervisor.check_children()
        supervisor.check_children()
        wait_for_exit(child)
        supervisor.check_children()
        assert not supervisor.children
    assert lines[1:] == ["[child] did not stop within 0 s: killed", "[child] stopped"]


def test_child_that_waits_for_its_restart_can_be_removed() -> None:
    child = Child("child", ["raise SystemExit(7)"])
    with PythonSupervisor([child], lambda line: None) as supervisor:
        wait_for_exit(child)
        supervisor.check_children()
        assert child.restart_at is not None
        supervisor.remove(child, drain_s=600)
        supervisor.check_children()
        assert not supervisor.children


class Clock:
    """A clock that advances only by waits that time out."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def join(self, timeout: float) -> None:
        self.seconds += timeout


class Deaf:
    """A process that ends only if it is killed; another one has its pipe."""

    pid, stdout = 1, None
    returncode: int | None = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, sig: int) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            assert timeout is not None
            self._clock.join(timeout)
            raise subprocess.TimeoutExpired("deaf", timeout)
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9


def test_children_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr("pdserve.cli.supervisor.time", clock)
    children = [Child(name, [], process=cast(Any, Deaf(clock)), reader=cast(Any, clock)) for name in "abc"]
    Supervisor(children, lines.append).drain(7.0)
    assert lines == [f"[{name}] did not stop within {7 + STOP_TIMEOUT_S:.0f} s: killed" for name in "abc"]
    assert clock.seconds == 7.0 + 2 * STOP_TIMEOUT_S, "until they are killed, and for their last lines"


def test_the_time_of_requests_is_not_taken_from_that_for_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(Supervisor, "_terminate", lambda self, children, signum, timeout_s: limits.append(timeout_s))
    supervisor = Supervisor([], print)
    supervisor.stop_all()
    supervisor.drain(7.0)
    assert limits == [INTERRUPT_GRACE_S + STOP_TIMEOUT_S, 7.0 + STOP_TIMEOUT_S]
