"""Calls of all gRPC services: messages are received within limits, and errors are status codes.

A service asks for a call's message itself, so it refuses calls by their metadata first. A message that is not asked for takes
no more memory than its stream's window (`WINDOW_BYTES`); one that is being received, up to the limit of the server.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from pdserve.errors import BadRequest, Overloaded, RequestError, TooSlow

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
KIND_METADATA = "pdserve-error"  # trailing metadata: the kind of the error, which is `code` over HTTP
RETRY_METADATA = "grpc-retry-pushback-ms"  # gRPC's own name of Retry-After
WINDOW_BYTES = 16 << 10
MAX_RECEIVED = 16  # messages of one key that are received at once
MAX_CALLS = 4096  # of one key whose messages are received or wait for that
TURNS = 10  # of the event loop within a time limit, each of which reads the sockets: stalls of the server do not count
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MessageType = TypeVar("MessageType", bound=Message)


class CallCounter:
    """Counts the open calls of each client, and refuses more than `most` of one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: Counter[str] = Counter()

    @contextmanager
    def count(self, client: str) -> Iterator[None]:
        """Count a call. Raises Overloaded."""
        if self._calls[client] >= self._most:
            message = f"{self._most} such calls are open already; wait for one to end"
            raise Overloaded(message, kind="too_many_calls", retry_after_s=1)
        self._calls[client] += 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]


async def receive(context: Context, seconds: float) -> bytes | None:
    """Return the next message of a call, or None if there is none.

    The call belongs to a handler of streams, also where a client sends one message: a handler of single messages is called
    once they are received.

    Raises:
        TooSlow: it does not arrive within the time.
    """
    receiving = asyncio.ensure_future(context.read())
    try:
        for _ in range(TURNS):
            done, _ = await asyncio.wait([receiving], timeout=seconds / TURNS)
            if done:
                raw = receiving.result()
                return None if raw is grpc.aio.EOF else raw
        raise TooSlow(f"the message did not arrive within {seconds:g} s", kind="message_too_slow")
    finally:
        receiving.cancel()


class Receiver:
    """Receives the messages of calls: `MAX_RECEIVED` of each API key at once, the others in order of arrival.

    Args:
        seconds: for which a message may be under way.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls = CallCounter(MAX_CALLS)
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_RECEIVED))

    async def receive(self, context: Context, key: str) -> bytes:
        """Return the message of a call, which is empty if there is none. Raises Overloaded or TooSlow."""
        with self._calls.count(key):
            async with self._slots[key]:
                return await receive(context, self._seconds) or b""


def parse(message_type: type[MessageType], raw: bytes) -> MessageType:
    """Return a received message. Raises BadRequest if it is malformed."""
    try:
        return message_type.FromString(raw)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise BadRequest(f"the request is not a {name}: malformed protobuf", kind="invalid_protobuf") from None


async def abort(context: Context, error: RequestError) -> None:
    """End a call with an error."""
    trailing = [(KIND_METADATA, error.kind)]
    if error.retry_after_s is not None:
        trailing.append((RETRY_METADATA, str(error.retry_after_s * 1000)))
    code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error), tuple(trailing))
