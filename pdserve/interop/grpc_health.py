"""gRPC services without keys: health checks (`grpc.health.v1`) and reflection. Both have limits for each connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as aio_reflection

from pdserve.errors import NotFound, RequestError, Unavailable
from pdserve.interop.grpc_calls import CallCounter, Context, abort, parse, receive

WATCH_S = 1.0  # between two checks for the clients that watch a service
MAX_OPEN_CALLS = 8  # on one connection
RECEIVE_SECONDS = 1.0  # for which a message may be under way: it has few bytes, but could take those of the largest one
Check = Callable[[], object]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Status = health_pb2.HealthCheckResponse


class OpenCalls:
    """Handlers for calls without a key: at most `MAX_OPEN_CALLS` on each connection, and errors as status codes."""

    def __init__(self) -> None:
        self._calls = CallCounter(MAX_OPEN_CALLS)

    def limited(self, run: Callable[[Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return the handler that runs a call if it is allowed."""

        async def handle(_: Any, context: Context) -> Any:
            try:
                with self._calls.count(context.peer()):
                    return await run(context)
            except RequestError as error:
                await abort(context, error)

        return handle


class Health:
    """Answers health checks by calling the functions. Those who watch share one timer.

    Args:
        checks: by the name that a health check asks for, a function that raises Unavailable while the service cannot serve.
    """

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def handler(self, calls: OpenCalls) -> grpc.GenericRpcHandler:
        serialize = Status.SerializeToString
        check: Handler = grpc.stream_unary_rpc_method_handler(calls.limited(self._check), response_serializer=serialize)
        watch: Handler = grpc.stream_stream_rpc_method_handler(
            calls.limited(self._watch), response_serializer=serialize
        )
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check, "Watch": watch})

    async def run(self) -> None:
        """Tell those who watch of changes, until cancelled."""
        while True:
            self._refresh()
            await asyncio.sleep(WATCH_S)

    async def _check(self, context: Context) -> Status:
        service = await self._service(context)
        if service not in self._checks:
            known = ", ".join(map(repr, self._checks))
            message = f"there is no service {service[:100]!r}; ask for one of {known}"
            raise NotFound(message, kind="unknown_service")
        return _answer(self._status(service))

    async def _watch(self, context: Context) -> None:
        """Send the status, and again after each change. An unknown service has a status of its own, by the protocol."""
        service, last = await self._service(context), None
        self._refresh()
        while True:
            changed, status = self._changed, self._statuses.get(service, Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(_answer(status))
            last = status
            await changed.wait()

    async def _service(self, context: Context) -> str:
        return parse(health_pb2.HealthCheckRequest, await receive(context, RECEIVE_SECONDS) or b"").service

    def _refresh(self) -> None:
        statuses = {service: self._status(service) for service in self._checks}
        if statuses != self._statuses:
            self._statuses = statuses
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _status(self, service: str) -> int:
        try:
            self._checks[service]()
        except Unavailable:
            return Status.NOT_SERVING
        return Status.SERVING


def reflection_handler(services: Iterable[str], calls: OpenCalls) -> grpc.GenericRpcHandler:
    """Return the handler that describes these services, and itself, to clients."""
    servicer = aio_reflection.ReflectionServicer([*services, reflection.SERVICE_NAME])

    async def questions(context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await receive(context, RECEIVE_SECONDS)) is not None:
            yield parse(reflection_pb2.ServerReflectionRequest, raw)

    async def describe(context: Context) -> None:
        answers: Any = servicer.ServerReflectionInfo(questions(context), context)  # its stub says otherwise
        async for answer in answers:
            await context.write(answer)

    serialize = reflection_pb2.ServerReflectionResponse.SerializeToString
    handler: Handler = grpc.stream_stream_rpc_method_handler(calls.limited(describe), response_serializer=serialize)
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})


def _answer(status: int) -> Status:
    return Status(status=Status.ServingStatus.Name(status))
