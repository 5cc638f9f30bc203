"""A client for streamed answers that stamps each piece as it comes off the socket, with kept connections.

httptools parses, and no coroutine runs per piece: that is what lets one process hold many streams without being late.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

Pieces = list[tuple[float, bytes]]


class HttpClient:
    """POST requests to one server, below the path of its URL.

    Raises:
        OSError: by `post`, if the server cannot be reached or closes the connection before the end.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, request_id: str) -> tuple[int, Pieces]:
        """Return the status and the pieces of the body, each with the `time.perf_counter()` of its arrival."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}X-Request-Id: {request_id}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            try:
                answer = await connection.exchange(head.encode() + body)
            except ConnectionError:
                if kept and not connection.heard:  # the server closed an idle connection as the request went out
                    continue
                raise
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            return answer

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, with at most one exchange at a time."""

    def __init__(self) -> None:
        self.heard = False  # of this exchange, any byte
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._pieces: Pieces = []
        self._answer: asyncio.Future[tuple[int, Pieces]] | None = None
        self._now = 0.0

    async def exchange(self, request: bytes) -> tuple[int, Pieces]:
        self.heard = self.reusable = False
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._parser, self._pieces = httptools.HttpResponseParser(self), []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's

    def data_received(self, data: bytes) -> None:
        self._now, self.heard = time.perf_counter(), True
        try:
            if self._parser is not None:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not an HTTP answer: {error}"))

    def eof_received(self) -> None:
        if self.heard and self._parser is not None and not self.reusable:
            self._finish(reusable=False)  # an answer without a length ends with its connection

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionResetError(str(error or "the server closed the connection")))

    # ---- called by httptools

    def on_body(self, body: bytes) -> None:
        self._pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._finish(reusable=self._parser.should_keep_alive())

    def _finish(self, reusable: bool) -> None:
        assert self._parser is not None
        self.reusable = reusable
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._pieces))
        if not reusable:
            self.close()

    def _fail(self, error: ConnectionError) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.close()
