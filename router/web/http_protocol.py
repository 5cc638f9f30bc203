"""One HTTP connection of a client, and what it may cost before its request is read.

A connection waits for a request head (request line and headers) from its start, and again after each response. A head that is
too large, too slow or invalid ends its connection, and so does a connection beyond the maximum number. Bodies have a least
speed; their other limits are `middleware.BodyLimit`.

HTTP/1.1 is the only protocol. A request that offers another one with `Upgrade` is served as if it did not, as RFC 9110, 7.8
allows. The parser, however, ends at such a head, so another one gets the head without the offer, and what follows.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdserve.control.frame_connection import CoalescingTransport
from pdserve.errors import BadRequest, RequestError, TooSlow, Unavailable
from pdserve.router.api.http_responses import error_response
from pdserve.router.api.streaming import ClientConnection

MAX_HEAD_BYTES = 64 * 1024  # of the request line and all headers; also of what surrounds two parts of a chunked body
MAX_HEADERS = 100
LINGER_TICKS = 2  # for a client to take its error and, over TLS, to agree to the end
LAST_REQUEST_S = 1.0  # at shutdown, for requests that are on their way on connections without one
MIN_BODY_RATE = 10_000  # bytes per second, on average
MAX_PIPELINED = 16  # requests that a connection may send ahead; each takes far more memory than its bytes


class HeadTooLarge(BadRequest):
    """The request line and headers are too large, or too many requests are pipelined."""

    status = 431


class Connections(ServerState):
    """The open connections of a server, and their limits.

    Args:
        timeout_ticks: ticks for which a connection may wait for a complete head.
        keep_alive_ticks: ticks for which it may be idle after an answer.
        body_ticks: ticks after which a body must have come at `MIN_BODY_RATE`.
        on_refusal: called with the kind of error for each connection that is ended early.
    """

    def __init__(
        self,
        maximum: int,
        timeout_ticks: int,
        keep_alive_ticks: int,
        body_ticks: int,
        on_refusal: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.maximum = maximum
        self.timeout_ticks = timeout_ticks
        self.keep_alive_ticks = keep_alive_ticks
        self.body_ticks = body_ticks
        self.on_refusal = on_refusal
        self.is_shutting_down = False


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection of a client.

    It writes through a coalescing transport: head and body of a response leave in one write instead of two.
    A client that closes its sending side counts as gone, as it does for uvicorn: nothing else shows that one has left.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Connections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._open = server_state
        # The request that is being answered; `cycle` is the latest one, which may be queued behind it.
        self._running: RequestResponseCycle | None = None
        self._is_in_head = self._is_in_body = False
        self._has_upgrade = False  # the head that is being parsed; it will be parsed again
        self._body_bytes = self._body_ticks = 0  # of the body that is being read
        self._unparsed = 0  # bytes since the last complete head or part of a body
        self._ticks = 0  # waited for a head
        self._refusal: RequestError | None = None  # from then on, nothing is parsed
        self._is_ended = False  # the refusal has been sent
        self.predecessor: Any = (
            None  # the TLS handshake that stands for this connection in `connections` until it is made
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.discard(self.predecessor)
        super().connection_made(CoalescingTransport(transport))  # type: ignore[arg-type]  # has all methods that uvicorn uses
        if self.scheme == "http" and len(self.connections) > self._open.maximum:  # for TLS, the listener has checked
            message = f"the router has {self._open.maximum} connections and accepts no more (limit: --max-connections)"
            self._refuse(Unavailable(message, kind="too_many_connections", retry_after_s=1))
        elif self._open.is_shutting_down:  # after its TLS handshake
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            self._disconnect(self._running)  # uvicorn tells `cycle` only
        super().connection_lost(exc)
        self.pipeline.clear()  # each of these requests refers to this connection
        self.cycle = self._running  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unparsed += len(data)  # the callbacks of the parser set it back
        try:
            self._parse(data)
        except httptools.HttpParserError:  # also what a callback raised
            self._refuse(BadRequest("this is not a valid HTTP request", kind="invalid_http"))
        else:
            if self._unparsed > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
                self._has_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(b"\r\n".join([line, *headers, b"", b""]))

    def on_response_complete(self) -> None:
        """Start the next pipelined request, as uvicorn does, but no timer for idle connections: `on_tick` closes them."""
        self._open.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            elif self._refusal is not None:
                self._end(self._refusal)

    def shutdown(self) -> None:
        """Close the connection after its request, or soon if none arrives."""
        if self._is_idle:
            self.loop.call_later(LAST_REQUEST_S, self._close_if_idle)
        else:
            super().shutdown()

    def on_tick(self) -> None:
        """Close the connection if it has waited for a head, complete or not, or been idle for too long, or a body is slow."""
        self._ticks += 1
        if self._is_ended:
            if self._ticks > LINGER_TICKS:
                self.transport.abort()
        elif not self._is_idle:
            self._ticks = 0
            if self._is_in_body and self._refusal is None and not self.flow.read_paused:
                self._check_body_rate()
        elif self._is_in_head:
            if self._ticks > self._open.timeout_ticks:
                message = f"the headers did not arrive within {self._open.timeout_ticks} s"
                self._refuse(TooSlow(message, kind="head_too_slow"))
        elif self._ticks > (self._open.timeout_ticks if self.cycle is None else self._open.keep_alive_ticks):
            self.transport.close()

    # ---- callbacks of the parser: what they raise ends `feed_data` -----------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._ticks = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:  # a trailer, which no check of a proxy or of the router has seen
            return
        if len(self.headers) >= MAX_HEADERS:
            self._raise(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._unparsed > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            self._raise(_head_too_large())
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests are waiting on this connection"
            self._raise(HeadTooLarge(message, kind="too_many_pipelined"))
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._raise(BadRequest("the router is no proxy, so it supports no CONNECT", kind="invalid_http"))
            self._has_upgrade = True
            return
        super().on_headers_complete()  # raises for an absolute URL without a path: then there is no request
        self._is_in_head, self._is_in_body, self._unparsed = False, True, 0
        self._body_bytes = self._body_ticks = 0
        if self._open.is_shutting_down:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._has_upgrade:
            self._is_in_body = False
            super().on_message_complete()
            if self.cycle is self._running:
                self.cycle.scope["state"]["client"].body_size = len(self.cycle.body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["state"]["client"] = ClientConnection(None if cycle.more_body else len(cycle.body))
        if cycle.scope["http_version"] == "1.0":
            app = partial(_answer_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.close()

    # ---- errors ---------------------------------------------------------------------------------------------------

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _raise(self, refusal: RequestError) -> None:
        self._refuse(refusal)
        raise httptools.HttpParserError  # not the refusal, which stays: a traceback would lead from it to this connection

    def _check_body_rate(self) -> None:
        self._body_ticks += 1
        if self._body_bytes < (self._body_ticks - self._open.body_ticks) * MIN_BODY_RATE:
            message = f"{self._body_bytes} bytes of the body arrived in {self._body_ticks} s; send it faster"
            self._refuse(TooSlow(message, kind="body_too_slow"))

    def _refuse(self, refusal: RequestError) -> None:
        """Answer what is being parsed with an error, after the answers to earlier requests, and close.

        Only the first call has an effect. There is no such answer if another one has begun.
        """
        if self._refusal is not None:
            return
        self._refusal = refusal
        self._open.on_refusal(refusal.kind)
        if self._is_in_body and self.pipeline:  # the request is the last one of those that wait
            assert self._running is not None
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        elif self._is_in_body and self.cycle.response_started:
            self._end(None)
            return
        elif self._is_in_body:
            self._disconnect(self.cycle)
            self._end(refusal)
            return
        if self._is_idle:
            self._end(refusal)

    def _end(self, refusal: RequestError | None) -> None:
        """Send the error, if any, and close the connection."""
        self._is_ended, self._ticks = True, 0
        if refusal is not None:
            response = error_response(refusal)
            response.headers["Connection"] = "close"
            self.transport.write(_serialize(response))
        self.transport.close()

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """End a request that has begun: what it still sends goes nowhere."""
        cycle.disconnected = True
        cycle.message_event.set()
        client: ClientConnection = cycle.scope["state"]["client"]
        client.disconnect()


async def _answer_without_chunks(
    app: Any, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call an application for a client of HTTP/1.0, to which a body without a length goes on to the end of the connection."""
    has_length = False

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
        if not has_length:
            cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)


def _head_too_large() -> HeadTooLarge:
    message = f"the headers are larger than {MAX_HEAD_BYTES} bytes or more than {MAX_HEADERS}"
    return HeadTooLarge(message, kind="headers_too_large")


def _serialize(response: Response) -> bytes:
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
