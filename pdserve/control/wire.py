"""The connection between an instance and a router: protobuf messages over TCP or TLS, each behind its length.

It is not gRPC, each message of which wakes three threads in turn. Here a frame is read, parsed and acted on in one turn of
the event loop, and those that are put in one turn leave in one write.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Generic, Protocol, Self, TypeVar, cast

from pdserve.control.corked import Corked

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 3  # of the control plane; both ends have to have the same
LENGTH_BYTES = 4  # big-endian
MAX_FRAME_BYTES = 64 << 20  # the longest prompts take a few MB
FIRST_FRAME_BYTES = 1 << 16


class Message(Protocol):
    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)


class Wire(asyncio.Protocol, ABC, Generic[In, Out]):
    """One end of a connection. Everything runs on the event loop.

    Attributes:
        peer: the other end's address, for people.
        known: the other end has shown who it is. Until then its frames have to be small, and a wrong one is no defect.
        heard: when anything came last, on the event loop's clock.
        writable: set while the other end reads what it is sent. What can wait should: `put` takes everything.
        error: why it was cut off at this end.
        closed: done once it is over; the result is `error`, or what the event loop says, or None if the other end closed it.
    """

    def __init__(self, kind: type[In]) -> None:
        """`kind` is the type of the frames that come."""
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray()
        self._transport: Corked | None = None
        self.peer, self.known = "", False
        self.heard = self._loop.time()
        self.writable = asyncio.Event()
        self.error: Exception | None = None
        self.closed: asyncio.Future[Exception | None] = self._loop.create_future()

    @property
    def opened(self) -> bool:
        """Whether it has come about."""
        return self._transport is not None

    @abstractmethod
    def receive(self, frame: In) -> None:
        """Takes a frame. What it raises ends the connection."""

    def put(self, frame: Out) -> None:
        """Sends a frame behind the others; drops it where the connection is over."""
        if self._transport is not None and not self._transport.is_closing():
            data = frame.SerializeToString()
            self._transport.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        """Ends the connection once what was put is out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Ends it at once, for that reason."""
        if self._transport is not None:
            self.error = self.error or error
            self._transport.abort()

    # ---- for the event loop (asyncio.Protocol) ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = Corked(cast(asyncio.Transport, transport))
        address = transport.get_extra_info("peername")
        self.peer = ":".join(map(str, address[:2])) if address else "somebody who has left"
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self.heard = self._loop.time()
        self._arrived += data
        start = LENGTH_BYTES
        while len(self._arrived) >= start and not self._transport.is_closing():
            size = int.from_bytes(self._arrived[start - LENGTH_BYTES : start], "big")
            if size > (MAX_FRAME_BYTES if self.known else FIRST_FRAME_BYTES):
                self.abort(ValueError("what it says is not of the control protocol"))
                return
            if len(self._arrived) < start + size:
                break
            self._take(bytes(self._arrived[start : start + size]))
            start += size + LENGTH_BYTES
        del self._arrived[: start - LENGTH_BYTES]

    def _take(self, data: bytes) -> None:
        try:
            self.receive(self._kind.FromString(data))
        except Exception as error:  # a defect at one of the ends
            if self.known:
                log.error("a frame of %s could not be handled", self.peer, exc_info=error)
            self.abort(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
        self.closed.set_result(self.error or error)
