"""KV events over ZMQ in vLLM's format (as of 0.32), for routers and tools that follow vLLM's instances.

A message is (topic, sequence number in 8 bytes, big-endian; msgpack of `KVEventBatch`): an array whose events are maps with
the key `type`. A batch has the changes of one engine step. The engine never waits: a batch that finds the queue full is
dropped, but has a number, so that subscribers see the gap.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from pdserve.errors import SetupError
from pdserve.instance.kv_events_config import KVEventsConfig

log = logging.getLogger(__name__)
MEDIUM_GPU = "GPU"  # vLLM's word for the engine's pool, on a CPU too
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_S = 0.1  # between two looks at the replay socket


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks are in the pool. `token_ids` are those of all of them; the first one continues the parent."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """The pool is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True, array_like=True):
    """`ts` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class ZmqPublisher:
    """Publishes the changes of a pool. The engine thread calls all methods but `close`; a thread of its own sends.

    Args:
        on_drop: called for each batch that is dropped because the queue is full.

    Raises:
        SetupError: an endpoint is invalid or in use.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, on_drop: Callable[[], None]) -> None:
        self._block_size = block_size
        self._on_drop = on_drop
        self._events: list[Event] = []
        self._next_number = 0
        self._queue: queue.Queue[tuple[int, KVEventBatch]] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._publisher = _open(zmq.PUB, config.endpoint, config.hwm)
        # One replay fits into the socket's own queue: ROUTER sockets drop what does not.
        replay = config.replay_endpoint
        try:
            self._replay = _open(zmq.ROUTER, replay, config.buffer_steps + 1) if replay else None
        except SetupError:
            self._publisher.close(linger=0)
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def store(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """Record that a block is in the pool. It joins the last event if it continues that one's blocks."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and parent == last.block_hashes[-1]:
            last.block_hashes.append(key)
            last.token_ids.extend(tokens)
            return
        self._events.append(BlockStored([key], parent, list(tokens), self._block_size, None, MEDIUM_GPU, None))

    def remove(self, key: bytes) -> None:
        """Record that a block has left the pool."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
        else:
            self._events.append(BlockRemoved([key], MEDIUM_GPU))

    def clear(self) -> None:
        """Record that the pool is empty."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish what was recorded since the last call as one batch. Never waits."""
        if not self._events:
            return
        batch, self._events = KVEventBatch(time.time(), self._events, 0), []
        try:
            self._queue.put_nowait((self._next_number, batch))
        except queue.Full:
            self._on_drop()
        self._next_number += 1

    def close(self) -> None:
        """Stop the thread and close the sockets. What is still queued is not sent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while not self._closing.is_set():
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)
            try:
                entry = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            message = entry[0].to_bytes(8, "big"), encoder.encode(entry[1])
            self._sent.append(message)
            self._publisher.send_multipart((self._topic, *message))
        self._publisher.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send a client all kept batches from the number on that it asks for, and an end mark."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("KV events: a replay request must be an empty frame and a number in 8 bytes")
            return
        client, _, first = frames
        for number, payload in self._sent:
            if number >= first:  # big-endian: in numeric order
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _open(kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(high_water_mark)
    binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise SetupError(f"--kv-events-config: {endpoint}: {error.strerror}") from error
    return socket
