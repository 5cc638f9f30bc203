"""Fork server for `pdserve …` commands, which saves each process the seconds of importing torch and other packages.

    python fork_server.py LISTENER ADDRESS

imports the modules of instances and routers, and then reads requests from those who connect to the abstract Unix socket
ADDRESS, on which the descriptor LISTENER listens: all the workers of a run, and what they started. A request is a JSON list
of arguments and environment, with three descriptors: stdout, stderr, and a status pipe, which receives the pid and later the
return code, one line each. The commands `follower`, of pdserve/ranks/, and `compile`, of pdserve/grammars/, have a fourth:
their connection. The server forks each command, and tells when it has ended. What a command starts is requested from this
server too.
"""

import atexit
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn, Self

# What routers and instances import, so that each of hundreds of processes need not.
IMPORTED = [
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    *("pdserve.cli.commands", "pdserve.cli.supervisor", "pdserve.instance.process", "pdserve.ranks.follower"),
    *("pdserve.kv_transfer.connectors.shm.connector", "pdserve.kv_transfer.connectors.file"),
    *("pdserve.grammars.compile_server", "pdserve.router.server"),
    *("pdserve.router.dialects.embeddings", "pdserve.router.dialects.messages.endpoints"),
    *("pdserve.router.dialects.responses.endpoints", "pdserve.router.dialects.batches.endpoints"),
    "pydantic.v1",  # by FastAPI when it makes an application
]
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ForkedProcess:
    """A command in a forked process, with the part of the Popen interface that deployments use."""

    def __init__(self, status: int) -> None:
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("pdserve", timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode


class ForkServer:
    """Client of the fork server, which runs as long as it has clients."""

    def __init__(self, address: str) -> None:
        """`address` is a name of an abstract Unix socket."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(f"\0{address}")

    @classmethod
    def shared(cls, folder: Path) -> Self:
        """Return a client of the one server of all processes that name this folder; the first of them starts it."""
        address = f"pdserve-{hashlib.sha256(str(folder).encode()).hexdigest()}"
        with (folder / "fork_server.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(ConnectionRefusedError):
                return cls(address)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"\0{address}")
                listener.listen(1000)
                command = [sys.executable, "-P", __file__, str(listener.fileno()), address]
                subprocess.Popen(command, pass_fds=[listener.fileno()], start_new_session=True)
                return cls(address)

    def start(
        self, arguments: list[str], environment: Mapping[str, str], output: int, errors: int, *inherited: int
    ) -> ForkedProcess:
        """Start a command; `output` and `errors` are file descriptors for its stdout and stderr."""
        status, written = os.pipe()
        message = json.dumps([arguments, dict(environment)]).encode()
        socket.send_fds(self._connection, [message], [output, errors, written, *inherited])
        os.close(written)
        return ForkedProcess(status)

    def spawn(self, arguments: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Start a command as Supervisor does, with its output readable from `stdout`."""
        output, printed = os.pipe()
        child = self.start(arguments, environment, printed, printed)
        os.close(printed)
        child.stdout = open(output)  # noqa: SIM115 - closed by its reader
        return child

    def start_follower(self, connection: int, rank: int, port: int) -> ForkedProcess:
        """Start a follower as `pdserve.ranks.followers.start_process` does."""
        return self.start(["follower", str(rank), str(port)], os.environ, 1, 2, connection)

    def start_compile_server(self, connection: int, arguments: list[str]) -> ForkedProcess:
        """Start a compile server as `pdserve.grammars.compiler.start_process` does."""
        return self.start(["compile", *arguments], os.environ, 1, 2, connection)

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    gc.enable()
    gc.freeze()  # otherwise each child spends a second at exit on collecting, and copying, the imported modules
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        arguments = wait_for_command(listener)
    import pdserve.grammars.compiler
    import pdserve.ranks.followers
    from pdserve.cli.supervisor import Supervisor

    # Patched because the process factories are not parameters of the product.
    server = ForkServer(sys.argv[2])
    pdserve.ranks.followers.start_process = server.start_follower  # type: ignore[assignment]
    pdserve.grammars.compiler.start_process = server.start_compile_server  # type: ignore[assignment]
    # Few tests have grammars: the first one starts the compile server.
    pdserve.grammars.compiler.GrammarCompiler.start = lambda _: None  # type: ignore[assignment,method-assign]
    Supervisor._spawn = lambda _, *command: server.spawn(*command)  # type: ignore[assignment,method-assign]
    try:
        run(arguments)
    except SystemExit as ended:
        end(ended.code)
    end(None)


def run(arguments: list[str]) -> None:
    if arguments[0] == "follower":
        import pdserve.ranks.follower

        _, rank, port, connection = arguments
        pdserve.ranks.follower.main(int(connection), int(rank), int(port))
    elif arguments[0] == "compile":
        import pdserve.grammars.compile_server

        _, *of_model, connection = arguments
        pdserve.grammars.compile_server.main([connection, *of_model])
    elif arguments[0].endswith(".py"):
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        import pdserve.cli.commands

        sys.argv[:] = ["pdserve", *arguments]
        pdserve.cli.commands.main()


def end(code: object) -> NoReturn:
    """Exit as `sys.exit(code)` does, but without the clean-up of all the imported modules, which takes 0.3 s."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def wait_for_command(listener: socket.socket) -> list[str]:
    """Serve requests until all clients have left. In each forked process, return the command's arguments."""
    connections: list[socket.socket] = []
    statuses: dict[int, int] = {}  # status pipes of running commands, by pid

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):  # a signal in here reaps another, perhaps the last
            while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended
                with suppress(BrokenPipeError), os.fdopen(statuses.pop(pid), "wb", 0) as status:
                    status.write(f"{os.waitstatus_to_exitcode(code)}\n".encode())

    signal.signal(signal.SIGCHLD, reap)
    while True:
        for ready in select.select([listener, *connections], [], [])[0]:
            if ready is listener:
                connections.append(listener.accept()[0])
                continue
            message, descriptors, _, _ = socket.recv_fds(ready, 1 << 17, 4)
            if not message:
                ready.close()
                connections.remove(ready)
                if not connections:
                    os._exit(0)
            elif not fork(descriptors, statuses):
                for connection in connections:
                    connection.close()
                output, errors, _, *inherited = descriptors
                return [*become(output, errors, *json.loads(message)), *map(str, inherited)]


def fork(descriptors: list[int], statuses: dict[int, int]) -> int:
    """Fork a process for a request, and return its pid; in the process itself 0."""
    output, errors, status, *inherited = descriptors
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until its status pipe is known
    pid = os.fork()
    if pid:
        statuses[pid] = status
        with suppress(BrokenPipeError):
            os.write(status, f"{pid}\n".encode())
        unused = [output, errors, *inherited]
    else:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        unused = [status, *statuses.values()]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for descriptor in unused:
        os.close(descriptor)
    return pid


def become(output: int, errors: int, arguments: list[str], environment: dict[str, str]) -> list[str]:
    os.setsid()
    _die_with_parent(signal.SIGTERM)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return arguments


def _die_with_parent(by: signal.Signals) -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, by)


if __name__ == "__main__":
    gc.disable()  # while all that is made stays
    for name in IMPORTED:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # fills a cache

    main()
