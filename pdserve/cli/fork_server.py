"""A preloaded parent of routers and instances on CPUs: it imports what they run once, and forks each of them.

    python -m pdserve.cli.fork_server DESCRIPTOR SPACE

Importing torch and transformers takes longer than all else that a process does before it serves. The server runs no torch
operation, starts no thread and opens no other socket, so what it forks is as good as a new process.

DESCRIPTOR is one end of a socket pair, SPACE the room for what `ps` shows. A request is a JSON list of arguments and
environment, with the descriptors of stdout, stderr and a status pipe, and those that the process shall have besides. The
status pipe gets the pid and later the return code, a line each. The server ends when the other ends of its connections are
closed, and with the process that started it; what it has forked ends with the server (`parent.py`).
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from pdserve import parent
from pdserve.cli.signals import exit_on_signals

# What routers import, and what instances do besides. A router that needs no torch does not wait for the latter.
OF_ROUTERS = ["pdserve.cli.commands", "pdserve.router.server", "pydantic.v1"]  # FastAPI's applications need the last
OF_INSTANCES = [
    *("torch", "torch.fx.experimental.symbolic_shapes", "pdserve.engine.without_compiler"),
    *("pdserve.engine.model_runner", "pdserve.instance.process"),
    *("transformers.models.llama.modeling_llama", "pdserve.kv_transfer.connectors.shm.connector"),
]
TITLE_BYTES = 4000
MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 4
LOST_POLL_S = 0.02


class ForkedProcess:
    """A forked process, with the part of the Popen interface that a supervisor uses.

    Args:
        status: the reading end of its status pipe.
        output: the reading end of its stdout and stderr, if it is a pipe.
    """

    def __init__(self, server: "ForkServer | None", status: int, output: int | None = None) -> None:
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        if output is not None:
            self.stdout = open(output, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by its reader
        self._server = server
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self._pid, self._pidfd = 0, -1

    @property
    def pid(self) -> int:
        """Process id, once the server has loaded; 0 if it ended before."""
        while self.poll() is None and not self._pid:
            select.select([self._status], [], [])
        return self._pid

    def poll(self) -> int | None:
        while self.returncode is None and select.select([self._status], [], [], 0)[0]:
            line = self._status.readline()
            if not line:  # the server has died, and this process gets SIGTERM
                if self._pidfd < 0 or select.select([self._pidfd], [], [], 0)[0]:
                    self._end(-signal.SIGTERM)
                break
            if self._pid:
                self._end(int(line))
            else:
                self._pid = int(line)
                with suppress(ProcessLookupError):  # it has ended already
                    self._pidfd = os.pidfd_open(self._pid)
                if self._server is not None:
                    self._server.has_forked = True
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("pdserve", timeout or 0.0)
            if select.select([self._status], [], [], left)[0]:
                time.sleep(LOST_POLL_S * (self._pid > 0))
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is not None:
            return
        if not self._pid and self._server is not None and not self._server.has_forked:
            self._server.kill()  # it is loading
        elif self.pid and self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._status.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


class ForkServer:
    """Client of a fork server of its own, which is started at once and loads meanwhile. It is called in one thread.

    Attributes:
        has_forked: a process is known to have been forked.
    """

    def __init__(self) -> None:
        self.has_forked = False
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdserve.cli.fork_server", str(theirs.fileno()), " " * TITLE_BYTES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ
                | parent.environment()
                | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's, which has no work here
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def spawn(self, arguments: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Start a `pdserve` command, with its stdout and stderr in one pipe."""
        output, printed = os.pipe()
        try:
            status = request(self._connection, arguments, environment, printed, printed)
        finally:
            os.close(printed)
        return ForkedProcess(self, status, output)

    def kill(self) -> None:
        """End the server at once, and all that it has forked with SIGTERM."""
        self.process.kill()

    def close(self) -> None:
        """End the server after all that it has forked."""
        self._connection.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it open, too
        self._connection.close()
        if not self.has_forked:
            self.kill()
        self.process.wait()


_early: list[ForkServer] = []  # the one that loads while this process still imports what reads its flags


def start_early() -> None:
    """Start the fork server for `take`, unless this machine has GPUs: CUDA does not survive a fork."""
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        _early.append(ForkServer())


def take() -> ForkServer:
    """Return a fork server: the early one, or a new one."""
    return _early.pop() if _early else ForkServer()


def discard_early() -> None:
    """End the early fork server, which is not needed."""
    while _early:
        _early.pop().close()


def request(connection: socket.socket, arguments: list[str], environment: Mapping[str, str], *descriptors: int) -> int:
    """Send a request to a fork server, and return the reading end of the process's status pipe."""
    stdout, stderr, *inherited = descriptors
    status, written = os.pipe()
    message = json.dumps([arguments, dict(environment)]).encode()
    try:
        socket.send_fds(connection, [message], [stdout, stderr, written, *inherited])
    finally:
        os.close(written)
    return status


class _Request(NamedTuple):
    """A process to be forked; its descriptors are stdout, stderr, its status pipe, and those that it inherits."""

    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]


class Server:
    """The fork server's side.

    Args:
        listener: where further clients connect, if any may.
    """

    def __init__(self, connections: list[socket.socket], listener: socket.socket | None = None) -> None:
        self._connections, self._listener = connections, listener
        self._running: dict[int, tuple[int, int]] = {}  # pid and status pipe of each process, by its pidfd

    def wait_for_command(self, loading: Iterable[object]) -> list[str]:
        """Serve requests until all clients have left. In each forked process, return its arguments.

        Args:
            loading: imports, in steps. Between them routers that need no torch are forked, and all else when it ends.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited SIG_IGN would lose the codes
        waiting: list[_Request] = []
        for _ in loading:
            waiting += self._receive(timeout_s=0)
            for request in [one for one in waiting if _is_light(one.arguments)]:
                waiting.remove(request)
                if not self._fork(request):
                    return self._become(request, waiting)
        while True:
            waiting = waiting or self._receive()
            while waiting:
                request, *waiting = waiting
                if not self._fork(request):
                    return self._become(request, waiting)

    def _receive(self, timeout_s: float | None = None) -> "list[_Request]":
        """Return requests that have arrived, after waiting for one, for new and leaving clients or the end of a process."""
        listening = [self._listener] if self._listener else []
        waited_for = [*self._running, *(one.fileno() for one in (*listening, *self._connections))]
        ready = {*select.select(waited_for, [], [], timeout_s)[0]}
        requests, sending = [], [one for one in self._connections if one.fileno() in ready]
        if self._listener and self._listener.fileno() in ready:
            self._connections.append(self._listener.accept()[0])
        for pidfd in ready & self._running.keys():
            self._reap(pidfd)
        for connection in sending:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
            if message:
                arguments, environment = json.loads(message)
                requests.append(_Request(arguments, environment, descriptors))
                continue
            connection.close()
            self._connections.remove(connection)
            if not self._connections:
                os._exit(0)
        return requests

    def _become(self, request: "_Request", others: "list[_Request]") -> list[str]:
        """Make a forked process the one that was asked for, without what belongs to others, and return its arguments."""
        gc.enable()
        for one in (*filter(None, [self._listener]), *self._connections):
            one.close()
        for descriptor in (one for other in others for one in other.descriptors):
            os.close(descriptor)
        output, errors, _, *inherited = request.descriptors
        _become(request.arguments, request.environment, output, errors)
        return [*request.arguments, *map(str, inherited)]

    def _reap(self, pidfd: int) -> None:
        """Report the end of a process. (A handler of SIGCHLD would not run if that came just before `select` waits.)"""
        pid, status = self._running.pop(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError), os.fdopen(status, "wb", 0) as pipe:
            pipe.write(f"{code}\n".encode())

    def _fork(self, request: "_Request") -> int:
        """Fork a process for a request, and return its pid; in the process itself 0."""
        output, errors, status, *inherited = request.descriptors
        gc.freeze()  # otherwise each child spends a second at exit on collecting, and copying, the imported modules
        blocked = [signal.SIGINT, signal.SIGTERM]  # Python drops those that arrive during a fork
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        server, pid = os.getpid(), os.fork()
        if pid:
            self._running[os.pidfd_open(pid)] = pid, status
            with suppress(BrokenPipeError):
                os.write(status, f"{pid}\n".encode())
            unused = [output, errors, *inherited]
        else:
            parent.receive_at_end()
            if os.getppid() != server:  # it died before the line above
                os._exit(128 + signal.SIGTERM)
            unused = [status, *self._running, *(pipe for _, pipe in self._running.values())]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        for descriptor in unused:
            os.close(descriptor)
        return pid


def _is_light(arguments: list[str]) -> bool:
    """Return whether a command is that of a router that needs no torch."""
    if arguments[:1] != ["router"]:
        return False
    from pdserve.model_path import DEMO
    from pdserve.router.text.tokenizer import needs_torch

    model = arguments[arguments.index("--model") + 1] if "--model" in arguments else "demo"
    return not needs_torch(DEMO if model == "demo" else model)


def _become(arguments: list[str], environment: Mapping[str, str], output: int, errors: int) -> None:
    """Make a forked process what `Popen` would have made: its session, descriptors, environment and title."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, output, errors)):
        os.dup2(source, target)
    for one in {nothing, output, errors}:
        os.close(one)
    os.environ.clear()
    os.environ.update(environment)
    _set_title([sys.executable, "-m", "pdserve", *arguments])


def _set_title(command: list[str]) -> None:
    """Replace what `ps` shows, as far as it fits into the memory in which the kernel put the arguments of this process."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[45]), int(stat[46])  # arg_start and arg_end
    if not 0 < start < end:  # a kernel that does not tell
        return
    title = b"\0".join(os.fsencode(one) for one in command)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))


def main() -> None:
    """Load, and serve the requests of one client. In a forked process, run its command."""
    exit_on_signals()
    parent.end_with_parent()
    descriptor = int(sys.argv[1])
    _set_title([sys.executable, "-m", "pdserve.cli.fork_server", str(descriptor)])
    arguments = Server([socket.socket(fileno=descriptor)]).wait_for_command(load())
    from pdserve.cli.commands import main as run

    sys.argv[:] = ["pdserve", *arguments]
    run()


def load(more: Sequence[str] = ()) -> Iterator[None]:
    """Import what routers need and, in steps, what instances need and more. What cannot be imported they will report."""
    gc.disable()  # while all that is made stays
    with suppress(ImportError, OSError):
        for name in OF_ROUTERS:
            importlib.import_module(name)
        importlib.import_module("pdserve.router.web.dialect").load_dialects()
        for name in (*OF_INSTANCES, *more):
            yield
            importlib.import_module(name)
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # fills a cache of transformers
    gc.enable()


if __name__ == "__main__":
    main()
