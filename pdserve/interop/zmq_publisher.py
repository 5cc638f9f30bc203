"""KV events over ZMQ in vLLM's format (as of 0.32), for routers and tools that follow vLLM's instances.

A message is (topic, sequence number in 8 bytes, big-endian; msgpack of `KVEventBatch`): an array whose events are maps with
the key `type`. A batch has the changes of all steps within `GATHER_S`. The engine never waits: if the queue is full, a step's
changes are dropped, and a number is left out, so that subscribers see the gap.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import zmq

from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.errors import SetupError
from pdserve.instance.kv_events_config import KVEventsConfig
from pdserve.interop.vllm_kv_events import (
    END_OF_REPLAY,
    MEDIUM_POOL,
    MEDIUM_STORE,
    NUMBER_BYTES,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)
from pdserve.keys import HASH_TOKENS, STATE_WINDOW, block_keys
from pdserve.kv_transfer.connector import Outcome

log = logging.getLogger(__name__)
POLL_S = 0.1  # between two looks at whether the threads are to end
MAX_MESSAGE_BYTES = 1024  # of subscriptions and replay requests; ZMQ ends the connections of clients that send more
REPLAY_REST = 9.0  # pause after a replay, in units of the time that it took: replays take at most a tenth of a core
GATHER_S = 0.02  # of changes in one batch: each message takes time from the engine, however short it is
MAX_STORED_KEYS = 1 << 20  # published as in the store; older ones are withdrawn


class ZmqPublisher:
    """Publishes the changes of a pool, and what this instance learns of the KV store.

    The engine thread calls all methods but `close`; a thread of its own sends, and another one replays. No store tells its
    evictions to all instances, so a block in the store is withdrawn once a load or a match of this instance does not find it.

    Args:
        root: key of no tokens, without a salt. The block in which a salt or an adapter begins is published with `extra_keys`,
            so that readers that know blocks by their tokens do not take it for that of other requests.
        on_drop: called for each step whose changes are dropped because the queue is full.
        windows: of the pool's groups of blocks, in tokens; None: its blocks serve all later tokens.

    Raises:
        SetupError: an endpoint is invalid or in use.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        block_size: int,
        root: bytes,
        on_drop: Callable[[], None],
        windows: Sequence[int | None] = (),
    ) -> None:
        self._windows = windows if len(windows) > 1 else ()
        self._block_size = block_size
        self._root = root
        self._on_drop = on_drop
        self._events: list[Event] = []
        self._stored: dict[bytes, None] = {}  # keys published as in the store, the oldest first
        self._num_dropped = 0
        self._queue: queue.SimpleQueue[tuple[int, list[Event]]] = queue.SimpleQueue()  # each after so many dropped ones
        self._max_queued = config.max_queue_size
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._publisher = _open(zmq.PUB, config.endpoint, config.hwm)
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="kv-events", daemon=True)]
        if config.replay_endpoint:
            try:
                # One replay fits into the socket's own queue: ROUTER sockets drop what does not.
                replay = _open(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1)
            except SetupError:
                self._publisher.close(linger=0)
                raise
            self._threads.append(
                threading.Thread(target=self._answer_replays, args=(replay,), name="kv-replays", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def store(
        self, key: bytes, parent: bytes | None, tokens: Sequence[int], group: int = 0, medium: str = MEDIUM_POOL
    ) -> None:
        """Record that a block is there. It joins the last event if it continues that one's blocks."""
        last, group_idx = self._events[-1] if self._events else None, group if self._windows else None
        depends_on_more = self._depends_on_more(key, parent, tokens)
        joins = isinstance(last, BlockStored) and (last.medium, last.group_idx, last.block_hashes[-1]) == (
            medium,
            group_idx,
            parent,
        )
        if isinstance(last, BlockStored) and joins and not depends_on_more:
            last.block_hashes.append(key)
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        # In place of the salt or the adapter, which are not known here: the key is as unique.
        extra_keys: list[Any] | None = [[key.hex()]] if depends_on_more else None
        event = BlockStored([key], parent, list(tokens), self._block_size, None, medium, None, extra_keys, group_idx)
        if self._windows:
            window = self._windows[group]
            is_state = window == STATE_WINDOW
            event.kv_cache_spec_kind = "mamba" if is_state else "sliding_window" if window else "full_attention"
            event.kv_cache_spec_sliding_window = None if is_state else window
        self._events.append(event)

    def _depends_on_more(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> bool:
        """Return whether a key does not follow from parent and tokens: a salt or an adapter begins in the block.

        Behind another block, only blocks of whole units of keys tell: the others are not chained to their parents.
        """
        if parent is not None and self._block_size % HASH_TOKENS:
            return False
        return key != block_keys(self._root if parent is None else parent, tokens, self._block_size)[0]

    def remove(self, key: bytes, group: int = 0, medium: str = MEDIUM_POOL) -> None:
        """Record that a block is no longer there."""
        last, group_idx = self._events[-1] if self._events else None, group if self._windows else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group_idx):
            last.block_hashes.append(key)
        else:
            self._events.append(BlockRemoved([key], medium, group_idx))

    def on_stored(self, seq: EngineSequence, first: int, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """Record which blocks of a sequence the KV store has, besides those already published and partial ones."""
        full, size = seq.kv.full_keys(), seq.kv.block_size
        for i, (key, outcome) in enumerate(zip(keys, outcomes, strict=True), first):
            is_full = i < len(full) and key == full[i]
            if outcome is Outcome.OK and is_full and key not in self._stored:
                self._stored[key] = None
                self.store(
                    key, full[i - 1] if i else None, seq.output.tokens[i * size : (i + 1) * size], 0, MEDIUM_STORE
                )
        while len(self._stored) > MAX_STORED_KEYS:
            self.on_missing([next(iter(self._stored))])

    def on_missing(self, keys: Iterable[bytes]) -> None:
        """Withdraw those of these blocks that were published as in the KV store."""
        for key in keys:
            if key in self._stored:
                del self._stored[key]
                self.remove(key, 0, MEDIUM_STORE)

    def flush(self) -> None:
        """Publish what was recorded since the last call. Never waits."""
        if not self._events:
            return
        if self._queue.qsize() < self._max_queued:
            self._queue.put((self._num_dropped, self._events))
        else:
            self._num_dropped += 1
            self._on_drop()
        self._events = []

    def close(self) -> None:
        """Stop the threads and close the sockets. What is still queued is not sent."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        encoder, num_sent = msgspec.msgpack.Encoder(), 0
        while not self._closing.is_set():
            try:
                entries = [self._queue.get(timeout=POLL_S)]
            except queue.Empty:
                continue
            self._closing.wait(GATHER_S)
            entries += [self._queue.get() for _ in range(self._queue.qsize())]
            for num_dropped, steps in groupby(entries, itemgetter(0)):
                batch = KVEventBatch(time.time(), [event for _, events in steps for event in events], 0)
                message = (num_sent + num_dropped).to_bytes(NUMBER_BYTES, "big"), encoder.encode(batch)
                num_sent += 1
                self._sent.append(message)
                self._publisher.send_multipart((self._topic, *message))
        self._publisher.close(linger=0)

    def _answer_replays(self, replay: "zmq.Socket[bytes]") -> None:
        while not self._closing.is_set():
            if replay.poll(round(1000 * POLL_S)):
                started = time.monotonic()
                self._answer(replay)
                self._closing.wait(REPLAY_REST * (time.monotonic() - started))
        replay.close(linger=0)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send a client all kept batches from the number on that it asks for, and an end mark."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            log.warning("KV events: a replay request must be an empty frame and a number in 8 bytes")
            return
        client, _, first = frames
        for number, payload in self._sent.copy():  # in one step: the other thread appends to it
            if number >= first:  # big-endian: in numeric order
                replay.send_multipart((client, b"", self._topic, number, payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _open(kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise SetupError(f"--kv-events-config: {endpoint}: {error.strerror}") from error
    return socket
