"""The attacked deployment: its addresses, and connections to them."""

import json
import socket
import ssl
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 3600  # for each read: ends what hangs, and nothing else, however slow the machine is
ENDED = (ConnectionError, ssl.SSLError)  # how a refused connection may end


@dataclass(frozen=True)
class Target:
    """Addresses of a deployment on 127.0.0.1, and the API key with which it is attacked.

    Attributes:
        url: of its clients' port.
        control_port: its port for instances; None: not attacked.
        grpc_port: its port for gRPC; None: not attacked.
        key: of the attacker; "": it has none.
    """

    url: str
    control_port: int | None = None
    grpc_port: int | None = None
    key: str = ""

    @classmethod
    def from_json(cls, text: str) -> "Target":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def without_key(self) -> "Target":
        return replace(self, key="")

    # ---- connections ------------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        """Connect to the clients' port, with TLS if it has that."""
        return self._with_tls(self.connect_tcp())

    def connect_grpc(self) -> socket.socket:
        """Connect to the port for gRPC, with TLS if the clients' port has that."""
        return self._with_tls(connect_to(self.grpc_port), "h2")

    def _with_tls(self, connection: socket.socket, *protocols: str) -> socket.socket:
        if urlsplit(self.url).scheme != "https":
            return connection
        return _tls(*protocols).wrap_socket(connection)

    def connect_tcp(self) -> socket.socket:
        """Connect to the clients' port without a TLS handshake."""
        return connect_to(urlsplit(self.url).port)

    # ---- HTTP -------------------------------------------------------------------------------------------------------

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """Return the head of a request with the attacker's key."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str, body: Any, *headers: str) -> bytes:
        """Return a request whose body is JSON, or bytes as they are, after which the connection ends."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = f"Content-Length: {len(data)}"
        return self.head("POST", path, "Content-Type: application/json", length, "Connection: close", *headers) + data

    def completion(self, *headers: str, **fields: Any) -> bytes:
        return self.post("/v1/completions", {"prompt": "hello", **fields}, *headers)

    def get(self, path: str) -> bytes:
        return self.head("GET", path, "Connection: close")

    def ask(self, request: bytes, expected: Set[int | None]) -> bytes:
        """Send a request and return the answer's body.

        Raises:
            RuntimeError: the status is none of `expected`; None: the connection ended without an answer.
        """
        with self.connect() as connection:
            with suppress(*ENDED):  # it may be refused before it has been read
                connection.sendall(request)
            return expect(connection, expected)


@cache
def _tls(*protocols: str) -> ssl.SSLContext:
    """Return a context that trusts everybody; making one takes 20 ms of CPU time."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols))
    return context


def connect_to(port: int | None) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)


def expect(connection: socket.socket, expected: Set[int | None]) -> bytes:
    """Read to the end of a connection and return the answer's body.

    Raises:
        RuntimeError: the status is none of `expected`; None: the connection ended without an answer.
    """
    answer = bytearray()
    with suppress(*ENDED):
        while data := connection.recv(1 << 16):
            answer += data
    status = int(answer[9:12]) if answer else None
    if status not in expected:
        raise RuntimeError(f"the status is {status} instead of {set(expected)}: {bytes(answer[:500])!r}")
    return bytes(answer.partition(b"\r\n\r\n")[2])
