"""Processes that parse bodies beside the router: decoding a large JSON text in the router itself would stop its event loop.

A `ParseServer` is forked from the router while that has one thread and no event loop, and so shares the memory of the loaded
tokenizer. It forks a worker for each connection. A request to a worker is a pickled function without arguments; the answer
has its result, or the error that it raised, and how many unknown fields it dropped. A length precedes each.
"""

import gc
import io
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pdserve.errors import RequestError
from pdserve.priority import lower
from pdserve.router.api.http_responses import InternalError
from pdserve.router.api.parsing import UnknownFields
from pdserve.router.text.tokenizer import Tokenizer

LENGTH_BYTES = 8
LARGE = 1 << 20  # bytes of a request or an answer, after which a worker ends: its memory would remain

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class ParseServer:
    """Runs functions that parse in workers, one for each thread that calls. Within `with ParseServer(…) as server`.

    Args:
        tokenizer: used by the functions; it is not sent to the workers, since they have it.
        sockets: open ones that the workers must not hold.

    Attributes:
        on_ignored: called with the number of unknown fields that a function dropped.
    """

    def __init__(self, tokenizer: Tokenizer, sockets: Sequence[socket.socket] = ()) -> None:
        assert threading.active_count() == 1, "other threads could hold locks, which a fork would never release"
        self.on_ignored: Callable[[int], object] = int
        self._shared = {"tokenizer": tokenizer, "parsers": tokenizer.parsers}
        self._of_thread = threading.local()
        self._control, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()  # what is loaded stays shared
        self.pid = os.fork()
        if not self.pid:
            try:
                for one in (self._control, *sockets):
                    one.close()
                _serve(theirs, self._shared)
            finally:
                os._exit(0)  # without the exit handlers of the router
        theirs.close()

    def __enter__(self) -> "ParseServer":
        return self

    def __exit__(self, *exception: object) -> None:
        """End the server. Workers end with the threads that called them, or with this process."""
        self._control.close()
        with suppress(ChildProcessError):  # with SIGCHLD ignored, as inherited, the kernel has reaped it
            os.waitpid(self.pid, 0)

    def run(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns that can be pickled, as its result can be.

        Raises:
            RequestError: as the function, or because its worker has ended.
            RecursionError: as the function.
        """
        request = _dumps(function, self._shared)
        connection: socket.socket | None = getattr(self._of_thread, "connection", None)
        try:
            if connection is None:
                connection = self._of_thread.connection = self._connect()
            _send(connection, request)
            answer = _receive(connection)
            if max(len(request), len(answer)) >= LARGE:
                connection.close()
                self._of_thread.connection = None
        except OSError as lost:
            log.warning("a process that parses has ended: %s", lost)
            self._of_thread.connection = None
            raise RequestError("the process that parsed the body has ended", kind="internal_error") from None
        result: Result
        result, error, num_ignored = _loads(answer, self._shared)
        self.on_ignored(num_ignored)
        if error is not None:
            raise error
        return result

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours


def _serve(control: socket.socket, shared: Mapping[str, object]) -> None:
    """Fork a worker for each connection that arrives, until the router has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the router drains its requests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers are reaped by the kernel
    os.setsid()
    lower()
    while (descriptors := socket.recv_fds(control, 1, 1)[1]) != []:
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                with suppress(OSError):  # the router has ended
                    while True:
                        _send(connection, _answer(_receive(connection), shared))
                return


def _answer(request: bytes, shared: Mapping[str, object]) -> bytes:
    """Return the pickled outcome of a pickled function."""
    dropped_before = UnknownFields.num_dropped
    try:
        result = _loads(request, shared)()
        return _dumps((result, None, UnknownFields.num_dropped - dropped_before), shared)
    except (RequestError, RecursionError) as error:
        return _dumps((None, error, UnknownFields.num_dropped - dropped_before), shared)
    except Exception:
        log.exception("parsing a body failed")
        return _dumps((None, InternalError(), 0), shared)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(LENGTH_BYTES, "big"))
    connection.sendall(message)


def _receive(connection: socket.socket) -> bytes:
    """Return the next message. Raises ConnectionError at the end of the connection."""
    return _read(connection, int.from_bytes(_read(connection, LENGTH_BYTES), "big"))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed")
        view = view[count:]
    return bytes(data)


class _Pickler(pickle.Pickler):
    """Pickles what is shared by name."""

    def __init__(self, file: io.BytesIO, shared: Mapping[str, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = {id(one): name for name, one in shared.items()}

    def persistent_id(self, one: object) -> str | None:
        return self._names.get(id(one))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Mapping[str, object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, name: str) -> object:
        return self._shared[name]


def _dumps(one: object, shared: Mapping[str, object]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, shared).dump(one)
    return file.getvalue()


def _loads(data: bytes, shared: Mapping[str, object]) -> Any:
    return _Unpickler(io.BytesIO(data), shared).load()
