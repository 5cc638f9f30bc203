"""Supervision of child processes: start them together, restart each that exits, stop them together."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import IO, Protocol, Self

from pdserve import parent
from pdserve.cli.fork_server import ForkServer, discard_early, take
from pdserve.config import INTERRUPT_GRACE_S
from pdserve.errors import SetupError
from pdserve.settings import Settings

RESTART_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # the last one repeats
STABLE_AFTER_S = 60.0  # a child that ran this long restarts with the first back-off again
STOP_TIMEOUT_S = 30.0  # to SIGKILL, once requests have had their time; only ends a hang, also on a busy machine
SETUP_ERROR_EXIT_CODE = 2  # a start-up error, which a restart would repeat


class Process(Protocol):
    """The part of the Popen interface that a supervisor uses."""

    returncode: int | None

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | Generator[str, None, None] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


@dataclass(eq=False)
class Child:
    """A supervised `pdserve` process: its command, its current process, and the state of its restarts.

    Attributes:
        drain_s: seconds that it may drain for, once it is to be removed; until then None.
        kill_at: time at which it is killed while it drains.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: Process | None = None
    reader: threading.Thread | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float | None = None
    drain_s: float | None = None
    kill_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def read_to_end(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait until all lines of the ended process have been passed on, unless another one keeps its pipe open."""
        if self.reader is not None:
            self.reader.join(timeout_s)


def child_of(name: str, command: str, config: Settings) -> Child:
    """Return a process that runs a command with these settings.

    Settings that differ from their defaults and have an effect become flags or, if they have one, environment variables. A
    variable of this process is overridden by a default, too: it counts for no child whose settings say otherwise.
    """
    arguments, environment, idle = [command], {}, config.without_effect()
    for setting in fields(config):
        value, option = getattr(config, setting.name), f"--{setting.name.replace('_', '-')}"
        variable = setting.metadata["variable"]
        if setting.name in idle or (value == setting.default and not (variable and variable in os.environ)):
            continue
        if variable:
            environment[variable] = value
        else:
            arguments += [option] if value is True else [option, str(value)]
    return Child(name, arguments, environment)


def print_line(line: str) -> None:
    """Print a line of a child at once, and in one piece: threads of several children print."""
    print(f"{line}\n", end="", flush=True)


class Supervisor:
    """Context manager that runs child processes and restarts those that exit.

    The owner must call `check_children` periodically, in the thread that started the children: they end with that thread.
    `add` and `remove` may be called from any thread; the next `check_children` carries them out.

    Args:
        on_line: called with each line that a child prints, prefixed with the child's name.
        preload: fork the children from a parent that has imported what they run (`fork_server.py`).
    """

    def __init__(self, children: list[Child], on_line: Callable[[str], None], preload: bool = False) -> None:
        self.children = children
        self._on_line = on_line
        self._preload = preload
        if not preload:
            discard_early()
        self._fork_server: ForkServer | None = None
        self._was_ready = False  # once it was, a start-up error may be temporary, and the child is restarted

    def __enter__(self) -> Self:
        for child in self.children:
            self._start(child)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop_all()

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def add(self, child: Child) -> None:
        """Start one more child."""
        child.restart_at = 0.0
        self.children.append(child)

    def remove(self, child: Child, drain_s: float) -> None:
        """End a child for good: it drains for up to `drain_s` seconds after SIGTERM, and is not restarted."""
        child.drain_s = drain_s

    def check_children(self) -> None:
        """Restart children that have exited, each after its back-off; start added ones, and end removed ones.

        Raises:
            SetupError: a child reported a start-up error before the children were ready.
        """
        now = time.monotonic()
        for child in list(self.children):
            if child.drain_s is not None:
                self._end(child, child.drain_s, now)
            elif child.running:
                continue
            elif child.restart_at is None:
                self._schedule_restart(child, now)
            elif now >= child.restart_at:
                self._start(child)

    def stop_all(self) -> None:
        """Stop all children at once."""
        self._terminate(self.children, signal.SIGINT, INTERRUPT_GRACE_S + STOP_TIMEOUT_S)
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def drain(self, seconds: float) -> None:
        """Stop all children after their running requests have finished, which may take up to `seconds`."""
        self._terminate(self.children, signal.SIGTERM, seconds + STOP_TIMEOUT_S)

    def _terminate(self, children: Sequence[Child], signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all, and kill those that are left after a time that all of them have together."""
        started = [(child, child.process) for child in children if child.process is not None]
        for child, process in started:
            if child.running:
                process.send_signal(signum)
        deadline = time.monotonic() + timeout_s
        for child, process in started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._on_line(f"[{child.name}] did not stop within {timeout_s:.0f} s: killed")
                process.kill()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child, process in started:
            process.wait()
            child.read_to_end(max(0.0, deadline - time.monotonic()))

    def _end(self, child: Child, drain_s: float, now: float) -> None:
        if child.process is None or not child.running:
            self.children.remove(child)
            self._on_line(f"[{child.name}] stopped")
        elif child.kill_at is None:
            child.process.send_signal(signal.SIGTERM)
            child.kill_at = now + drain_s + STOP_TIMEOUT_S
        elif now >= child.kill_at:
            self._on_line(f"[{child.name}] did not stop within {drain_s + STOP_TIMEOUT_S:.0f} s: killed")
            child.process.kill()
            child.kill_at = math.inf

    def _schedule_restart(self, child: Child, now: float) -> None:
        assert child.process is not None
        code = child.process.returncode
        assert code is not None
        if code == SETUP_ERROR_EXIT_CODE and not self._was_ready:
            child.read_to_end()
            raise SetupError(f"{child.name} could not start; see its error above")
        if now - child.started_at > STABLE_AFTER_S or code == 0:  # exit code 0: the child was drained
            child.failures = 0
        backoff_s = RESTART_BACKOFF_S[min(child.failures, len(RESTART_BACKOFF_S) - 1)]
        child.failures += 1
        child.restart_at = now + backoff_s
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._on_line(f"[{child.name}] exited ({cause}); restarting in {backoff_s:g} s")

    def _start(self, child: Child) -> None:
        child.restart_at = None
        child.started_at = time.monotonic()
        child.process = self._process_of(child)
        child.reader = threading.Thread(target=self._forward_output, args=(child.name, child.process), daemon=True)
        child.reader.start()

    def _process_of(self, child: Child) -> Process:
        return self._spawn(child.arguments, os.environ | child.environment)

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Process:
        if self._preload:
            return self._running_fork_server().spawn(arguments, environment)
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",  # a library may print anything
            env=environment | parent.environment(),
            start_new_session=True,  # only the supervisor receives Ctrl-C; it stops the children in order
        )

    def _running_fork_server(self) -> ForkServer:
        if self._fork_server is not None and not self._fork_server.is_running:
            self._on_line("[preload] ended, and what it had started with it")
            self._fork_server.close()
            self._fork_server = None
        if self._fork_server is None:
            self._fork_server = take()
            output = ("preload", self._fork_server.process)
            threading.Thread(target=self._forward_output, args=output, daemon=True).start()
        return self._fork_server

    def _forward_output(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        with contextlib.closing(process.stdout) as lines:
            for line in lines:
                line = line.rstrip()
                # Lines of --log-format json stay JSON.
                self._on_line(line if line.startswith("{") else f"[{name}] {line}")
