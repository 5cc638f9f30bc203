"""Connection between an instance and a router: length-prefixed protobuf frames over TCP or TLS, and the peer's clock.

gRPC is not used, because each of its messages wakes three threads in turn. Here a frame is read, parsed and handled in one
turn of the event loop, and all frames sent in one turn leave in a single write.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar, cast

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 11  # of the control plane, fields of requests included (`pdserve.request.SINCE`)
OLDEST_VERSION = 10  # that routers serve: the version before, from 11 on, so that instances are updated one by one
NONCE_BYTES = 16  # of `Hello.nonce`
LENGTH_BYTES = 4  # big-endian
MAX_FRAME_BYTES = 64 << 20  # the longest prompts take a few MB
FIRST_FRAME_BYTES = 1 << 16  # limit for a peer that has not authenticated


class Message(Protocol):
    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)


class CoalescingTransport:
    """Wraps an asyncio transport and delays its writes to the end of the turn. Everything else is delegated unchanged.

    All writes of a turn of the event loop become one: each write wakes the peer, which costs more than its bytes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Flush pending writes, then close the transport."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.write(b"".join(pending))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class FrameConnection(asyncio.Protocol, ABC, Generic[In, Out]):
    """One end of a connection that receives frames of type `In` and sends frames of type `Out`. Runs on the event loop.

    Attributes:
        peer: the peer's address, for log lines.
        is_trusted: the peer has authenticated. Before that its frames must be small, and an invalid one is not logged as
            an error.
        last_received_at: when data last arrived, on the event loop's clock.
        writable: set while the peer reads what it is sent. `send` accepts every frame, so senders of frames that can wait
            should wait for this event.
        error: the reason why this end aborted the connection.
        closed: resolves when the connection has ended, to `error`, to the event loop's exception, or to None if the peer
            closed it.
    """

    def __init__(self, frame_type: type[In]) -> None:
        self._frame_type = frame_type
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._transport: CoalescingTransport | None = None
        self.peer, self.is_trusted = "", False
        self.last_received_at = self._loop.time()
        self.writable = asyncio.Event()
        self.error: Exception | None = None
        self.closed: asyncio.Future[Exception | None] = self._loop.create_future()

    @property
    def was_established(self) -> bool:
        return self._transport is not None

    @abstractmethod
    def receive(self, frame: In) -> None:
        """Handle one frame. An exception ends the connection."""

    def send(self, frame: Out, queued_at: float | None = None) -> None:
        """Queue a frame; drop it if the connection has ended.

        Args:
            queued_at: of an `InstanceFrame` with outputs, when another thread passed it on, on the event loop's clock. It is
                told how long that thread, which then computes, has kept it waiting.
        """
        if self._transport is not None and not self._transport.is_closing():
            if queued_at is not None:
                cast(Any, frame).waited = max(0.0, self._loop.time() - queued_at)
            data = frame.SerializeToString()
            self._transport.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        """Close the connection after all queued frames are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close the connection at once. `error` is the reason, unless there is an earlier one."""
        if self._transport is not None:
            self.error = self.error or error
            self._transport.abort()

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = CoalescingTransport(cast(asyncio.Transport, transport))
        address = transport.get_extra_info("peername")
        self.peer = ":".join(map(str, address[:2])) if address else "a peer that has disconnected"
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self.last_received_at = self._loop.time()
        self._buffer += data
        start = LENGTH_BYTES
        while len(self._buffer) >= start and not self._transport.is_closing():
            size = int.from_bytes(self._buffer[start - LENGTH_BYTES : start], "big")
            if size > (MAX_FRAME_BYTES if self.is_trusted else FIRST_FRAME_BYTES):
                self.abort(ValueError("the data is not of the control protocol"))
                return
            if len(self._buffer) < start + size:
                break
            self._handle(bytes(self._buffer[start : start + size]))
            start += size + LENGTH_BYTES
        del self._buffer[: start - LENGTH_BYTES]

    def _handle(self, data: bytes) -> None:
        try:
            self.receive(self._frame_type.FromString(data))
        except Exception as error:  # a bug at one of the two ends
            if self.is_trusted:
                log.error("a frame of %s could not be handled", self.peer, exc_info=error)
            self.abort(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
        self.closed.set_result(self.error or error)


class AwakeClock:
    """Clock for the leases and time-outs of peers. It advances by ticks.

    Each tick adds the time since the last one, but at most `interval_s`.

    While a process is busy, stopped or starved of CPU, the frames of its peers wait unread in its sockets. Its own stall
    must not count as their silence. A lease measured by this clock ends only after several ticks, and between two ticks the
    event loop reads its sockets.

    Attributes:
        time: the sum of the ticks, in seconds.
    """

    def __init__(self, interval_s: float, now: Callable[[], float]) -> None:
        """`interval_s` is the intended interval of the ticks, and `now` a monotonic clock."""
        self.time = 0.0
        self._interval_s, self._now = interval_s, now
        self._ticked_at = now()

    def read(self) -> float:
        """Return the time between two ticks."""
        return self.time + min(self._now() - self._ticked_at, self._interval_s)

    def tick(self) -> float:
        """Advance to now, and return `time`."""
        now = self._now()
        self.time += min(now - self._ticked_at, self._interval_s)
        self._ticked_at = now
        return self.time
