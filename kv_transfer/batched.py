"""Base class for connectors with blocking transports: threads, deadlines, headers, checksums and counters.

    Connector
    └── BatchedConnector     blocking hooks over whole batches: put_many, get_many, contains_many, …
        └── ThreadedConnector    blocking hooks over one value, see `threaded.py`

`BatchedConnector` is for transports that benefit from batches or place bytes themselves: `connectors/shm/connector.py`,
`connectors/file.py`, `connectors/redis/connector.py`.

Each operation runs on one of a few worker threads. Its deadline is the timeout plus the time that its blocks, and those of
the operations before it, take at `MIN_BYTES_PER_S`. If it has not finished by its deadline, a watchdog completes its future:
the blocks done so far are OK, the others UNAVAILABLE. The worker may still hang in a dead store at that moment. Rows are
therefore accessed only inside the operation's fence, and the watchdog closes the fence before it completes the future: a
late worker finds the fence closed and leaves rows alone that may belong to another sequence.
"""

import logging
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, ClassVar, TypeVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import GOES_ON, Block, Expired, GrowingOperation, Incoming, Operation, Outgoing
from pdserve.kv_transfer.breaker import StoreBreaker
from pdserve.kv_transfer.cancellation import run_until
from pdserve.kv_transfer.codec import CODECS, Codec, Undecodable
from pdserve.kv_transfer.connector import (
    DEFAULT_TIMEOUT_S,
    PROBE_KEY,
    Capabilities,
    Connector,
    Outcome,
    PoolMemory,
    Result,
    Stats,
)
from pdserve.kv_transfer.header import Buffer, HeaderFormat, Row, is_intact
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog
from pdserve.kv_transfer.url import Query

log = logging.getLogger(__name__)

MIN_BYTES_PER_S = 64 << 20  # a slower store counts as unavailable
MAX_QUEUED_OPERATIONS = 4096  # further operations fail at once: the store does not keep up
# For sys.setswitchinterval in processes with workers: in the default of 5 ms, a worker could copy 30 MiB.
SWITCH_INTERVAL_S = 0.0005
FOLLOW_POLL_S = 0.0002  # between two polls for a block that is being stored
MAX_LEASE_S = 3600.0  # an erroneously long lease must not pin a block forever

_BASE_MODULES = (__name__, "pdserve.kv_transfer.threaded")
# Attributes of the base class that a subclass must not replace.
_OWN_ATTRIBUTES = (
    "_queue",
    "_workers",
    "_watchdog",
    "_lock",
    "_stats",
    "_limited_log",
    "_closed",
    "_pending_blocks",
)

B = TypeVar("B", bound=Block)
T = TypeVar("T")


def _shadows(connector: type, name: str) -> TypeError:
    return TypeError(
        f"{connector.__name__}.{name} replaces a private name of the connector base classes; give it another name"
    )


class BatchedConnector(Connector):
    """Runs blocking batch hooks on worker threads, with deadlines, headers, checksums and counters.

    URL parameters: `?threads=` workers (default 2); `?timeout=` seconds per operation (default 5), extended for large
    transfers; `?codec=` applied to blocks on their way to the hooks and back (default none).

    Attributes:
        faults: exceptions that mean "the store does not respond" when a hook raises them. They become UNAVAILABLE. Any
            other exception is a programming error, and is raised by the future.
        memory, codec, namespace, header_format: set by `attach`, before `open`.
        codec_name: the value of `?codec=`.
        payload_lengths: the possible payload lengths in bytes, without the header, as a range. Set by `attach`.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises `TypeError` for a name that the base classes use for themselves, which would break them silently."""
        super().__init_subclass__(**kwargs)
        if cls.__module__ not in _BASE_MODULES:
            owned = {name for base in cls.__mro__ if base.__module__ in _BASE_MODULES for name in vars(base)}
            for name in (owned | set(_OWN_ATTRIBUTES)) & set(vars(cls)):
                if name.startswith("_") and not name.endswith("__"):
                    raise _shadows(cls, name)

    def __init__(self, url: str) -> None:
        query = Query(url)
        self.url = url
        self.timeout = query.seconds("timeout", DEFAULT_TIMEOUT_S)
        self.threads = query.count("threads", 2)
        self.codec_name = query.choice("codec", list(CODECS), "none")
        self._queue: queue.SimpleQueue[Operation[Any] | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._watchdog = _Watchdog(self.scheme)
        self._lock = threading.Lock()
        self._stats = Stats()
        self._limited_log = RateLimitedLog(self.scheme)
        self._closed = False
        self._pending_blocks = 0  # of operations in flight
        self.__is_open = False  # `open` has returned, and `shut` has not been called
        self.__breaker: StoreBreaker | None = None
        self.__probe: Operation[int] | None = None
        self.__growing: set[GrowingOperation] = set()
        self.__own = [getattr(self, name) for name in _OWN_ATTRIBUTES]
        self.configure(query)
        if self.in_place and self.codec_name != "none":  # asked for here, since capabilities may depend on parameters
            raise SetupError(
                f"{self.scheme}:// reads pools in place and supports no codec; remove codec= from the URL."
            )
        query.done()

    # Hooks. All except `configure`, `open` and `shut` run on worker threads.

    def configure(self, query: Query) -> None:
        """Read the connector's own URL parameters."""

    def open(self) -> None:
        """Connect to the store. Raises `SetupError` if that fails."""

    def shut(self) -> None:
        """Disconnect from the store. No other hook is running. `close` waits for it only until its deadline."""

    @abstractmethod
    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        """Store blocks, and mark each. For a block already in the store, renewing its lease is enough."""

    def put_growing(self, blocks: Sequence[Outgoing], lease_s: float) -> Generator[None, int, None]:
        """Like `put_many`, with the capability `stores_growing`: each `yield` returns how many bytes of each block are final.

        When that is all bytes, the blocks are marked. May run in several threads, one after the other.
        """
        raise NotImplementedError
        yield

    @abstractmethod
    def get_many(self, blocks: Sequence[Incoming]) -> None:
        """Pass each block its stored value (`accept`), or mark it missing."""

    def read_ahead(self, blocks: Sequence[Incoming]) -> bool:
        """Read more of blocks that others are still storing (`read_front`). Returns False if there is no more."""
        return False

    @abstractmethod
    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        """Yield for each key whether a load would find it now. Not consumed beyond the first False."""

    @abstractmethod
    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete values that turned out to be corrupt, so that a later store can replace them."""

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        """Delete the values that `get_many` found corrupt. By default by key.

        Another connector may have stored a block again since. A transport that can tell leaves that one alone.
        """
        self.delete_many([block.key for block in blocks])

    def release_many(self, keys: Sequence[bytes]) -> None:
        """End leases early. Does nothing by default, for stores without leases."""

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        """Let leases end in `lease_s` seconds at the earliest, with the capability `prolongs`."""
        raise NotImplementedError

    @property
    def last_warning(self) -> str:
        """The latest fault, or other warning; empty before the first."""
        return self._limited_log.last

    def is_sound(self, key: bytes, header: bytes, payload: Buffer | Row) -> bool:
        """Return True if a load would accept this stored value."""
        if not (self.header_format.matches(header, key) and is_intact(header, payload)):
            return False
        try:
            if not self.codec.is_identity:
                self.codec.decode(bytearray(payload))
        except Undecodable:
            return False
        return True

    # The connector contract.

    @property
    def capabilities(self) -> Capabilities:
        """The timeout and codec of the URL, and cancellation. Subclasses replace what differs."""
        return Capabilities(timeout_s=self.timeout, codec=self.codec_name, cancels=True)

    def attach(self, memory: PoolMemory) -> None:
        if memory.rows.ndim != 2 or memory.rows.shape[1] != memory.layout.block_bytes:
            raise ValueError(
                f"pool rows of shape {memory.rows.shape} do not match blocks of {memory.layout.block_bytes} bytes"
            )
        self.memory = memory
        self.codec = CODECS[self.codec_name](memory.layout)
        self.namespace, self.payload_lengths = self.codec.namespace, self.codec.payload_lengths
        self.header_format = HeaderFormat(memory.layout, self.namespace, self.payload_lengths)
        self.open()
        self.__is_open = True
        for name, value in zip(_OWN_ATTRIBUTES, self.__own, strict=True):
            if getattr(self, name) is not value:
                raise _shadows(type(self), name)
        if self.has_started_out:
            log.warning("%s: the store does not answer; this instance starts without it, until it does", self.scheme)
        if self.codec.lossy:
            log.warning(
                "%s: KV is stored with the lossy codec %s; output can differ from output without it",
                self.scheme,
                self.codec.name,
            )
        self._watchdog.start()
        for i in range(self.threads):
            worker = threading.Thread(target=self._run_worker, name=f"kv-{self.scheme}-{i}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        operation = self.__new_transfer("store", keys, block_ids)
        return self._submit(operation, partial(self.__store, operation, min(lease_s, MAX_LEASE_S)))

    def store_growing(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> GrowingOperation:
        operation = GrowingOperation(self.__enqueue, keys, block_ids, math.inf, self._finish_transfer)
        self.memory.check(keys, block_ids)
        operation.growth = self.put_growing(self._blocks(Outgoing, operation), min(lease_s, MAX_LEASE_S))
        next(operation.growth)  # up to the first bytes
        if self._admits(operation):
            operation.work = operation.grow
            self.__growing.add(operation)
        return operation

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        expected = set(Outcome) if list(keys) == [PROBE_KEY] else set[Outcome]()
        operation = self.__new_transfer("load", keys, block_ids, expected)
        return self._submit(operation, partial(self.__load, operation))

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        operation = self.__new_transfer("load", keys, block_ids, {Outcome.MISSING})
        return self._submit(operation, partial(self.__follow, operation, patience_s))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        operation: Operation[int] = Operation("match", keys, [], self._deadline(0))
        return self._submit(operation, partial(self.__count_leading, operation, operation.keys))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[int] = Operation("release", keys, [], self._deadline(0))
        self._submit(operation, partial(self.release_many, operation.keys))

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[int] = Operation("prolong", keys, [], self._deadline(0))
        self._submit(operation, partial(self.prolong_many, operation.keys, min(lease_s, MAX_LEASE_S)))

    def stats(self) -> Stats:
        with self._lock:
            now, is_out = self._stats, self.__breaker is not None and self.__breaker.is_out
            return Stats(dict(now.bytes), dict(now.blocks), dict(now.seconds), dict(now.failures), is_out=is_out)

    def skip_while_hanging(self) -> None:
        """Let operations fail at once while the store hangs, as `GuardedConnector` does. Called after `attach`."""
        self.__breaker = StoreBreaker(self.capabilities.timeout_s)
        if self.has_started_out:
            self.__breaker.start_out()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for operation in [*self.__growing]:
            operation.request_cancel()  # what it waits for will not come
        for _ in self._workers:
            self._queue.put(None)
        deadline = self._deadline(1) if self.__is_open else 0.0  # for operations in flight
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._watchdog.stop()
        if not self.__is_open:
            return  # never attached
        if any(worker.is_alive() for worker in self._workers):
            # Disconnecting under a thread that hangs in the store would crash; it is freed when the process ends.
            log.warning("%s: closed while the store still does not respond", self.scheme)
        elif not run_until(deadline, self.shut, f"kv-{self.scheme}-shut"):
            log.warning("%s: closed while background work still waits for the store", self.scheme)

    # Execution.

    def _submit(self, operation: Operation[T], work: Callable[[], object]) -> Future[T]:
        if self._admits(operation):
            operation.work = work
            self._watchdog.watch(operation)
            self._queue.put(operation)
        return operation

    def _admits(self, operation: Operation[Any]) -> bool:
        """Return whether the operation can run. If not, it is complete."""
        if operation is not self.__probe:
            if self._closed or not self._workers:
                raise RuntimeError(f"{self.scheme}: not attached" if not self._closed else f"{self.scheme}: closed")
            if self.__breaker is not None and self.__breaker.is_open:
                operation.complete()
                return False
        with self._lock:
            self._pending_blocks += len(operation.outcomes)
        operation.on_end = self.__on_end
        if self._queue.qsize() >= MAX_QUEUED_OPERATIONS:
            self._limited_log.warning("too many operations are queued; further ones fail until the store catches up")
            operation.complete()
            return False
        return True

    def __enqueue(self, operation: GrowingOperation) -> None:
        """Let a worker copy what is final. The time in which an operation waits for more does not count."""
        operation.deadline = self._deadline(len(operation.outcomes))
        self._watchdog.watch(operation)
        self._queue.put(operation)

    def _deadline(self, blocks: int) -> float:
        """Return the deadline of an operation on `blocks` blocks that runs after all pending ones, monotonic."""
        seconds = self.timeout
        if blocks:
            seconds += (self._pending_blocks + blocks) * self.memory.layout.block_bytes / MIN_BYTES_PER_S
        return time.monotonic() + seconds

    def _run_worker(self) -> None:
        while (operation := self._queue.get()) is not None:
            work = operation.work  # None if it is complete
            is_due = not operation.fence.cancelled and time.monotonic() < operation.deadline
            if work is not None and is_due and self._run(operation, work) is GOES_ON:
                continue
            if isinstance(operation, GrowingOperation):
                self._run(operation, operation.growth.close)
            operation.complete()

    def _run(self, operation: Operation[Any], work: Callable[[], object]) -> object:
        """Return what `work` returns; None if it ends by an exception."""
        try:
            return work()
        except Expired:
            pass  # the watchdog has completed the future
        except self.faults as fault:
            self._limited_log.warning(
                f"{operation.kind} failed: {type(fault).__name__}: {fault}", kind=type(fault).__name__
            )
        except Exception as error:  # noqa: BLE001 - a programming error is raised to the caller, not in this thread
            operation.complete(error)
        return None

    def __new_transfer(
        self, kind: str, keys: Sequence[bytes], block_ids: Sequence[int], expected: Set[Outcome] = frozenset()
    ) -> Operation[Result]:
        operation = Operation(kind, keys, block_ids, self._deadline(len(keys)), self._finish_transfer, expected)
        self.memory.check(keys, block_ids)
        return operation

    def _blocks(self, kind: type[B], operation: Operation[Any], codec: Codec | None = None) -> list[B]:
        rows, header_format, codec, blocks = self.memory.rows, self.header_format, codec or self.codec, list[B]()
        for i, (key, row) in enumerate(zip(operation.keys, operation.block_ids, strict=True)):
            blocks.append(kind(operation, i, key, rows[row], header_format, codec))
        return blocks

    def __store(self, operation: Operation[Result], lease_s: float) -> None:
        if self.codec.is_identity:
            self.put_many(self._blocks(Outgoing, operation), lease_s)
            return
        codec, started = self.codec.choose(len(operation.block_ids)), time.perf_counter()
        self.put_many(self._blocks(Outgoing, operation, codec), lease_s)
        if operation.num_stored == len(operation.block_ids):
            self.codec.record(codec, operation.num_stored, time.perf_counter() - started)

    def __load(self, operation: Operation[Result]) -> None:
        self.get_many(blocks := self._blocks(Incoming, operation))
        if Outcome.CORRUPT in operation.outcomes:
            self.__delete_corrupt(blocks)

    def __follow(
        self, operation: Operation[Result], patience_s: float, blocks: Sequence[Incoming] = (), give_up_at: float = 0.0
    ) -> object:
        """Load blocks as they become visible, until the next one has not come for `patience_s` seconds.

        Where there is nothing to do, other operations have their turn.
        """
        blocks = blocks or self._blocks(Incoming, operation)
        give_up_at = give_up_at or time.monotonic() + patience_s
        while blocks:
            visible = self.__count_leading(operation, operation.keys[-len(blocks) :])
            if visible:
                self.get_many(blocks[:visible])
                if Outcome.CORRUPT in operation.outcomes:
                    self.__delete_corrupt(blocks[:visible])
                blocks, give_up_at = blocks[visible:], time.monotonic() + patience_s
            elif self.read_ahead(blocks):
                give_up_at = time.monotonic() + patience_s
            elif operation.is_over or time.monotonic() >= give_up_at:
                break
            else:
                time.sleep(FOLLOW_POLL_S)
                if not self._queue.empty():
                    operation.work = partial(self.__follow, operation, patience_s, blocks, give_up_at)
                    self._queue.put(operation)
                    return GOES_ON
        for block in blocks:
            block.missing()
        return None

    def __delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        corrupt = [block for block in blocks if block.outcome is Outcome.CORRUPT]
        if corrupt:
            self._limited_log.warning(
                f"{len(corrupt)} blocks were corrupt and are deleted from the store", kind="corrupt"
            )
            self.delete_corrupt(corrupt)

    def __count_leading(self, operation: Operation[Any], keys: Sequence[bytes]) -> int:
        """Count the leading keys that are there; so far in `operation.matched`, should the store stop to answer."""
        operation.matched = 0
        for found in self.contains_many(keys):
            if not found:
                break
            operation.matched += 1
        return operation.matched

    def _finish_transfer(self, operation: Operation[Result]) -> Result:
        was_skipped = operation.on_end is None
        seconds = 0.0 if was_skipped else time.perf_counter() - operation.started
        result = Result(list(operation.outcomes), seconds)
        with self._lock:
            self._stats.bytes[operation.kind] += operation.bytes_moved
            self._stats.count(operation.kind, result, operation.expected)
        return result

    # The circuit breaker. An operation tells it of its end before the caller learns of that.

    def __on_end(self, operation: Operation[Any], result: Any) -> None:
        if isinstance(operation, GrowingOperation):
            self.__growing.discard(operation)
        breaker, probe, was_open, is_open = self.__breaker, None, False, False
        with self._lock:
            self._pending_blocks -= len(operation.outcomes)
            if breaker is not None and operation.kind not in ("release", "prolong"):
                was_open, seconds, now = breaker.is_open, time.perf_counter() - operation.started, time.monotonic()
                if result is None:  # a programming error, which the caller gets, and no time-out
                    breaker.record(True, seconds, now)
                elif operation.kind == "match":
                    breaker.record_match(result, seconds, now)
                else:
                    breaker.record_transfer(result, seconds, now)
                is_open = breaker.is_open
                if operation is self.__probe:
                    self.__probe = None
                if is_open and self.__probe is None and not self._closed:
                    probe = self.__probe = Operation("match", [PROBE_KEY], [], self._deadline(0))
        if is_open and not was_open:
            self._limited_log.warning("does not answer; requests go on without the store until it does", kind="out")
        elif was_open and not is_open:
            self._limited_log.warning("answers again", kind="back")
        if probe is not None:
            self._submit(probe, partial(self.__count_leading, probe, probe.keys))


class _Watchdog:
    """Thread that completes operations at their deadlines."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}-watchdog", daemon=True)
        self._changed = threading.Condition()
        self._operations: list[tuple[float, int, Operation[Any]]] = []  # a heap: the earliest deadline first
        self._serial = count()
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def watch(self, operation: Operation[Any]) -> None:
        with self._changed:
            heappush(self._operations, (operation.deadline, next(self._serial), operation))
            if self._operations[0][2] is operation:
                self._changed.notify()

    def stop(self) -> None:
        """Complete all remaining operations, due or not, and stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (operation := self._next_due()) is not None:
            if self._stopped or operation.deadline <= time.monotonic():  # a growing one may wait for its next turn
                operation.complete(waits=False)
                if not operation.done():  # its copy is in progress, perhaps to a peer that hangs
                    threading.Thread(target=operation.complete, name=f"{self._thread.name}-late", daemon=True).start()

    def _next_due(self) -> Operation[Any] | None:
        """Wait for the next operation past its deadline. None: stopped, and no operations remain."""
        with self._changed:
            while True:
                while self._operations and self._operations[0][2].done():
                    heappop(self._operations)
                if not self._operations and self._stopped:
                    return None
                wait = self._operations[0][0] - time.monotonic() if self._operations else None
                if self._stopped or (wait is not None and wait <= 0):
                    return heappop(self._operations)[2]
                self._changed.wait(wait)
