"""A connector for `wire_server.py`, and variants of it whose handling of connections is broken."""

import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, StreamedPart
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.threaded import Full, ThreadedConnector
from pdserve.kv_transfer.url import Query, split

REQUEST, ANSWER = struct.Struct("<cIdI"), struct.Struct("<BI")
ABSENT, OK, FULL = 0, 1, 2
MAX_BYTES = 64 << 20  # of a value


class WireConnector(ThreadedConnector):
    """Keeps one connection per thread, and gives it up after any fault. Keeps all rules."""

    scheme: ClassVar[str] = "wire"

    def configure(self, query: Query) -> None:
        parts = split(self.url)
        self._address = (parts.hostname, parts.port)

    def open(self) -> None:
        self._thread_local, self._sockets = threading.local(), list[socket.socket]()
        try:
            self.contains("probe")
        except OSError as error:
            raise SetupError(f"No wire server answers: {error}.") from error

    def shut(self) -> None:
        for one in self._sockets:
            one.close()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if self._call(b"P", name, lease_s, b"".join((header, payload)))[0] == FULL:
            raise Full

    def renew(self, name: str, lease_s: float) -> bool:
        return self._call(b"R", name, lease_s)[0] == OK

    def get(self, name: str) -> bytes | None:
        status, value = self._call(b"G", name)
        return value if status == OK else None

    def contains(self, name: str) -> bool:
        return self._call(b"C", name)[0] == OK

    def delete(self, name: str) -> None:
        self._call(b"D", name)

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        server = self._socket()
        try:
            self._send(server, op, name, lease_s, value)
            status, length = ANSWER.unpack(self._receive_start(server))
            return status, self._receive(server, length)
        except OSError as fault:
            self._give_up(server, fault)
            raise

    def _send(self, server: socket.socket, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> None:
        server.sendall(REQUEST.pack(op, len(name), lease_s, len(value)) + name.encode() + value)

    def _receive_start(self, server: socket.socket) -> bytes:
        return self._receive(server, ANSWER.size)

    def _receive(self, server: socket.socket, count: int) -> bytes:
        if count > MAX_BYTES:
            raise ConnectionError(f"the server announced {count} bytes")
        received = bytearray(count)
        view = memoryview(received)
        while view:
            more = server.recv_into(view)
            if not more:
                raise ConnectionError("the server closed the connection")
            view = view[more:]
        return bytes(received)

    def _socket(self) -> socket.socket:
        """Return this thread's connection."""
        if not hasattr(self._thread_local, "socket"):
            self._thread_local.socket = self._connect()
        server: socket.socket = self._thread_local.socket
        return server

    def _connect(self) -> socket.socket:
        server = socket.create_connection(self._address, timeout=0.8 * self.timeout)
        self._sockets.append(server)
        return server

    def _give_up(self, server: socket.socket, fault: OSError) -> None:
        del self._thread_local.socket
        server.close()


class NoSocketTimeout(WireConnector):
    """Waits on its connections without any time-out; a deadline ends the operation, not the wait of its thread."""

    def _connect(self) -> socket.socket:
        server = super()._connect()
        server.settimeout(None)
        return server


class ReceivesOnce(WireConnector):
    """Takes what a single `recv` returns for the whole start of an answer."""

    def _receive_start(self, server: socket.socket) -> bytes:
        return server.recv(ANSWER.size).ljust(ANSWER.size, b"\0")


class TakesLateAnswers(WireConnector):
    """Keeps a connection that timed out, and uses it again once it is readable: for the answer to an earlier request."""

    def configure(self, query: Query) -> None:
        super().configure(query)
        self.threads = 1  # so that the same thread goes on

    def _socket(self) -> socket.socket:
        late: socket.socket | None = getattr(self._thread_local, "late", None)
        if late is not None and select.select([late], [], [], 5.0)[0]:
            self._thread_local.socket, self._thread_local.late = late, None
        return super()._socket()

    def _give_up(self, server: socket.socket, fault: OSError) -> None:
        if isinstance(fault, TimeoutError):
            del self._thread_local.socket
            self._thread_local.late = server
        else:
            super()._give_up(server, fault)


class BlocksInValue(WireConnector):
    """Waits for the bytes of a value in `read_into`, which must not wait because it holds the operation's fence."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            server = self._socket()
            try:
                self._send(server, b"G", self._name(block.key))
                status, length = ANSWER.unpack(self._receive_start(server))
                if status == OK:
                    header = self._receive(server, HEADER_BYTES)
                    block.accept(header, self._parts(server, length - HEADER_BYTES))
                else:
                    block.missing()
            except OSError as fault:
                self._give_up(server, fault)
                raise

    def _parts(self, server: socket.socket, length: int) -> Iterable[StreamedPart]:
        part = _BlockingPart(server, length)
        yield part
        self._receive(server, part.remaining)  # of a block that was rejected


class _BlockingPart(StreamedPart):
    def __init__(self, server: socket.socket, length: int) -> None:
        self._server = server
        self._length = self.remaining = length

    def __len__(self) -> int:
        return self._length

    def read_into(self, memory: memoryview) -> int:
        timeout = self._server.gettimeout()
        self._server.settimeout(None)
        count = self._server.recv_into(memory)
        self._server.settimeout(timeout)
        if not count:
            raise ConnectionError("the server closed the connection")
        self.remaining -= count
        return count

    def wait(self) -> None: ...


# Class, the rule it breaks, and part of the detail that the kit reports.
BROKEN: list[tuple[type, str, str]] = [
    (TakesLateAnswers, "resumption", "to be used again after it hung"),
    (BlocksInValue, "stalled-value", "load while its value has stopped half-way to be done within the timeout"),
    (NoSocketTimeout, "silent-connections", "over new connections, after nothing came over the first ones"),
    (ReceivesOnce, "byte-by-byte", "blocks loaded, saw"),
]
