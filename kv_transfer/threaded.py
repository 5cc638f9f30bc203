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
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, TypeVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Block, Incoming, Outgoing
from pdserve.kv_transfer.codec import CODECS
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.fence import Expired
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer, Seal
from pdserve.kv_transfer.operation import Operation, Watchdog
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog
from pdserve.kv_transfer.url import Query

log = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 64 << 20  # a store that is slower than this does not answer in time
MAX_PENDING = 4096  # operations; more than this means a store that does not keep up at all
SWITCH_INTERVAL_S = 0.0005  # the interpreter's, where workers run: the default of 5 ms is as long as 30 MiB take
FOLLOW_S = 0.0002  # between two looks for a block that is being stored
MAX_LEASE_S = 86_400.0  # a mistaken lease must not pin a block for ever

B = TypeVar("B", bound=Block)
T = TypeVar("T")


class Full(Exception):
    """Raised by `put`: no room for this value."""


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
        self._queue: queue.SimpleQueue[Operation[Any] | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._watchdog = Watchdog(self.scheme)
        self._lock = threading.Lock()
        self._stats = Stats()
        self._complaints = RateLimitedLog(self.scheme)
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
        lease_s = min(lease_s, MAX_LEASE_S)
        operation = self._transfer("store", keys, block_ids)
        blocks = partial(self._blocks, Outgoing, operation, list(zip(keys, block_ids, strict=True)))
        return self._submit(operation, lambda: self.put_many(blocks(), lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        operation = self._transfer("load", keys, block_ids)
        blocks = partial(self._blocks, Incoming, operation, list(zip(keys, block_ids, strict=True)))
        return self._submit(operation, lambda: self._get_and_heal(blocks()))

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        operation = self._transfer("load", keys, block_ids, {Outcome.MISSING})
        blocks = partial(self._blocks, Incoming, operation, list(zip(keys, block_ids, strict=True)))
        return self._submit(operation, lambda: self._get_coming(operation, blocks(), patience_s))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        operation: Operation[int] = Operation("match", 0, self._deadline(0), lambda done: done.matched)
        wanted = list(keys)
        return self._submit(operation, lambda: self._count_leading(operation, wanted))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[None] = Operation("release", 0, self._deadline(0), lambda _: None)
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

    def _submit(self, operation: Operation[T], work: Callable[[], None]) -> Future[T]:
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

    def _run(self, operation: Operation[Any], work: Callable[[], None]) -> None:
        try:
            work()
        except Expired:
            return  # the watchdog has answered
        except self.faults as fault:
            self._complaints.add(f"{operation.kind} failed: {type(fault).__name__}: {fault}", kind=type(fault).__name__)
        except Exception as defect:  # noqa: BLE001 - a defect of the program belongs to the caller, not to this thread
            operation.fail(defect)

    def _blocks(self, kind: type[B], operation: "Operation[Any]", pairs: Sequence[tuple[bytes, int]]) -> list[B]:
        rows, seal, codec = self.memory.rows, self.seal, self.codec
        return [kind(operation, i, key, rows[row], seal, codec) for i, (key, row) in enumerate(pairs)]

    def _get_coming(self, operation: Operation[Result], blocks: Sequence[Incoming], patience_s: float) -> None:
        """Loads blocks as they come, until one keeps us waiting for too long."""
        give_up = time.monotonic() + patience_s
        while blocks:
            there = sum(1 for _ in takewhile(bool, self.contains_many([block.key for block in blocks])))
            if there:
                self._get_and_heal(blocks[:there])
                blocks, give_up = blocks[there:], time.monotonic() + patience_s
            elif operation.over or time.monotonic() >= give_up:
                break
            else:
                time.sleep(FOLLOW_S)
        for block in blocks:
            block.missing()

    def _get_and_heal(self, blocks: Sequence[Incoming]) -> None:
        self.get_many(blocks)
        corrupt = [block.key for block in blocks if block.outcome is Outcome.CORRUPT]
        if corrupt:
            self._complaints.add(f"{len(corrupt)} blocks were corrupt and are removed from the store", kind="corrupt")
            self.delete_many(corrupt)

    def _count_leading(self, operation: Operation[int], keys: Sequence[bytes]) -> None:
        for found in self.contains_many(keys):
            if not found:
                break
            operation.matched += 1

    def _transfer(
        self, kind: str, keys: Sequence[bytes], block_ids: Sequence[int], expected: Set[Outcome] = frozenset()
    ) -> Operation[Result]:
        """A store or load; `expected` outcomes are no failures."""
        self.memory.check(keys, block_ids)
        return Operation(kind, len(keys), self._deadline(len(keys)), lambda done: self._finish_transfer(done, expected))

    def _finish_transfer(self, operation: Operation[Result], expected: Set[Outcome] = frozenset()) -> Result:
        result = Result(list(operation.outcomes), operation.seconds)
        counted = replace(result, outcomes=[outcome for outcome in result.outcomes if outcome not in expected])
        with self._lock:
            self._stats.bytes[operation.kind] += operation.moved
            self._stats.count(operation.kind, counted)
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
                block.accept(bytes(whole[:HEADER_BYTES]), [whole[HEADER_BYTES:]])

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return (self.contains(self._name(key)) for key in keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.delete(self._name(key))

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}/{key.hex()}"
