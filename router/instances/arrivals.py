"""Accepts the connections of instances, and bounds the number of those that have not introduced themselves."""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that wait to be accepted: after a restart of the router, all instances dial at once
MAX_WAITING = 1024
RETRY_S = 0.1  # after a connection could not be accepted: the process or the system is out of descriptors


class Arrival(asyncio.BaseProtocol):
    """The protocol of an accepted connection.

    Attributes:
        introduced: resolves once the peer has introduced itself, or the connection has ended.
    """

    introduced: "asyncio.Future[None]"


class Arrivals:
    """Accepts connections until it is closed. Beyond `max_waiting` without an introduction, the oldest is closed.

    Args:
        make: returns the protocol of a new connection, which is made after its TLS handshake.
        timeout_s: of a TLS handshake.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        tls: ssl.SSLContext | None,
        make: Callable[[], Arrival],
        timeout_s: float,
        max_waiting: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls, self._make, self._timeout_s, self._max_waiting = tls, make, timeout_s, max_waiting
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], socket.socket] = {}  # those that are not being closed, the oldest first
        self._accepting = [self._loop.create_task(self._accept(listener)) for listener in listeners]

    async def close(self) -> None:
        """Accept no more connections, and close those that wait."""
        for task in self._accepting:
            task.cancel()
        for connection in self._waiting.values():
            _shut(connection)
        await asyncio.gather(*self._accepting, *self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(listener)
                except OSError as error:
                    log.warning("a connection to the control port could not be accepted: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                task = self._loop.create_task(self._wait(connection))
                self._waiting[task] = connection
                self._tasks.add(task)
                task.add_done_callback(self._on_end)
                if len(self._waiting) > self._max_waiting:
                    log.warning("more than %d connections to the control port send no Hello", self._max_waiting)
                    _shut(self._waiting.pop(next(iter(self._waiting))))

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._waiting.pop(task, None)

    async def _wait(self, connection: socket.socket) -> None:
        """Wait until the peer has introduced itself, or the connection ends."""
        timeout_s = self._timeout_s if self._tls else None
        try:
            _, arrival = await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # ssl.SSLError included
            connection.close()
        else:
            await arrival.introduced


def _shut(connection: socket.socket) -> None:
    """End a connection. Its transport, or its handshake, sees the end and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of a host. Raises OSError if one of them cannot be bound."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def default_max_waiting() -> int:
    """Return a sixteenth of the file descriptors that the process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_WAITING if limit == resource.RLIM_INFINITY else max(1, min(MAX_WAITING, limit // 16))
