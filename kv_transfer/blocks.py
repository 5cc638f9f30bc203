"""One operation of a connector, and its blocks as batch hooks handle them: a key, a pool row and an outcome each."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import xxhash

from pdserve.kv_transfer.codec import Codec, Undecodable
from pdserve.kv_transfer.connector import GrowingStore, OperationFuture, Outcome, Result
from pdserve.kv_transfer.header import CHECKSUM, Buffer, HeaderFormat, Row, payload_length

_CHUNK_BYTES = 128 << 10  # copied, then hashed while still in the CPU cache

GOES_ON = object()  # returned by the work of an operation that is not over: it runs again later

T = TypeVar("T")


class Expired(Exception):
    """The operation is closed or cancelled: its rows must not be touched any more."""


class Fence:
    """A lock that keeps a late worker thread from touching pool rows that now belong to another sequence.

    Guards the pool rows of one operation. `with fence:` permits access while the fence is open.

    Entering raises `Expired` once the fence is closed, or after `cancel`, which does not wait for a copy in progress;
    `close` does.
    """

    __slots__ = ("_closed", "_lock", "cancelled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.cancelled = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed or self.cancelled:
            self._lock.release()
            raise Expired

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def cancel(self) -> None:
        """Refuse further access. Returns at once."""
        self.cancelled = True

    def close(self, *, waits: bool = True) -> bool:
        """Close the fence, after waiting for a copy in progress. Returns True if this call closed it.

        Args:
            waits: otherwise, it stays open if there is such a copy.
        """
        if not self._lock.acquire(blocking=waits):
            return False
        first, self._closed = not self._closed, True
        self._lock.release()
        return first


class Operation(OperationFuture[T]):
    """One call of store, load, follow, match or release, and its future.

    Attributes:
        outcomes: one per block; UNAVAILABLE until marked otherwise.
        expected: outcomes that are no failures.
        bytes_moved: payload bytes stored or loaded so far.
        num_stored: blocks that were copied to the store.
        matched: leading keys found so far, for `match` and `follow`.
        started: on the clock `perf_counter`.
        deadline: on the monotonic clock.
        fence: around its pool rows.
        work: is run by a worker thread; again, after it has returned GOES_ON.
        on_end: is called before the future is done, with its result; None if it ends by an exception.

    Args:
        make_result: returns the result; None: it is `matched`.
    """

    def __init__(
        self,
        kind: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float,
        make_result: "Callable[[Operation[T]], T] | None" = None,
        expected: Set[Outcome] = frozenset(),
    ) -> None:
        self.kind = kind
        self.keys, self.block_ids = list(keys), list(block_ids)
        self.outcomes = [Outcome.UNAVAILABLE] * len(block_ids)
        self.expected = expected
        self.bytes_moved = 0
        self.num_stored = 0
        self.matched = 0
        self.started = time.perf_counter()
        self.deadline = deadline
        self.fence = Fence()
        self.work: Callable[[], object] | None = None
        self.on_end: Callable[[Operation[T], T | None], None] | None = None
        self._make_result = make_result
        super().__init__()

    def request_cancel(self) -> None:
        self.fence.cancelled = True

    @property
    def is_over(self) -> bool:
        """True once the operation is cancelled, complete or past its deadline."""
        return self.fence.cancelled or self.done() or time.monotonic() >= self.deadline

    def complete(self, error: BaseException | None = None, *, waits: bool = True) -> None:
        """Set the future's result, or an exception. Called by worker and watchdog; only the first call has an effect.

        Args:
            waits: for a copy in progress; otherwise, it has no effect if there is one.
        """
        if not self.fence.close(waits=waits):
            return
        self.work = None
        if self.fence.cancelled:
            final = {Outcome.UNAVAILABLE: Outcome.CANCELLED}
            self.outcomes = [final.get(outcome, outcome) for outcome in self.outcomes]
        result: Any = None
        try:
            if error is None:
                result = self.matched if self._make_result is None else self._make_result(self)
        except Exception as raised:  # noqa: BLE001 - raised to the caller; the thread that completes others lives on
            error = raised
        if self.on_end is not None:
            self.on_end(self, result)
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)


class GrowingOperation(Operation[Result], GrowingStore):
    """A store of blocks that are still being written. Workers run it in turns, each up to the bytes that are final.

    Attributes:
        growth: coroutine that receives the number of final bytes, and copies that prefix of each block. Ends with the last
            byte, or when closed.
        is_growing: it has copied what is final, and waits for more. Its work returns GOES_ON then.
    """

    growth: Generator[None, int, None]

    def __init__(self, enqueue: "Callable[[GrowingOperation], None]", *operation: Any) -> None:
        super().__init__("store", *operation)
        self._enqueue = enqueue
        self._turn = threading.Lock()
        self._num_final = 0
        self._busy_s = 0.0
        self.is_growing = True

    def advance(self, num_bytes: int) -> None:
        self._num_final = num_bytes
        self._queue()

    def request_cancel(self) -> None:
        super().request_cancel()
        self._queue()  # for a worker to end it

    def _queue(self) -> None:
        with self._turn:
            was_growing, self.is_growing = self.is_growing, False
        if was_growing and self.work is not None:
            self.started = time.perf_counter() - self._busy_s  # what it waits for is not its own time
            self._enqueue(self)

    def grow(self) -> object:
        """Copy what is final."""
        with suppress(StopIteration):
            while True:
                num_bytes = self._num_final
                self.growth.send(num_bytes)
                with self._turn:
                    if self._num_final == num_bytes and not self.fence.cancelled:
                        self._busy_s, self.deadline = time.perf_counter() - self.started, math.inf
                        self.is_growing = True
                        return GOES_ON
        return None


class StreamedPart(ABC):
    """Part of a payload that is still being received. It is read directly into its destination, without a buffer."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Total length in bytes."""

    @abstractmethod
    def read_into(self, memory: memoryview) -> int:
        """Move the bytes received so far to the front of `memory` without blocking, and return their number.

        `memory` must not be longer than the remaining part.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block until `read_into` can return bytes. Raises one of the connector's faults."""

    def __bytes__(self) -> bytes:
        whole = bytearray(len(self))
        remaining = memoryview(whole)
        while remaining:
            count = self.read_into(remaining)
            remaining = remaining[count:]
            if not count:
                self.wait()
        return bytes(whole)


class Block:
    """Base of the blocks of an operation.

    Attributes:
        key: the block key.
        front_of: from where its front was loaded before it was complete; None if it was not.
    """

    __slots__ = (
        "_codec",
        "_fence",
        "_hasher",
        "_header_format",
        "_index",
        "_operation",
        "_payload_bytes",
        "_row",
        "front_of",
        "key",
    )
    _hasher: xxhash.xxh3_64  # of what has been copied of a block that is still being written

    def __init__(
        self, operation: Operation[Any], index: int, key: bytes, row: Row, header_format: HeaderFormat, codec: Codec
    ) -> None:
        self._operation = operation
        self._fence = operation.fence
        self._index = index
        self._row = row
        self._header_format = header_format
        self._codec = codec
        self._payload_bytes = 0
        self.front_of: int | None = None
        self.key = key

    @property
    def outcome(self) -> Outcome:
        return self._operation.outcomes[self._index]


class Outgoing(Block):
    """A block to be stored, as passed to `put_many`. A block that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def read(self) -> tuple[bytes, memoryview]:
        """Return header and payload, for transports that send directly from the pool row.

        The row may change under the transport once the deadline has passed. The checksum does not match then, which a load
        detects. Check `in_time` before publishing to keep such a value from becoming visible at all.
        """
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            return self._header_format.pack(self.key, payload), payload.data

    def copy_to(self, target: Row) -> bytes:
        """Copy the payload to the front of `target`, and return the header of the copied bytes."""
        with self._fence:
            payload = self._row if self._codec.is_identity else self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            hasher = xxhash.xxh3_64()
            copy_and_hash(target, payload, hasher)
        return self._header_format.pack_checksum(self.key, self._payload_bytes, hasher.digest())

    def copy_front(self, target: Row, num_bytes: int) -> bytes:
        """Copy the row's first `num_bytes` to `target`, but for what was copied before. Returns the header so far."""
        if not self._payload_bytes:
            self._hasher = xxhash.xxh3_64()
        with self._fence:
            copied = slice(self._payload_bytes, num_bytes)
            copy_and_hash(target[copied], self._row[copied], self._hasher)
            self._payload_bytes = num_bytes
        return self._header_format.pack_checksum(self.key, num_bytes, self._hasher.digest())

    def in_time(self) -> bool:
        """Return True while the operation is neither cancelled nor past its deadline."""
        return not self._operation.is_over

    def stored(self) -> None:
        """Mark the block as stored."""
        self._operation.bytes_moved += self._payload_bytes
        self._operation.num_stored += 1
        self._operation.outcomes[self._index] = Outcome.OK

    def present(self) -> None:
        """Mark the block as already in the store, with nothing copied."""
        self._operation.outcomes[self._index] = Outcome.OK

    def failed(self, outcome: Outcome) -> None:
        """Mark the block as not stored, for this reason."""
        self._operation.outcomes[self._index] = outcome


class Incoming(Block):
    """A block to be loaded, as passed to `get_many`. A block that is never marked ends as UNAVAILABLE.

    Attributes:
        header: of the value that was accepted or rejected, for `delete_corrupt`.
    """

    __slots__ = ("header",)

    header: bytes

    def accept(self, header: bytes, parts: Iterable[Buffer | Row | StreamedPart]) -> Outcome:
        """Verify a stored value and copy it into the pool row. Marks the block OK or CORRUPT, and returns that outcome.

        The parts of the payload are requested one at a time, each when the previous one is no longer used, so `parts` may
        be a generator that blocks or raises.

        The checksum is computed after the copy, over the row or over a private copy that is decoded afterwards. So the
        bytes that were verified are the bytes that are used, even if the source is overwritten meanwhile.
        """
        if not self._header_format.matches(header, self.key):
            return self._mark(header, None)
        if self._codec.is_identity or (self._codec.keeps_rows and payload_length(header) == len(self._row)):
            return self._mark(header, self._receive(self._row, parts))
        payload = bytearray(payload_length(header))
        self._payload_bytes = len(payload)
        digest = self._receive(np.frombuffer(payload, np.uint8), parts)
        return self._mark(header, digest if digest == header[CHECKSUM] and self._decode(payload) else None)

    def read_front(self, front: Row, source: int) -> bool:
        """Copy the front of a payload that is being written, but for what was copied before. Only without a codec.

        Args:
            source: of the front. If it is another than before, the copy starts anew.

        Returns:
            Whether there was more than before.
        """
        if self.front_of != source:
            self.front_of, self._payload_bytes, self._hasher = source, 0, xxhash.xxh3_64()
        with self._fence:
            copied = slice(self._payload_bytes, len(front))
            copy_and_hash(self._row[copied], front[copied], self._hasher)
        has_more = len(front) > self._payload_bytes
        self._payload_bytes = max(self._payload_bytes, len(front))
        return has_more

    def accept_rest(self, header: bytes, payload: Row) -> bool:
        """Like `accept`, after `read_front`. Returns False, with the block unmarked, if the front was of something else."""
        assert self.front_of is not None
        self.read_front(payload, self.front_of)
        is_sound = self._header_format.matches(header, self.key) and self._hasher.digest() == header[CHECKSUM]
        if is_sound:
            self._mark(header, header[CHECKSUM])
        else:
            self.front_of, self._payload_bytes = None, 0
        return is_sound

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        """Like `accept`, for transports that can read directly into the pool row without ever blocking.

        Args:
            header: the stored header.
            read: fills the given memory with the payload's bytes from the given offset on, and returns their number.

        Returns:
            None, with the block left unmarked, if the value cannot be read this way: use `accept`.
        """
        if not self._codec.keeps_rows or not self._header_format.matches(header, self.key):
            return None
        if not self._codec.is_identity and payload_length(header) != len(self._row):
            return None
        with self._fence:
            digest = read_and_hash(self._row, read)
        return None if digest is None else self._mark(header, digest)

    def accept_digest(self, header: bytes, digest: bytes) -> Outcome:
        """Like `accept`, for transports that wrote the payload into the row, and hold the fence since before.

        Args:
            digest: checksum of the row's bytes.
        """
        return self._mark(header, digest if self._header_format.matches(header, self.key) else None)

    def missing(self) -> None:
        """Mark the block as not in the store."""
        self._operation.outcomes[self._index] = Outcome.MISSING

    def corrupt(self) -> None:
        """Mark the block as corrupt."""
        self._operation.outcomes[self._index] = Outcome.CORRUPT

    def _mark(self, header: bytes, digest: bytes | None) -> Outcome:
        """Mark the block OK if this is the checksum that the header states, otherwise CORRUPT."""
        self.header = header
        outcome = Outcome.OK if digest == header[CHECKSUM] else Outcome.CORRUPT
        if outcome is Outcome.OK:
            self._operation.bytes_moved += self._payload_bytes or len(self._row)
        self._operation.outcomes[self._index] = outcome
        return outcome

    def _receive(self, target: Row, parts: Iterable[Buffer | Row | StreamedPart]) -> bytes | None:
        """Copy the parts into `target`, and return the checksum of its bytes; None if there are not as many."""
        hasher, offset = xxhash.xxh3_64(), 0
        for part in parts:
            destination = target[offset : offset + len(part)]
            if len(destination) < len(part):
                return None
            if isinstance(part, StreamedPart):
                self._receive_stream(destination.data, part, hasher)
            else:
                with self._fence:
                    copy_and_hash(destination, part, hasher)
            offset += len(part)
        return hasher.digest() if offset == len(target) else None

    def _receive_stream(self, target: memoryview, part: StreamedPart, hasher: xxhash.xxh3_64) -> None:
        """Read a part into `target`. Waits outside of the fence, so that closing the fence never waits for the store."""
        while target:
            with self._fence:
                count = part.read_into(target)
                hasher.update(target[:count])
            target = target[count:]
            if not count:
                part.wait()

    def _decode(self, payload: bytearray) -> bool:
        try:
            row = self._codec.decode(payload)
        except Undecodable:
            return False
        with self._fence:
            self._row[:] = row
        return True


def copy_and_hash(target: Row, source: Buffer | Row, hasher: xxhash.xxh3_64) -> None:
    """Copy `source` to the front of `target`, and hash the bytes in `target`, even if `source` changes meanwhile."""
    array = source if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8)
    for start in range(0, len(array), _CHUNK_BYTES):
        chunk = array[start : start + _CHUNK_BYTES]
        copied = target[start : start + len(chunk)]
        copied[:] = chunk
        hasher.update(copied)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on


def read_and_hash(target: Row, read: Callable[[memoryview, int], int]) -> bytes | None:
    """Fill `target` in chunks by `read(memory, offset)`, which returns the number of bytes it read.

    Returns:
        The checksum of the bytes in `target`; None if there were fewer bytes than `target` holds.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(target), _CHUNK_BYTES):
        chunk = target[start : start + _CHUNK_BYTES]
        if read(chunk.data, start) != len(chunk):
            return None
        hasher.update(chunk)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on
    return hasher.digest()
