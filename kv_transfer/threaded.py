"""What all connectors without futures of their own share: threads, deadlines, headers, checksums, counts.

    Connector
    └── BatchedConnector     blocking hooks over whole batches: put_many, get_many, contains_many, …
        └── ThreadedConnector    blocking hooks over one value: put, get, contains, delete

`ThreadedConnector` is for authors of a plain key-value transport; `memory.py` is its example. `BatchedConnector` is for
transports that gain from batches or place bytes themselves: `shm.py`, `file.py`, `redis.py`.

An operation runs on one of a few worker threads. It has until its deadline: the time-out, and what its blocks and those of
the operations before it would take at `SLOWEST_BYTES_PER_S`. If it is not through by then, a watchdog completes its future
with what is there: the blocks done so far are OK, the others UNAVAILABLE. The worker may still hang in a dead store at
that moment, so rows are touched inside of the operation's fence only, and the watchdog closes the fence before it
completes the future: a late worker finds it closed, and leaves rows that meanwhile belong to another sequence alone.
"""

import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.codec import CODECS, Codec, Undecodable
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.header import (
    HEADER_BYTES,
    Buffer,
    Row,
    Seal,
    announces,
    checksum,
    copy,
    fill,
    intact,
    payload_length,
)
from pdserve.kv_transfer.url import Query

log = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 64 << 20  # a store that is slower than this does not answer in time
MAX_PENDING = 4096  # operations; more than this means a store that does not keep up at all
SWITCH_INTERVAL_S = 0.0005  # the interpreter's, where workers run: the default of 5 ms is as long as 30 MiB take
MAX_LEASE_S = 86_400.0  # a mistaken lease must not pin a block for ever
_COMPLAIN_EVERY_S = 60.0

T = TypeVar("T")


class Expired(Exception):
    """The operation was answered at its deadline: its rows must not be touched any more."""


class Full(Exception):
    """Raised by `put`: no room for this value."""


class Fence:
    """Open while the operation's rows may be touched. `with fence:` raises `Expired` once it is closed."""

    __slots__ = ("_closed", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise Expired

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def close(self) -> bool:
        """Whether this call closed it. Waits for the one copy that may be under way."""
        with self._lock:
            first = not self._closed
            self._closed = True
        return first


class _Block:
    __slots__ = ("_codec", "_fence", "_index", "_operation", "_payload_bytes", "_row", "_seal", "key")

    def __init__(
        self, operation: "_Operation[Any]", index: int, key: bytes, row: Row, seal: Seal, codec: Codec
    ) -> None:
        self._operation = operation
        self._fence = operation.fence
        self._index = index
        self._row = row
        self._seal = seal
        self._codec = codec
        self._payload_bytes = 0
        self.key = key


B = TypeVar("B", bound=_Block)


class Outgoing(_Block):
    """A block on its way out, as `put_many` sees it. One that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def read(self) -> tuple[bytes, memoryview]:
        """Header and payload, for transports that send from the row itself.

        If the deadline passes while they send, the row may change under them. The header does not fit then, and a load
        finds out; `in_time` before publishing keeps such a value from being seen at all.
        """
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            return self._seal.pack(self.key, payload), payload.data

    def copy_to(self, target: Row) -> bytes:
        """Copies the payload to the front of `target`, and returns the header of what it holds then."""
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            return self._seal.pack_checksum(self.key, len(payload), copy(target, payload))

    def in_time(self) -> bool:
        return not self._operation.over

    def stored(self) -> None:
        self._operation.moved += self._payload_bytes
        self._operation.outcomes[self._index] = Outcome.OK

    def present(self) -> None:
        """The store has it already: nothing was copied."""
        self._operation.outcomes[self._index] = Outcome.OK

    def failed(self, outcome: Outcome) -> None:
        self._operation.outcomes[self._index] = outcome


class Incoming(_Block):
    """A block to be loaded, as `get_many` sees it. One that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def accept(self, header: bytes, *parts: Buffer | Row) -> Outcome:
        """Checks what the store gave for this key, and puts it into the row: OK or CORRUPT, which it also marks.

        The checksum is taken after the copy, over the row, or over a copy of our own that is then decoded: what was
        verified is what will be used, even if somebody overwrote the source meanwhile.
        """
        fits = self._seal.fits(header, self.key) and sum(map(len, parts)) == payload_length(header)
        take = self._copy if self._codec.as_is else self._decode
        return self._accepted(Outcome.OK if fits and take(header, parts) else Outcome.CORRUPT, header)

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        """As `accept`, for transports that can put the payload straight into the row and never wait for it.

        Args:
            read: fills the given memory with the payload's bytes from the given one on; how many it had.

        Returns:
            None, and marks nothing, where that does not work out: use `accept`.
        """
        if not self._codec.as_is or not self._seal.fits(header, self.key):
            return None
        with self._fence:
            digest = fill(self._row, read)
        if digest is None:
            return None
        outcome = Outcome.OK if announces(header, digest) else Outcome.CORRUPT
        return self._accepted(outcome, header)

    def accept_placed(self, header: bytes) -> Outcome:
        """As `accept`, for transports that have put the payload into the row, and have held the fence since before."""
        fits = self._seal.fits(header, self.key) and announces(header, checksum(self._row))
        return self._accepted(Outcome.OK if fits else Outcome.CORRUPT, header)

    def missing(self) -> None:
        self._operation.outcomes[self._index] = Outcome.MISSING

    def corrupt(self) -> None:
        self._operation.outcomes[self._index] = Outcome.CORRUPT

    def _accepted(self, outcome: Outcome, header: bytes) -> Outcome:
        if outcome is Outcome.OK:
            self._operation.moved += payload_length(header)
        self._operation.outcomes[self._index] = outcome
        return outcome

    def _copy(self, header: bytes, parts: Sequence[Buffer | Row]) -> bool:
        with self._fence:
            return announces(header, copy(self._row, *parts))

    def _decode(self, header: bytes, parts: Sequence[Buffer | Row]) -> bool:
        payload = b"".join(parts)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on
        if not intact(header, payload):
            return False
        try:
            row = self._codec.decode(payload)
        except Undecodable:
            return False
        with self._fence:
            self._row[:] = row
        return True


class _Operation(Generic[T]):
    """One call of store, load, match or release on its way through the workers."""

    def __init__(self, kind: str, blocks: int, deadline: float, answer: Callable[["_Operation[T]"], T]) -> None:
        self.kind = kind
        self.outcomes = [Outcome.UNAVAILABLE] * blocks
        self.moved = 0  # bytes
        self.matched = 0  # leading keys
        self.started = time.perf_counter()
        self.deadline = deadline  # on the monotonic clock
        self.fence = Fence()
        self.work: Callable[[], None] | None = None
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # rows stay reserved until the end, so nobody can cancel
        self._answer = answer

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def over(self) -> bool:
        return self.future.done() or time.monotonic() >= self.deadline

    def complete(self) -> None:
        """The watchdog and the worker both come here; the first one answers."""
        if self.fence.close():
            self.work = None
            self.future.set_result(self._answer(self))

    def fail(self, defect: BaseException) -> None:
        if self.fence.close():
            self.work = None
            self.future.set_exception(defect)


class BatchedConnector(Connector):
    """Runs blocking hooks on `?threads=` workers (default 2), each operation within `?timeout=` seconds (default 5), and
    longer only for as many bytes as a slow store needs longer for.

    Blocks pass through the codec that `?codec=` names (default none) on their way to the hooks and back.

    Attributes:
        faults: exceptions by which the hooks say that the store does not answer. They become UNAVAILABLE. Every other
            exception is a defect, and raised by the future.
        memory, codec, namespace, seal: set by `attach`, before `open`.
        codec_name: what `?codec=` says.
        payload_lengths: set by `attach`; the bytes that a payload may have behind its header, as a range.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, url: str) -> None:
        query = Query(url)
        self.url = url
        self.timeout = query.seconds("timeout", 5.0)
        self.threads = query.count("threads", 2)
        self.codec_name = query.choice("codec", list(CODECS), "none")
        if self.in_place and self.codec_name != "none":
            raise SetupError(f"{self.scheme}:// reads pools in place, where blocks have no codec; leave codec= out.")
        self.configure(query)
        query.done()
        self._queue: queue.SimpleQueue[_Operation[Any] | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._watchdog = _Watchdog(self.scheme)
        self._lock = threading.Lock()
        self._stats = Stats()
        self._complaints = Complaints(self.scheme)
        self._closed = False
        self._pending = 0  # blocks of operations that are not over

    # Hooks. All but `configure`, `open` and `shut` run on a worker.

    def configure(self, query: Query) -> None:
        """Reads the URL's parameters."""

    def open(self) -> None:
        """Reaches the store. Raises `SetupError` where that cannot be."""

    def shut(self) -> None:
        """Lets go of the store. No other hook is running."""

    @abstractmethod
    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        """Stores blocks, and marks each. For a block that the store has already, renewing its lease is enough."""

    @abstractmethod
    def get_many(self, blocks: Sequence[Incoming]) -> None:
        """Hands each block what the store has for it (`accept`), or marks it missing."""

    @abstractmethod
    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        """For each key whether a load would find it now. Not asked for more after the first False."""

    @abstractmethod
    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Removes values that turned out to be corrupt, so that a later store can put them right."""

    def release_many(self, keys: Sequence[bytes]) -> None:
        """Ends leases early. Nothing to do for stores that know none."""

    # The contract.

    def attach(self, memory: PoolMemory) -> None:
        if memory.rows.ndim != 2 or memory.rows.shape[1] != memory.layout.block_bytes:
            raise ValueError(f"pool rows {memory.rows.shape} do not hold {memory.layout.block_bytes} bytes each")
        self.memory = memory
        self.codec = CODECS[self.codec_name](memory.layout)
        self.namespace, self.payload_lengths = self.codec.namespace, self.codec.lengths
        self.seal = Seal(memory.layout, self.namespace, self.payload_lengths)
        self.open()
        if self.codec.lossy:
            log.warning(
                "%s: KV is stored with the lossy codec %s: output can differ from what it would be without",
                self.scheme,
                self.codec.name,
            )
        self._watchdog.start()
        for i in range(self.threads):
            worker = threading.Thread(target=self._serve, name=f"kv-{self.scheme}-{i}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.memory.check(keys, block_ids)
        operation = _Operation("store", len(keys), self._deadline(len(keys)), self._finish_transfer)
        pairs = list(zip(keys, block_ids, strict=True))
        lease_s = min(lease_s, MAX_LEASE_S)
        return self._submit(operation, lambda: self.put_many(self._blocks(Outgoing, operation, pairs), lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self.memory.check(keys, block_ids)
        operation = _Operation("load", len(keys), self._deadline(len(keys)), self._finish_transfer)
        pairs = list(zip(keys, block_ids, strict=True))
        return self._submit(operation, lambda: self._get_and_heal(operation, self._blocks(Incoming, operation, pairs)))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        operation: _Operation[int] = _Operation("match", 0, self._deadline(0), lambda done: done.matched)
        wanted = list(keys)
        return self._submit(operation, lambda: self._count_leading(operation, wanted))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        operation: _Operation[None] = _Operation("release", 0, self._deadline(0), lambda _: None)
        wanted = list(keys)
        self._submit(operation, lambda: self.release_many(wanted))

    def stats(self) -> Stats:
        with self._lock:
            return self._stats.plus(Stats())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for _ in self._workers:
            self._queue.put(None)
        give_up = self._deadline(1) if self._workers else 0.0  # what is under way has until then
        for worker in self._workers:
            worker.join(max(0.0, give_up - time.monotonic()))
        self._watchdog.stop()
        if not self._workers:
            return  # never attached
        if any(worker.is_alive() for worker in self._workers):
            # Taking the store away under a thread that hangs in it would end in a crash; the process's end frees it.
            log.warning("%s: closed while the store still does not answer", self.scheme)
        else:
            self.shut()

    # How it runs.

    def _submit(self, operation: _Operation[T], work: Callable[[], None]) -> Future[T]:
        if self._closed or not self._workers:
            raise RuntimeError(f"{self.scheme}: not attached" if not self._closed else f"{self.scheme}: closed")
        if self._queue.qsize() >= MAX_PENDING:
            self._complaints.add("too many operations are waiting for the store")
            operation.complete()
            return operation.future
        operation.work = work
        blocks = len(operation.outcomes)
        self._count_pending(blocks)
        operation.future.add_done_callback(lambda _: self._count_pending(-blocks))
        self._watchdog.watch(operation)
        self._queue.put(operation)
        return operation.future

    def _deadline(self, blocks: int) -> float:
        """For an operation that moves so many blocks, and waits for those before it to be moved."""
        seconds = self.timeout
        if blocks:
            seconds += (self._pending + blocks) * self.memory.layout.block_bytes / SLOWEST_BYTES_PER_S
        return time.monotonic() + seconds

    def _count_pending(self, blocks: int) -> None:
        with self._lock:
            self._pending += blocks

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            work = operation.work
            if work is not None and not operation.over:
                self._run(operation, work)
            operation.complete()

    def _run(self, operation: _Operation[Any], work: Callable[[], None]) -> None:
        try:
            work()
        except Expired:
            return  # the watchdog has answered
        except self.faults as fault:
            self._complaints.add(f"{operation.kind} failed: {type(fault).__name__}: {fault}", kind=type(fault).__name__)
        except Exception as defect:  # noqa: BLE001 - a defect of the program belongs to the caller, not to this thread
            operation.fail(defect)

    def _blocks(self, kind: type[B], operation: "_Operation[Any]", pairs: Sequence[tuple[bytes, int]]) -> list[B]:
        rows, seal, codec = self.memory.rows, self.seal, self.codec
        return [kind(operation, i, key, rows[row], seal, codec) for i, (key, row) in enumerate(pairs)]

    def _get_and_heal(self, operation: _Operation[Result], blocks: Sequence[Incoming]) -> None:
        self.get_many(blocks)
        corrupt = [b.key for b, o in zip(blocks, operation.outcomes, strict=True) if o is Outcome.CORRUPT]
        if corrupt:
            self._complaints.add(f"{len(corrupt)} blocks were corrupt and are removed from the store", kind="corrupt")
            self.delete_many(corrupt)

    def _count_leading(self, operation: _Operation[int], keys: Sequence[bytes]) -> None:
        for found in self.contains_many(keys):
            if not found:
                break
            operation.matched += 1

    def _finish_transfer(self, operation: _Operation[Result]) -> Result:
        result = Result(list(operation.outcomes), operation.seconds)
        with self._lock:
            self._stats.bytes[operation.kind] += operation.moved
            self._stats.count(operation.kind, result)
        return result


class ThreadedConnector(BatchedConnector):
    """A connector over a plain key-value transport: derive, write `put`, `get`, `contains` and `delete`, done.

    Names are text: 32 hex digits of namespace, a slash, 32 hex digits of key. Values are one header and one payload (which
    a codec may make shorter than a block), to be given back as one run of bytes. All four may block; they raise one of
    `faults` when the store does not answer. Set a time-out on the transport itself that is below `self.timeout`, so that a
    worker comes back.
    """

    @abstractmethod
    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        """Stores a value so that it is either there as a whole or not at all. Raises `Full` if there is no room."""

    def renew(self, name: str, lease_s: float) -> bool:
        """Prolongs the lease of a value that is there. False, as by default, makes the caller put it again."""
        return False

    @abstractmethod
    def get(self, name: str) -> Buffer | None:
        """The value, or None. It is copied into the pool once, straight from the buffer returned here."""

    @abstractmethod
    def contains(self, name: str) -> bool: ...

    @abstractmethod
    def delete(self, name: str) -> None:
        """No error if there is none."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            name = self._name(block.key)
            if self.renew(name, lease_s):
                block.present()
                continue
            try:
                self.put(name, *block.read(), lease_s)
                block.stored()
            except Full:
                block.failed(Outcome.FULL)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            value = self.get(self._name(block.key))
            if value is None:
                block.missing()
            else:
                whole = memoryview(value)
                block.accept(bytes(whole[:HEADER_BYTES]), whole[HEADER_BYTES:])

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return (self.contains(self._name(key)) for key in keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.delete(self._name(key))

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}/{key.hex()}"


class _Watchdog:
    """Completes operations at their deadlines."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._watch, name=f"kv-{name}-watchdog", daemon=True)
        self._changed = threading.Condition()
        self._operations: list[tuple[float, int, _Operation[Any]]] = []  # a heap: the earliest deadline first
        self._serial = count()
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def watch(self, operation: _Operation[Any]) -> None:
        with self._changed:
            heappush(self._operations, (operation.deadline, next(self._serial), operation))
            if self._operations[0][2] is operation:
                self._changed.notify()

    def stop(self) -> None:
        """Completes what is left, whether its deadline has come or not."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while (operation := self._next()) is not None:
            operation.complete()

    def _next(self) -> _Operation[Any] | None:
        with self._changed:
            while True:
                while self._operations and self._operations[0][2].future.done():
                    heappop(self._operations)
                if not self._operations and self._stopped:
                    return None
                wait = self._operations[0][0] - time.monotonic() if self._operations else None
                if self._stopped or (wait is not None and wait <= 0):
                    return heappop(self._operations)[2]
                self._changed.wait(wait)


class Complaints:
    """Logs each kind of trouble at once, then once a minute with a count: a dead store must not fill the disk."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def add(self, text: str, kind: str | None = None) -> None:
        kind = kind or text
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -_COMPLAIN_EVERY_S) < _COMPLAIN_EVERY_S:
                self._silent[kind] = self._silent.get(kind, 0) + 1
                return
            self._last[kind] = now
            silent = self._silent.pop(kind, 0)
        log.warning("%s: %s%s", self._name, text, f" ({silent} more since the last report)" if silent else "")
