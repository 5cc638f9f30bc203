"""Turns a protobuf service and an object with its methods into handlers of a gRPC server, with API keys and clear errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pdserve.errors import RequestError
from pdserve.interop.grpc_calls import Context, Receiver, abort, parse
from pdserve.router.api.http_responses import InternalError
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.web.application import KeySet, Unauthorized, presented_key

log = logging.getLogger(__name__)

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
        return parse(message_type, self.raw)


def make_handler(
    service: ServiceDescriptor, methods: object, keys: KeySet, receive_seconds: float
) -> grpc.GenericRpcHandler:
    """Return the handler of a service.

    Args:
        methods: has a coroutine method for each served method, from a `Call` to the answer or, if the answer is a stream,
            to None. Others answer UNIMPLEMENTED, as do those that raise NotImplementedError, which says what to do instead.
        keys: the API keys that may call it; all may if there are none. A call without a valid one is refused before its
            message is received.
        receive_seconds: for which a message may be under way.
    """
    receiver = Receiver(receive_seconds)
    handlers = {
        method.name: _method_handler(method, getattr(methods, method.name), keys, receiver)
        for method in service.methods
        if hasattr(methods, method.name)
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(
    method: MethodDescriptor, run: Callable[[Call], Awaitable[Message | None]], keys: KeySet, receiver: Receiver
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a handler that gets the request as bytes, so that `run` parses it where it likes."""

    async def behaviour(_: Any, context: Context) -> Any:
        try:
            metadata = {
                str(name): value for name, value in context.invocation_metadata() or () if isinstance(value, str)
            }
            key = _key_name(metadata, keys)
            raw = await receiver.receive(context, key)
            return await run(Call(raw, key, metadata, context.write))
        except RequestError as error:
            await abort(context, error.with_traceback(None))
        except NotImplementedError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        except asyncio.CancelledError:  # by the client or its deadline
            raise
        except Exception:
            log.exception("%s failed", method.full_name)
            await abort(context, InternalError())

    serialize = GetMessageClass(method.output_type).SerializeToString
    make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
    return make(behaviour, response_serializer=serialize)


def _key_name(metadata: Mapping[str, str], keys: KeySet) -> str:
    """Return the name of the call's API key. Raises Unauthorized without a valid one."""
    if not keys.keys:
        return ANONYMOUS
    key = presented_key(metadata)
    name = keys.identify(key) if key else None
    if name is None:
        message = "this method needs a valid API key, in the metadata `authorization: Bearer KEY`"
        raise Unauthorized(message, kind="invalid_api_key")
    return name
