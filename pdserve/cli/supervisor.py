"""Child processes that are started together, restarted one by one, and stopped as one."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pdserve.errors import SetupError

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a restart; the last one repeats
STABLE_S = 60.0  # a child that ran this long starts over with the first back-off
STOP_S = 10.0  # from SIGTERM to SIGKILL
SETUP_ERROR = 2  # exit code of a start-up error: the same command would fail again
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec there is little that one may do


@dataclass
class Child:
    """One process."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    reader: threading.Thread | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Use it as a context manager, and call `tend` now and then.

    Args:
        say: called with each line that a child prints, its name in front.
    """

    def __init__(self, children: list[Child], say: Callable[[str], None]) -> None:
        self.children = children
        self._say = say
        self._was_ready = False  # afterwards, what cannot start now may start later

    def __enter__(self) -> Self:
        for child in self.children:
            self._start(child)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def tend(self) -> None:
        """Restarts children that have died, each after its back-off.

        Raises:
            SetupError: one says that it cannot start at all.
        """
        now = time.monotonic()
        for child in self.children:
            if child.running:
                continue
            if child.restart_at is None:
                self._died(child, now)
            elif now >= child.restart_at:
                self._start(child)

    def stop(self) -> None:
        """Ends all children, the last first."""
        self._end(signal.SIGINT, STOP_S)

    def drain(self, seconds: float) -> None:
        """Ends all children, each when what it has under way has ended, which may take so long."""
        self._end(signal.SIGTERM, seconds + STOP_S)

    def _end(self, number: signal.Signals, patience_s: float) -> None:
        for child in reversed(self.children):
            if child.running:
                os.kill(child.pid, number)
        for child in self.children:
            if child.process is None:
                continue
            try:
                child.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._say(f"[{child.name}] did not stop within {patience_s:.0f} s: killed")
                child.process.kill()
                child.process.wait()
            if child.reader is not None:
                child.reader.join(timeout=1.0)

    def _died(self, child: Child, now: float) -> None:
        assert child.process is not None
        code = child.process.returncode
        if code == SETUP_ERROR and not self._was_ready:
            if child.reader is not None:
                child.reader.join(timeout=1.0)
            raise SetupError(f"{child.name} could not start; its reason stands above")
        if now - child.started > STABLE_S or code == 0:  # it was drained
            child.failures = 0
        pause = BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        child.restart_at = now + pause
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._say(f"[{child.name}] ended ({how}); restarting in {pause:g} s")

    def _start(self, child: Child) -> None:
        child.restart_at = None
        child.started = time.monotonic()
        child.process = self._spawn(child.arguments, os.environ | child.environment)
        child.reader = threading.Thread(target=self._pump, args=(child.name, child.process), daemon=True)
        child.reader.start()

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops them in order
            preexec_fn=die_with_parent,
        )

    def _pump(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                line = line.rstrip()
                self._say(line if line.startswith("{") else f"[{name}] {line}")  # --log-format json stays JSON


def die_with_parent() -> None:
    """In the child: a supervisor that is killed takes its children with it."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
