"""Turns a protobuf service and an object with its methods into handlers of a gRPC server, with API keys and clear errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.http_responses import InternalError
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.web.auth import KeySet, Unauthorized, presented_key

log = logging.getLogger(__name__)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
KIND_METADATA = "pdserve-error"  # trailing metadata: the kind of the error, which is `code` over HTTP
RETRY_METADATA = "grpc-retry-pushback-ms"  # gRPC's own name of Retry-After
MessageType = TypeVar("MessageType", bound=Message)


@dataclass(frozen=True)
class Call:
    """One call of a method.

    Attributes:
        raw: the serialized request.
        key: name of the API key.
        metadata: what the client sent besides the request; binary values are left out.
        send: sends a message of the answer.
    """

    raw: bytes
    key: str
    metadata: Mapping[str, str]
    send: Callable[[Message], Awaitable[None]]

    def parse(self, message_type: type[MessageType]) -> MessageType:
        """Return the request. Raises BadRequest if it is malformed."""
        try:
            return message_type.FromString(self.raw)
        except DecodeError:
            name = message_type.DESCRIPTOR.full_name
            raise BadRequest(f"the request is not a {name}: malformed protobuf", kind="invalid_protobuf") from None


def make_handler(service: ServiceDescriptor, methods: object, keys: KeySet) -> grpc.GenericRpcHandler:
    """Return the handler of a service.

    Args:
        methods: has a coroutine method for each served method, from a `Call` to the answer or, if the answer is a stream,
            to None. Others answer UNIMPLEMENTED, as do those that raise NotImplementedError, which says what to do instead.
        keys: the API keys that may call it; all may if there are none.
    """
    handlers = {
        method.name: _method_handler(method, getattr(methods, method.name), keys)
        for method in service.methods
        if hasattr(methods, method.name)
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(
    method: MethodDescriptor, run: Callable[[Call], Awaitable[Message | None]], keys: KeySet
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a handler that gets the request as bytes, so that `run` parses it where it likes."""

    async def behaviour(raw: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        try:
            metadata = {
                str(name): value for name, value in context.invocation_metadata() or () if isinstance(value, str)
            }
            return await run(Call(raw, _key_name(metadata, keys), metadata, context.write))
        except RequestError as error:
            await _abort(context, error)
        except NotImplementedError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        except asyncio.CancelledError:  # by the client or its deadline
            raise
        except Exception:
            log.exception("%s failed", method.full_name)
            await _abort(context, InternalError())

    serialize = GetMessageClass(method.output_type).SerializeToString
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(behaviour, response_serializer=serialize)


def _key_name(metadata: Mapping[str, str], keys: KeySet) -> str:
    """Return the name of the call's API key. Raises Unauthorized without a valid one."""
    if not keys:
        return ANONYMOUS
    key = presented_key(metadata)
    name = keys.identify(key) if key else None
    if name is None:
        message = "this method needs a valid API key, in the metadata `authorization: Bearer KEY`"
        raise Unauthorized(message, kind="invalid_api_key")
    return name


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", error: RequestError) -> None:
    trailing = [(KIND_METADATA, error.kind)]
    if error.retry_after_s is not None:
        trailing.append((RETRY_METADATA, str(error.retry_after_s * 1000)))
    code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error), tuple(trailing))
