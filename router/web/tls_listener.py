"""Accepts TLS connections, and counts them from their beginning.

An asyncio server with TLS would only know those whose handshake is complete, so handshakes that never end could take all
descriptors.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from pdserve.router.web.http_protocol import LAST_REQUEST_S, Connections, HttpProtocol

log = logging.getLogger(__name__)

ASYNCIO_TIMEOUT_S = 86_400  # asyncio's own time-out of a handshake would count the router's stalls
RETRY_S = 0.1  # after a connection could not be accepted: the process or the system is out of descriptors


class Handshake:
    """A connection until the end of its TLS handshake; it stands for the connection in `Connections`."""

    task: "asyncio.Task[None] | None" = None

    def __init__(self, timeout_ticks: int) -> None:
        self._timeout_ticks = timeout_ticks
        self._ticks = 0

    def on_tick(self) -> None:
        """End the connection if its handshake has taken too long."""
        self._ticks += 1
        if self._ticks > self._timeout_ticks and self.task is not None:
            self.task.cancel()

    def shutdown(self) -> None:
        if self.task is not None:
            self.task.get_loop().call_later(LAST_REQUEST_S, self.task.cancel)


class TlsListener:
    """Accepts connections on a listening socket until closed. It has the methods of an asyncio server that uvicorn uses.

    Args:
        make_protocol: returns the protocol of a connection whose handshake is complete.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connections: Connections,
        make_protocol: Callable[[], HttpProtocol],
    ) -> None:
        self._listener = listener
        self._context = context
        self._open = connections
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._task = self._loop.create_task(self._accept())

    def close(self) -> None:
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._open.connections) >= self._open.maximum:
                self._open.on_refusal("too_many_connections")
                connection.close()  # an answer would need the handshake
                continue
            handshake = Handshake(self._open.timeout_ticks)
            self._open.connections.add(handshake)  # type: ignore[arg-type]  # has all methods that are used
            handshake.task = self._loop.create_task(self._handshake(handshake, connection))

    async def _handshake(self, handshake: Handshake, connection: socket.socket) -> None:
        """Run the handshake; then the connection belongs to its protocol, which counts it itself."""

        def make_protocol() -> HttpProtocol:
            protocol = self._make_protocol()
            protocol.predecessor = handshake
            return protocol

        try:
            await self._loop.connect_accepted_socket(
                make_protocol, connection, ssl=self._context, ssl_handshake_timeout=ASYNCIO_TIMEOUT_S
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError included; cancelled if too late or at shutdown
            self._open.on_refusal("tls_handshake")
            with contextlib.suppress(OSError):
                connection.close()
        finally:
            self._open.connections.discard(handshake)
