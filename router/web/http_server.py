"""The HTTP server: uvicorn's, with our protocol and its limits.

Time-outs count ticks of about a second, between which the event loop has read all sockets, so a stall of the router cuts no
client off.
"""

import asyncio
import resource
import socket
import ssl
from functools import partial
from typing import Any, cast

import uvicorn

from pdserve.config import RouterConfig
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web.http_protocol import Connections, HttpProtocol
from pdserve.router.web.tls_listener import Handshake, TlsListener

HEAD_TIMEOUT_S = 10.0  # or less: --client-timeout-seconds
# Far longer than clients keep their idle connections (httpx, and so OpenAI's client, 5 s): a request that a slow client sends
# on a connection that is just being closed is lost.
KEEP_ALIVE_S = 60.0
MAX_CONNECTIONS = 16_384  # by default
UVICORN_TICKS_PER_S = 10


class HttpServer(uvicorn.Server):
    """Serves an application to HTTP clients, over TLS if the config names a certificate."""

    def __init__(self, app: Any, config: RouterConfig, metrics: Metrics) -> None:
        settings = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            log_config=None,  # uvicorn logs through the root logger, whose format escapes what clients send
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
        )
        super().__init__(settings)
        self.tls: ssl.SSLContext | None = None
        if config.ssl_certfile:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        self.server_state = self.open = Connections(
            config.max_connections or default_max_connections(),
            round(max(1, min(HEAD_TIMEOUT_S, config.client_timeout_seconds))),
            round(KEEP_ALIVE_S),
            max(1, round(config.client_timeout_seconds)),
            lambda kind: metrics.refused_connections.labels(reason=kind).inc(),
        )
        metrics.connections.set_function(lambda: len(self.open.connections))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the given sockets, which are bound."""
        if self.tls is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        make_protocol = partial(HttpProtocol, self.config, self.open, {})
        for listener in sockets:
            listener.listen(self.config.backlog)
        listeners = [TlsListener(listener, self.tls, self.open, make_protocol) for listener in sockets]
        self.servers = cast(list[asyncio.Server], listeners)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.open.is_shutting_down = True
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % UVICORN_TICKS_PER_S == 0:
            for connection in list(self.open.connections):
                cast(HttpProtocol | Handshake, connection).on_tick()
        return await super().on_tick(counter)


def default_max_connections() -> int:
    """Return three quarters of the file descriptors that the process may open; the rest is for instances and files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit * 3 // 4))
