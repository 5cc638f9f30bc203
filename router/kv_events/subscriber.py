"""Follows one publisher of KV events in vLLM's format over ZMQ, so that the router knows what the KV store has.

Batches are numbered. Missing ones are asked for at the publisher's replay endpoint. If they cannot be had, what the publisher
said before is forgotten, since a removal may be lost. After a disconnection, and after a number that is not higher than the
last one, the publisher may have started again: the router forgets too, and asks for its batches from the first one on.
A batch that was lost with none after it (published before the subscription took hold, or dropped at the end of a burst) is
asked for when the publisher has been quiet for a while.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import zmq
import zmq.asyncio

from pdserve.errors import SetupError
from pdserve.interop.vllm_kv_events import END_OF_REPLAY, NUMBER_BYTES, read_batch
from pdserve.router.kv_events.sources import KVEventsSource, load_sources
from pdserve.router.kv_events.stored_blocks import StoredBlocks
from pdserve.router.scheduling.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

STORE = "store"  # the holder of the blocks in the index: there is one, whichever publisher tells of them
REPLAY_TIMEOUT_S = 5.0  # for the next batch
QUIET_S = 5.0  # without a message, after which missing batches are asked for
MODEL_POLL_S = 0.2
LOG_INTERVAL_S = 10.0
MAX_MESSAGE_BYTES = 64 << 20
MAX_QUEUED = 10_000  # messages that wait to be read; ZMQ drops further ones, which leaves a gap


def make_subscribers(
    setting: str, index: PrefixIndex, root: Callable[[], bytes | None], count: Callable[[str, str, int], None]
) -> "list[Subscriber]":
    """Return those of `--kv-events-subscribe`; `count` gets an endpoint before the arguments that `Subscriber` explains."""
    return [Subscriber(one, index, root, partial(count, one.endpoint)) for one in load_sources(setting)]


class Subscriber:
    """Follows one publisher until `run` is cancelled. Everything runs on the event loop.

    Args:
        index: gets the keys of the blocks in the store, with `STORE` as their holder.
        root: returns the key of no tokens; None while no instance has told the model.
        count: called with `applied`, `refused` or `lost` and a number of batches.

    Raises:
        SetupError: an endpoint is invalid.
    """

    def __init__(
        self,
        source: KVEventsSource,
        index: PrefixIndex,
        root: Callable[[], bytes | None],
        count: Callable[[str, int], None],
    ) -> None:
        self._source = source
        self._index = index
        self._root = root
        self._count = count
        self._blocks = StoredBlocks()
        self._next_number: int | None = None  # of the next batch; None: whichever comes
        self._last_live = -1  # number of the last batch that was published, not repeated
        self._is_answering = True  # its replay endpoint
        self._warned_at = -math.inf
        for endpoint in filter(None, (source.endpoint, source.replay_endpoint)):
            _connect(zmq.SUB, endpoint).close(linger=0)  # an invalid one is an error at the start

    async def run(self) -> None:
        """Follow the publisher. Never returns."""
        while self._root() is None:
            await asyncio.sleep(MODEL_POLL_S)
        socket = _connect(zmq.SUB, self._source.endpoint)
        disconnections: zmq.Socket[bytes] = zmq.Context.shadow(zmq.asyncio.Context.instance()).socket(zmq.PAIR)
        try:
            monitor = f"inproc://kv-events-{id(socket)}"
            socket.monitor(monitor, zmq.EVENT_DISCONNECTED)
            disconnections.connect(monitor)
            socket.subscribe(self._source.topic.encode())
            await self._replay()
            while True:
                has_message = await socket.poll(QUIET_S * 1000)
                if disconnections.poll(0):
                    while disconnections.poll(0):
                        disconnections.recv_multipart()
                    await self._restart("the connection was lost, and it may have started again")
                elif not has_message:
                    await self._replay()
                if has_message:
                    await self._on_message(await socket.recv_multipart())
                    await asyncio.sleep(0)  # receiving does not wait while there are messages
        finally:
            socket.disable_monitor()
            disconnections.close(linger=0)
            socket.close(linger=0)

    async def _restart(self, reason: str) -> None:
        """Begin anew with the batches that the publisher has kept."""
        self._forget(reason)
        self._next_number, self._last_live = None, -1
        await self._replay()

    async def _on_message(self, frames: Sequence[bytes]) -> None:
        number = _number(frames)
        if number is None:
            self._refuse(f"a message must be a topic, a number in {NUMBER_BYTES} bytes, and a batch")
            return
        if number <= self._last_live:
            await self._restart("it has started again")
        self._last_live = number
        if self._next_number is not None and number > self._next_number:
            await self._replay()
        self._accept(number, frames[2])

    async def _replay(self) -> None:
        """Have the publisher repeat its batches from the next number on, as far as it has kept them."""
        if self._source.replay_endpoint is None:
            return
        socket = _connect(zmq.DEALER, self._source.replay_endpoint)
        try:
            await socket.send_multipart((b"", (self._next_number or 0).to_bytes(NUMBER_BYTES, "big")))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                self._is_answering = True
                if frames[-2:-1] == [END_OF_REPLAY]:
                    return
                number = _number(frames[1:] if len(frames) == 4 else frames)  # older versions of vLLM send no topic
                if number is None:
                    self._refuse("a repeated batch must be an empty frame, a topic, a number in 8 bytes, and a batch")
                    return
                self._accept(number, frames[-1])
                await asyncio.sleep(0)
        except TimeoutError:
            if self._is_answering:
                self._warn(f"no answer from {self._source.replay_endpoint} within {REPLAY_TIMEOUT_S:g} s")
            self._is_answering = False
        finally:
            socket.close(linger=0)

    def _accept(self, number: int, payload: bytes) -> None:
        """Apply a batch, unless it was applied before. Those between the last one and this are lost."""
        expected = number if self._next_number is None else self._next_number
        if number < expected:
            return
        if number > expected:
            self._forget(f"{number - expected} batches from number {expected} on are lost")
            self._count("lost", number - expected)
        self._next_number = number + 1
        root = self._root()
        if root is None:  # all instances have left
            return
        try:
            removed, added = self._blocks.apply(read_batch(payload), root)
        except ValueError as error:
            self._refuse(f"batch {number}: {error}")
            return
        self._index.remove(STORE, removed)
        self._index.add(STORE, added)
        self._count("applied", 1)

    def _refuse(self, reason: str) -> None:
        self._count("refused", 1)
        self._warn(reason)

    def _forget(self, reason: str) -> None:
        self._warn(f"{reason}; what it said before is forgotten")
        self._index.remove(STORE, self._blocks.clear())

    def _warn(self, message: str) -> None:
        """Log a warning, at most one per `LOG_INTERVAL_S`: the metric counts them all."""
        now = asyncio.get_running_loop().time()
        if now - self._warned_at > LOG_INTERVAL_S:
            self._warned_at = now
            log.warning("KV events of %s: %s", self._source.endpoint, message)


def _number(frames: Sequence[bytes]) -> int | None:
    """Return the number of a message, or None if it is malformed. Numbers are signed, since -1 ends a replay."""
    if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
        return None
    number = int.from_bytes(frames[1], "big", signed=True)
    return number if number >= 0 else None


def _connect(kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.set_hwm(MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise SetupError(f"--kv-events-subscribe: {endpoint}: {error.strerror}") from error
    return socket
