"""Pytest plugin: the workers of xdist are forked from one process, which has imported all tests once.

xdist starts a worker as `python -u -c CODE`. Here `CLIENT` is started in its place: it has that process fork one with its own
stdin, stdout and stderr, which runs the code, and ends with it.
"""

import atexit
import gc
import importlib
import logging
import os
import shlex
import signal
import socket
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pdserve import parent
from pdserve.cli import fork_server

CLIENT = """
import os, socket, sys
address, *python = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect("\\0" + address)
    socket.send_fds(connection, [b"fork"], [0, 1, 2])
    is_forked = connection.recv(1)
except OSError:
    is_forked = False
if is_forked:
    connection.recv(1)  # at its end
else:
    os.execv(sys.executable, [sys.executable, *python])
"""


class Workers:
    """The plugin, in the process that starts workers."""

    def __init__(self) -> None:
        self._server = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: list[Any]) -> None:
        if sys.platform != "linux" or Path("/dev/nvidiactl").exists():  # CUDA does not survive a fork
            return
        address = f"pdserve-workers-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen()
            self._server = os.fork()
            if not self._server:
                _serve(listener, config.rootpath)
        for spec in specs:
            spec.python = shlex.join([sys.executable, "-ISc", CLIENT, address])

    def pytest_unconfigure(self) -> None:
        if self._server:
            os.kill(self._server, signal.SIGTERM)
            os.waitpid(self._server, 0)


def _serve(listener: socket.socket, root: Path) -> NoReturn:
    """Import the tests, and fork workers until this process is told to end."""
    try:
        parent.receive_at_end()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGCHLD, _reap)
        _import_tests(root)
        if len(os.listdir("/proc/self/task")) > 1:
            os._exit(1)  # they would be missing in a fork
        gc.freeze()
        while True:
            connection, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            if not os.fork():
                listener.close()
                _work(connection, streams)
            connection.close()
            for descriptor in streams:
                os.close(descriptor)
    finally:
        os._exit(1)


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _import_tests(root: Path) -> None:
    """Import all tests and their conftests. What cannot be imported here, or is skipped, each worker will report."""
    for _ in fork_server.load(["transformers.models.qwen3.modeling_qwen3"]):
        pass
    gc.disable()
    for path in sorted((root / "tests").glob("**/*.py")):
        if path.name == "conftest.py" or path.name.startswith("test_"):
            with suppress(BaseException):
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    gc.enable()


def _work(connection: socket.socket, streams: list[int]) -> NoReturn:
    """Be what xdist has started: nothing is left of the process in which this one began but its modules."""
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    atexit._clear()
    logging.getLogger().handlers.clear()
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    connection.send(b"y")
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
