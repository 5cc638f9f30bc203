"""Client of a compile server: compiles grammars in processes that are killed when they exceed a limit."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from io import BufferedReader
from typing import TypeVar

from pdserve.errors import BadRequest, RequestError, Unavailable
from pdserve.grammars.limits import EXCEEDED, CompileLimits, GrammarTooComplex, check_grammar

START_AFTER_S = 2.0  # from the start of a process to that of its compile server: the cores are for the first request
START_TIMEOUT_S = 600.0  # for loading the vocabulary; only ends a hang
GRACE_S = 30.0  # for the answer, after the elapsed time at which the compile server's process is killed
READY, COMPILE, MASKS = b"r", b"c", b"m"  # as in `compile_server.py`
STARTED, OK, ERROR = b".", b"+", b"-"
LENGTH_BYTES = 4

log = logging.getLogger(__name__)
T = TypeVar("T")


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Its compile server is started by `start`, and again if it died.

    All methods may be called in any thread, and block.

    Attributes:
        num_workers_lost: processes that compiled or followed a grammar, and have ended or hang for no limit.
    """

    def __init__(
        self, model: str, vocab_size: int, eos_token_ids: Collection[int], limits: CompileLimits | None = None
    ) -> None:
        self.limits = limits or CompileLimits()
        eos = json.dumps(sorted(eos_token_ids))
        self._arguments = [model, str(vocab_size), eos, json.dumps(asdict(self.limits))]
        self._lock = threading.Lock()
        self._server: _CompileServer | None = None
        self.is_closed = False
        self.num_workers_lost = 0

    def start(self) -> None:
        """Start the compile server, if it is not running, and wait until it has loaded: the first grammar need not.

        Raises:
            RequestError: it does not start.
        """
        self._running_server()

    def compile(self, spec: str) -> bytes:
        """Return the grammar of a specification in Lark's syntax, which llguidance compiles within the limits.

        Raises:
            GrammarTooComplex: it exceeds a limit.
            BadRequest: it is invalid, or llguidance cannot hold it.
            RequestError: the compile server does not start, or two of its processes ended or hang for no limit.
        """
        check_grammar(spec)
        limit_s = self.limits.elapsed_s + GRACE_S
        status, content = self._ask(lambda server: server.answer(spec, limit_s))
        if not status:  # no grammar is to blame yet
            self.worker_lost()
            status, content = self._ask(lambda server: server.answer(spec, limit_s))
        if status == OK:
            return content
        if status == ERROR:
            raise invalid_grammar(content)
        raise self.too_complex(spec) if status else self.worker_lost()

    def too_complex(self, spec: str) -> GrammarTooComplex:
        """Return the error for a specification that exceeds a limit."""
        log.info("a grammar of %d characters was rejected: compiling it exceeds a limit", len(spec))
        message = f"the grammar is too expensive to compile; simplify it. The limits are {self.limits}"
        return GrammarTooComplex(message, kind="invalid_grammar")

    def worker_lost(self) -> RequestError:
        """Count a process that has ended or hangs for no limit, and return the error for a request that it served."""
        with self._lock:
            self.num_workers_lost += 1
        log.warning("a process for a grammar has ended or hangs; was it killed, as for lack of memory?")
        return RequestError("the process for the grammar has ended or hangs; try again", kind="rejected")

    def fork_mask_worker(self) -> tuple[socket.socket, int]:
        """Return the connection and the process id of a new mask worker, which ends when the connection is closed.

        Raises:
            RequestError: the compile server does not start.
        """
        return self._ask(lambda server: server.mask_worker(GRACE_S))

    def _ask(self, ask: "Callable[[_CompileServer], T | None]") -> T:
        """Return what the server answers, or another one if it has died since the last grammar."""
        for _ in range(2):
            server = self._running_server()
            with suppress(OSError):
                if (answer := ask(server)) is not None:
                    return answer
            server.kill()
        raise RequestError("the compile server for grammars does not answer", kind="internal_error")

    @property
    def server_pid(self) -> int | None:
        """Process id of the compile server, which leads a process group of its own; None if it has not been started."""
        return self._server.pid if self._server else None

    def close(self) -> None:
        """Kill the compile server and all that it compiles."""
        with self._lock:
            self.is_closed = True
            if self._server is not None:
                self._server.kill()

    def _running_server(self) -> "_CompileServer":
        with self._lock:
            if self.is_closed:
                raise Unavailable("the process is shutting down", kind="drained")
            if self._server is None or not self._server.is_running:
                self._server = _CompileServer(self._arguments)
            server = self._server
        server.wait_until_ready()  # not under the lock: `close` must not wait for it
        return server


def start_early(compiler: GrammarCompiler) -> None:
    """Start a compile server before the first grammar, and log an error, which that grammar will meet again."""
    try:
        compiler.start()
    except RequestError as error:
        if not compiler.is_closed:
            log.warning("structured output will fail: %s", error)


def invalid_grammar(message: bytes) -> BadRequest:
    """Return the error for a specification that the compile server has found invalid."""
    return BadRequest(f"the grammar cannot be used: {message.decode().strip()}", kind="invalid_grammar")


def start_process(descriptor: int, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start a compile server that inherits a socket, in a process group of its own."""
    command = [sys.executable, "-m", "pdserve.grammars.compile_server", str(descriptor), *arguments]
    return subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True)


class _CompileServer:
    """A compile server, in a process group of its own. It is killed with this object."""

    def __init__(self, arguments: list[str]) -> None:
        self._is_ready = False
        self._starting = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs.fileno(), arguments)
        self.kill = weakref.finalize(self, _kill, self._process, self._control)
        self.pid = self._process.pid

    def wait_until_ready(self) -> None:
        """Return once the server has loaded the vocabulary.

        Raises:
            RequestError: it has ended or hangs.
        """
        with self._starting:
            if self._is_ready:
                return
            with suppress(OSError):
                self._control.settimeout(START_TIMEOUT_S)
                self._is_ready = self._control.recv(1) == READY
            if self._is_ready:
                return
        self.kill()
        raise RequestError("the compile server for grammars did not start; see the log", kind="internal_error")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def connect(self, kind: bytes) -> socket.socket:
        """Return a socket whose other end a process has that the server forks.

        Raises:
            ConnectionError: the server has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [kind], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def mask_worker(self, timeout_s: float) -> tuple[socket.socket, int] | None:
        """Return the connection of a new mask worker and its process id; None if the server has died, or hangs.

        Raises:
            ConnectionError: the server has died.
        """
        connection = self.connect(MASKS)
        started = bytearray()
        connection.settimeout(timeout_s)
        with suppress(OSError):
            while len(started) < 1 + LENGTH_BYTES and (data := connection.recv(1 + LENGTH_BYTES - len(started))):
                started += data
        connection.settimeout(None)
        if len(started) == 1 + LENGTH_BYTES:
            return connection, int.from_bytes(started[1:], "big")
        connection.close()
        return None

    def answer(self, spec: str, timeout_s: float) -> tuple[bytes, bytes] | None:
        """Have a grammar compiled. Return a status and content, both empty if the process was lost; None if the server died.

        Of a grammar that exceeds a limit, the status is one of EXCEEDED.

        Raises:
            ConnectionError: the server has died.
        """
        with self.connect(COMPILE) as ours, ours.makefile("rb") as answer:
            ours.settimeout(timeout_s)
            ours.sendall(spec.encode())
            ours.shutdown(socket.SHUT_WR)
            try:
                return _read_result(answer) if answer.read(1) == STARTED else None
            except TimeoutError:
                return None


def _read_result(answer: BufferedReader) -> tuple[bytes, bytes]:
    """Return a status and its content, both empty if the answer ends early or takes too long."""
    with suppress(OSError):
        head = answer.read(1 + LENGTH_BYTES)
        if head and head[0] in EXCEEDED:
            return head[:1], b""
        length = int.from_bytes(head[1:], "big")
        content = answer.read(length)
        if len(head) == 1 + LENGTH_BYTES and len(content) == length:
            return head[:1], content
    return b"", b""


def _kill(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
