"""A gRPC server with health checks (`grpc.health.v1`, as kubelets ask them) and reflection. Imported only if it is used."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health

from pdserve.errors import SetupError
from pdserve.interop.grpc_calls import WINDOW_BYTES
from pdserve.interop.grpc_health import Check, Health, OpenCalls, reflection_handler

MAX_CONNECTIONS = 64
MAX_STREAMS = 100  # calls on one connection
HANDSHAKE_MS = 10_000  # of TLS and HTTP/2
IDLE_MS = 60_000  # without a call, after which a connection is closed


class GrpcServer:
    """A gRPC server on the running event loop.

    Args:
        checks: by the name that a health check asks for, a function that raises Unavailable while the service cannot serve.
            The empty name is that of the whole server.
        handlers: the services besides health and reflection, by name. They receive their messages through a `Receiver`.
        max_message_bytes: larger requests get RESOURCE_EXHAUSTED.
        certificate: files of certificate chain and private key in PEM, for TLS; None for plain text.
        reuse_port: share the port with other processes that set this too.
        max_connections: further ones are closed.
        max_streams: calls on one connection; clients keep further ones back.

    Attributes:
        port: the port that it listens on.

    Raises:
        SetupError: the address cannot be bound.
    """

    def __init__(
        self,
        address: tuple[str, int],
        checks: Mapping[str, Check],
        handlers: Mapping[str, grpc.GenericRpcHandler] | None = None,
        *,
        max_message_bytes: int = 4 << 20,
        certificate: tuple[str, str] | None = None,
        reuse_port: bool = False,
        max_connections: int = MAX_CONNECTIONS,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        handlers = handlers or {}
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.max_concurrent_streams", max_streams),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                ("grpc.http2.bdp_probe", 0),  # which would make the window of messages that are not asked for 4 MiB
            ]
        )
        self._stopping: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._health, calls = Health(checks), OpenCalls()
        names = (health.SERVICE_NAME, *handlers)
        services = (self._health.handler(calls), reflection_handler(names, calls), *handlers.values())
        self._server.add_generic_rpc_handlers(services)
        host, port = address
        text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                self.port = self._server.add_insecure_port(text)
            else:
                chain, key = (Path(path).read_bytes() for path in certificate)
                self.port = self._server.add_secure_port(text, grpc.ssl_server_credentials([(key, chain)]))
        except RuntimeError:
            raise SetupError(f"cannot listen on {text}; choose another port for gRPC") from None

    async def start(self) -> None:
        await self._server.start()
        self._watching = asyncio.create_task(self._health.run())

    def begin_stop(self, grace_s: float) -> None:
        """Accept no more calls, and cancel those that run after `grace_s`. A later call can shorten the time."""
        self._stopping.append(asyncio.get_running_loop().create_task(self._server.stop(grace_s)))

    async def close(self) -> None:
        """Wait for a stop that has begun, or stop at once."""
        if not self._stopping:
            self.begin_stop(0)
        await asyncio.gather(*self._stopping)
        if self._watching is not None:
            self._watching.cancel()
