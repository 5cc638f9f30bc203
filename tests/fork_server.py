"""Fork server for `pdserve …` commands, which saves each process the seconds of importing torch and other packages.

    python fork_server.py REQUESTS CLIENTS

imports the modules of instances and routers, and then reads requests from the socket with the descriptor REQUESTS. A request
is a JSON list of arguments and environment, with three descriptors: stdout, stderr, and a status pipe, which receives the
pid and later the return code, one line each. The command `follower`, of pdserve/ranks/, has a fourth: its connection. For
each request the server forks a keeper, which forks the command and waits for it. The children and followers that a command
starts are requested from this server too, through CLIENTS, the other end.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

# What routers and instances import, so that each of hundreds of processes need not.
IMPORTED = [
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    *("pdserve.cli.commands", "pdserve.cli.supervisor", "pdserve.instance.process", "pdserve.ranks.follower"),
    *("pdserve.kv_transfer.connectors.shm.connector", "pdserve.kv_transfer.connectors.file"),
    *("pdserve.router.dialects.embeddings", "pdserve.router.dialects.messages.endpoints"),
    *("pdserve.router.dialects.responses.endpoints", "pdserve.router.dialects.batches.endpoints"),
    *("pdserve.router.server", "pydantic.v1"),  # the latter by FastAPI when it makes an application
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
    """Client of the fork server."""

    def __init__(self, clients: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._clients, self._process = clients, process

    @classmethod
    def run(cls) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ends = theirs.fileno(), ours.fileno()
            command = [sys.executable, "-P", __file__, *map(str, ends)]
            return cls(ours, subprocess.Popen(command, pass_fds=ends, start_new_session=True))

    def start(
        self, arguments: list[str], environment: Mapping[str, str], output: int, errors: int, *inherited: int
    ) -> ForkedProcess:
        """Start a command; `output` and `errors` are file descriptors for its stdout and stderr."""
        status, written = os.pipe()
        message = json.dumps([arguments, dict(environment)]).encode()
        socket.send_fds(self._clients, [message], [output, errors, written, *inherited])
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

    def close(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(600) == -signal.SIGTERM
        self._clients.close()


def main() -> None:
    gc.freeze()  # otherwise each child spends a second at exit on collecting, and copying, the imported modules
    requests, clients = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:])
    with requests:
        arguments = wait_for_command(requests)
    import pdserve.cli.commands
    import pdserve.ranks.followers
    from pdserve.cli.supervisor import Supervisor

    # Patched because the process factories are not parameters of the product.
    pdserve.ranks.followers.start_process = ForkServer(clients).start_follower  # type: ignore[assignment]
    Supervisor._spawn = lambda _, *command: ForkServer(clients).spawn(*command)  # type: ignore[assignment,method-assign]
    if arguments[0] == "follower":
        import pdserve.ranks.follower

        _, rank, port, connection = arguments
        pdserve.ranks.follower.main(int(connection), int(rank), int(port))
    elif arguments[0].endswith(".py"):
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv[:] = ["pdserve", *arguments]
        pdserve.cli.commands.main()


def wait_for_command(requests: socket.socket) -> list[str]:
    """Serve requests; return the command's arguments in each forked process that is to run one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are not waited for
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 17, 4)
        output, errors, status, *inherited = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            if (child := os.fork()) == 0:
                os.close(status)
                return [*become(output, errors, *json.loads(message)), *map(str, inherited)]
            for descriptor in (output, errors, *inherited):
                os.close(descriptor)
            keep(child, status)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(child: int, status: int) -> None:
    """Report the command's pid and return code on the status pipe, then exit."""
    _die_with_parent(signal.SIGKILL)
    try:
        os.write(status, f"{child}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    finally:
        os._exit(0)


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
    _die_with_parent(signal.SIGTERM)
    for name in IMPORTED:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # fills a cache

    main()
