"""A gRPC server with health checks (`grpc.health.v1`, as kubelets ask them) and reflection. Imported only if it is used."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.errors import SetupError, Unavailable

WATCH_S = 1.0  # between two checks for a client that watches a service
Check = Callable[[], object]
Status = health_pb2.HealthCheckResponse


class GrpcServer:
    """A gRPC server on the running event loop.

    Args:
        checks: by the name that a health check asks for, a function that raises Unavailable while the service cannot serve.
            The empty name is that of the whole server.
        handlers: the services besides health and reflection, by name.
        max_message_bytes: larger requests get RESOURCE_EXHAUSTED.
        certificate: files of certificate chain and private key in PEM, for TLS; None for plain text.
        reuse_port: share the port with other processes that set this too.

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
    ) -> None:
        handlers = handlers or {}
        options = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", int(reuse_port))]
        self._server = grpc.aio.server(options=options)
        self._stopping: list[asyncio.Task[None]] = []
        health_pb2_grpc.add_HealthServicer_to_server(_Health(checks), self._server)
        self._server.add_generic_rpc_handlers(tuple(handlers.values()))
        names = (health.SERVICE_NAME, reflection.SERVICE_NAME, *handlers)
        reflection.enable_server_reflection(names, self._server)
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

    def begin_stop(self, grace_s: float) -> None:
        """Accept no more calls, and cancel those that run after `grace_s`. A later call can shorten the time."""
        self._stopping.append(asyncio.get_running_loop().create_task(self._server.stop(grace_s)))

    async def close(self) -> None:
        """Wait for a stop that has begun, or stop at once."""
        if not self._stopping:
            self.begin_stop(0)
        await asyncio.gather(*self._stopping)


class _Health(health_pb2_grpc.HealthServicer):
    """Answers health checks by calling the functions, each time that it is asked."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> Status:
        if request.service not in self._checks:
            known = ", ".join(map(repr, self._checks))
            message = f"there is no service {request.service[:100]!r}; ask for one of {known}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return _answer(self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[Status]:
        """Send the status, and again after each change. An unknown service has a status of its own, by the protocol."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield _answer(status)
            last = status
            await asyncio.sleep(WATCH_S)

    def _status(self, service: str) -> int:
        check = self._checks.get(service)
        if check is None:
            return Status.SERVICE_UNKNOWN
        try:
            check()
        except Unavailable:
            return Status.NOT_SERVING
        return Status.SERVING


def _answer(status: int) -> Status:
    return Status(status=Status.ServingStatus.Name(status))
