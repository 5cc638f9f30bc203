"""One HTTP connection of a client, and what it may cost before its request is read.

A connection waits for a request head (request line and headers) from its start, and again after each response. A head that is
too large, too slow or invalid ends its connection, and so does a connection beyond the maximum number. Bodies have limits of
their own (`middleware.BodyLimit`).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdserve.control.coalescing_transport import CoalescingTransport
from pdserve.errors import BadRequest, RequestError, TooSlow, Unavailable
from pdserve.router.api.http_responses import error_response
from pdserve.router.client_connection import ClientConnection

MAX_HEAD_BYTES = 64 * 1024  # of the request line and all headers; also of what surrounds two parts of a chunked body
MAX_HEADERS = 100
LINGER_TICKS = 2  # for a client to take its error and, over TLS, to agree to the end
LAST_REQUEST_S = 1.0  # at shutdown, for requests that are on their way on connections without one
MAX_PIPELINED = 16  # requests that a connection may send ahead; each takes far more memory than its bytes


class HeadTooLarge(BadRequest):
    """The request line and headers are too large, or too many requests are pipelined."""

    status = 431


class Connections(ServerState):
    """The open connections of a server, and their limits.

    Args:
        timeout_ticks: ticks for which a connection may wait for a complete head.
        keep_alive_ticks: ticks for which it may be idle after an answer.
        on_refusal: called with the kind of error for each connection that is ended early.
    """

    def __init__(
        self, maximum: int, timeout_ticks: int, keep_alive_ticks: int, on_refusal: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.maximum = maximum
        self.timeout_ticks = timeout_ticks
        self.keep_alive_ticks = keep_alive_ticks
        self.on_refusal = on_refusal
        self.is_shutting_down = False


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection of a client.

    It writes through a coalescing transport: head and body of a response leave in one write instead of two.
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
        self._is_in_head = False
        self._unparsed = 0  # bytes since the last complete head or part of a body
        self._ticks = 0  # waited for a head
        self._refusal: RequestError | None = None
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
            self._running.disconnected = True  # uvicorn tells `cycle` only
            self._running.message_event.set()
            client: ClientConnection = self._running.scope["state"]["client"]
            client.disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unparsed += len(data)  # the callbacks of the parser set it back
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # also what a callback raised
            self._refuse(BadRequest("this is not a valid HTTP request", kind="invalid_http"))
        except httptools.HttpParserUpgrade:
            pass  # there is no other protocol; the request is served as it is
        else:
            if self._unparsed > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_response_complete(self) -> None:
        """Start the next pipelined request, as uvicorn does, but no timer for idle connections: `on_tick` closes them."""
        self._open.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())

    def shutdown(self) -> None:
        """Close the connection after its request, or soon if none arrives."""
        if self._is_idle:
            self.loop.call_later(LAST_REQUEST_S, self._close_if_idle)
        else:
            super().shutdown()

    def on_tick(self) -> None:
        """Close the connection if it has waited for a head, complete or not, or been idle for too long."""
        self._ticks += 1
        if self._refusal is not None:
            if self._ticks > LINGER_TICKS:
                self.transport.abort()
        elif not self._is_idle:
            self._ticks = 0
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
        if len(self.headers) >= MAX_HEADERS:
            self._raise(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._unparsed > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            self._raise(_head_too_large())
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests are waiting on this connection"
            self._raise(HeadTooLarge(message, kind="too_many_pipelined"))
        self._is_in_head, self._unparsed = False, 0
        super().on_headers_complete()
        if self._open.is_shutting_down:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["state"]["client"] = ClientConnection(lambda: None if cycle.more_body else len(cycle.body))
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
        raise refusal

    def _refuse(self, refusal: RequestError) -> None:
        """Answer with an error, unless an answer is being sent, and close. Only the first call has an effect."""
        if self._refusal is not None:
            return
        self._refusal, self._ticks = refusal, 0
        self._open.on_refusal(refusal.kind)
        if self._is_idle:
            response = error_response(refusal)
            response.headers["Connection"] = "close"
            self.transport.write(_serialize(response))
        self.transport.close()


def _head_too_large() -> HeadTooLarge:
    message = f"the headers are larger than {MAX_HEAD_BYTES} bytes or more than {MAX_HEADERS}"
    return HeadTooLarge(message, kind="headers_too_large")


def _serialize(response: Response) -> bytes:
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
