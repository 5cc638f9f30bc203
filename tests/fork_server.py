"""Fork server for `pdserve …` commands, which saves each process the seconds of importing torch and other packages.

    python fork_server.py LISTENER ADDRESS

serves those who connect to the abstract Unix socket ADDRESS, on which the descriptor LISTENER listens: all the workers of a
run, and what they started. It is that of `pdserve up` (pdserve/cli/fork_server.py), with more modules and more commands: a
script of tests, `-c` and a program, as Python takes it, and `follower`, of pdserve/ranks/, and `compile`, of
pdserve/grammars/, which have a descriptor more: their connection. What a command starts is requested from this server too.
"""

import atexit
import fcntl
import hashlib
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Self

from pdserve.cli.fork_server import ForkedProcess, Server, load, request

# What only tests use much.
IMPORTED = [
    *("transformers.models.qwen3.modeling_qwen3", "pdserve.ranks.follower", "pdserve.grammars.compile_server"),
    *("pdserve.cli.supervisor", "pdserve.kv_transfer.connectors.file"),
]


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
        return ForkedProcess(None, request(self._connection, arguments, environment, output, errors, *inherited))

    def spawn(self, arguments: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Start a command as Supervisor does, with its output readable from `stdout`."""
        output, printed = os.pipe()
        status = request(self._connection, arguments, environment, printed, printed)
        os.close(printed)
        return ForkedProcess(None, status, output)

    def start_follower(self, connection: int, rank: int, port: int) -> ForkedProcess:
        """Start a follower as `pdserve.ranks.followers.start_process` does."""
        return self.start(["follower", str(rank), str(port)], os.environ, 1, 2, connection)

    def start_compile_server(self, connection: int, arguments: list[str]) -> ForkedProcess:
        """Start a compile server as `pdserve.grammars.compiler.start_process` does."""
        return self.start(["compile", *arguments], os.environ, 1, 2, connection)

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        arguments = Server([], listener).wait_for_command(load(IMPORTED))
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    import pdserve.grammars.compiler
    import pdserve.ranks.followers
    from pdserve import plugins
    from pdserve.cli.supervisor import Supervisor

    plugins.names.cache_clear()  # with this path there may be more

    # Patched because the process factories are not parameters of the product.
    server = ForkServer(sys.argv[2])
    pdserve.ranks.followers.start_process = server.start_follower  # type: ignore[assignment]
    pdserve.grammars.compiler.start_process = server.start_compile_server  # type: ignore[assignment]
    # Few tests have grammars: the first one starts the compile server.
    pdserve.grammars.compiler.GrammarCompiler.start = lambda _: None  # type: ignore[assignment,method-assign]
    if warm_up := sys.modules.get("pdserve.engine.warm_up"):  # which routers do without
        warm_up.EXTRA_PROBES_S["cpu"] = 0.0  # probes that would take half of an instance's start
    Supervisor._spawn = lambda _, *command: server.spawn(*command)  # type: ignore[method-assign]
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
    elif arguments[0] == "-c":
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(arguments[1], vars(program))
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


if __name__ == "__main__":
    main()
