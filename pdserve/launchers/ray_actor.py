"""One instance as a Ray actor: the actor runs the instance's process and prints its output, which Ray logs."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pdserve import parent


class InstanceActor:
    """Actor that runs `pdserve ARGUMENTS`. It needs two threads: one for `run`, one for `send_signal` meanwhile.

    The process is killed when the actor dies: Ray then gives its CPUs, its GPU and its place to another one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:  # shown by Ray's dashboard
        return self._name

    def run(self, arguments: list[str], environment: dict[str, str]) -> Iterator[int | str]:
        """Run the process. Yields the actor's own pid, each line that the process prints, and at last its exit code."""
        blocked = signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # Ray blocks it, and children inherit that
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",  # a library may print anything
            env=os.environ | environment | parent.environment(signal.SIGKILL),
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdout is not None
        yield os.getpid()
        for line in process.stdout:
            print(line, end="", flush=True)
            yield line
        yield process.wait()

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)


class ActorProcess:
    """The process of an actor, with the part of the Popen interface that `Supervisor` uses.

    Attributes:
        pid: process id of the actor on its node; 0 until it runs.
        stdout: what the process prints; must be read, as the process ends for this object when its output does.
    """

    def __init__(self, actor: ActorHandle, arguments: list[str], environment: dict[str, str]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._actor = actor
        self._items = actor.run.options(num_returns="streaming").remote(arguments, environment)
        self.stdout = self._read()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("pdserve", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process; an actor that waits for its place is ended at once."""
        if self.pid:
            self._actor.send_signal.remote(signum)
        else:
            self.kill()

    def kill(self) -> None:
        ray.kill(self._actor)

    def _read(self) -> Generator[str, None, None]:
        code = -signal.SIGKILL  # of a process that ended with its actor
        try:
            for reference in self._items:
                item = ray.get(reference)
                if isinstance(item, str):
                    yield item
                elif not self.pid:
                    self.pid = item
                else:
                    code = item
        except RayError as error:
            yield f"the actor has died: {str(error).splitlines()[0]}"
        finally:
            self.kill()  # it has nothing more to do
            self.returncode = code
            self._ended.set()
