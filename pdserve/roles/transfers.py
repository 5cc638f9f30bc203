"""Transfers of KV: the queue of stores and loads, and loading the prefix of a prompt that the KV store already has.

The queue limits the blocks in flight, so that a slow store cannot occupy the whole pool.

Each transfer holds its blocks until it ends, even if its request ends first. Transfers over the limit wait in order of
arrival. While stores wait, prefill pauses sequences that would have to be stored.

No transfer waits for ever, because every connector operation ends by its deadline. After an operation that the store did
not answer, queued transfers fail immediately for as long as that operation took, instead of running into the same timeout.

A prefix is loaded before its sequence is queued in the engine:

    fetch ─► match: the store's number of leading blocks ─► load the blocks that the pool lacks, if that is cheaper than
             computing them ─► queue the sequence in the engine, which computes the rest
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from pdserve.engine.engine import Engine
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.kv_transfer.connector import PROBE_KEY, Connector, Outcome, Result, first_failure, request_cancel
from pdserve.roles.break_even import BreakEven, Reason
from pdserve.roles.job import GroupedResult, InstanceContext, Job

T = TypeVar("T")
OnDone = Callable[[Result], None]
Tails = Sequence[
    tuple[int, int]
]  # blocks of further groups: the place in the transfer of the block that it goes with, and id
SPLIT_PARTS = 4  # into which blocks that become ready together are split
MIN_PART_BYTES = 8 << 20  # so that the overhead of a part's messages is small beside its bytes
STORE_RANGES = 8  # of layers, after which a store goes on while the model computes the others
MIN_RANGE_BYTES = 128 << 10  # of a block
FOLLOW_PATIENCE_S = 0.25  # wait of a following load for each next block


def when_done(context: InstanceContext, future: Future[T], callback: Callable[[T], None]) -> None:
    """Call `callback(result)` on the engine thread once the future is done."""
    future.add_done_callback(lambda done: context.post(lambda: callback(done.result())))


class Source(Protocol):
    """Source of a load: the instance's connector, or a converter in its place."""

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()
    ) -> Future[Result]: ...

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None: ...


class StoreListener(Protocol):
    """Is told what the KV store turns out to have."""

    def on_stored(self, seq: EngineSequence, first: int, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """A store of a sequence's blocks from index `first` on has ended."""

    def on_missing(self, keys: Iterable[bytes]) -> None:
        """Blocks were not in the store."""


@dataclass(eq=False)
class _Transfer:
    """One store or load.

    Attributes:
        num_moved: blocks that the connector moves: none for a store that peers read in place.
        start: starts the connector operation.
        on_done: receives the result on the engine thread.
        is_needed: a request waits for it, so it is cancelled with its job. False for stores without a lease.
        queued_at: on the context's clock.
        queue_seconds: time between queueing and start.
        future: of the operation, once it has started.
    """

    job: Job
    blocks: list[int]
    num_moved: int
    is_store: bool
    start: Callable[[], Future[Result]]
    on_done: OnDone
    is_needed: bool
    queued_at: float
    queue_seconds: float = 0.0
    future: Future[Result] | None = None


class Transfers:
    """Queue between an instance's pool and its connector. Runs on the engine thread.

    Args:
        max_blocks: limit of the blocks in flight.
        sizes: bytes of a block of each group of the pool.

    Attributes:
        max_transfer_blocks: recommended limit of one transfer, so that others can interleave.
        in_flight: blocks that the connector is moving.
        waiting: blocks of queued transfers.
        has_waiting_stores: some of these are stores.
        ranges: number of ranges of layers by which blocks are stored while they are computed; less than 2: as a whole.
        follows: loads can start while the blocks are still being stored.
        in_place: peers read the pool's rows directly, with a ticket.
        listener: None: none is told what the store has.
        num_holding: transfers that hold blocks. A transfer that peers read in place may outlive its request.
    """

    def __init__(
        self, pool: BlockPool, connector: Connector, context: InstanceContext, max_blocks: int, sizes: list[int]
    ) -> None:
        self._pool = pool
        self._connector = connector
        self._context = context
        self._max_blocks = max_blocks
        self._group_bytes, self._block_bytes = sizes, sizes[0]
        self._waiting: deque[_Transfer] = deque()
        self._active: set[_Transfer] = set()
        self.max_transfer_blocks = max(1, max_blocks // 2)
        self._unresponsive_until = -math.inf
        self.in_flight = 0
        self.waiting = 0
        self.has_waiting_stores = False
        self.ranges = (
            min(STORE_RANGES, self._block_bytes // MIN_RANGE_BYTES) if connector.capabilities.stores_growing else 0
        )
        self.in_place = connector.in_place
        self.follows = connector.follows
        self.listener: StoreListener | None = None
        self.num_holding = 0

    @property
    def free_capacity(self) -> int:
        """Blocks that could be transferred without waiting."""
        return 0 if self._waiting else max(0, self._max_blocks - self.in_flight)

    def store(
        self,
        job: Job,
        first: int,
        keys: Sequence[bytes],
        blocks: list[int],
        lease_s: float,
        on_done: OnDone,
        *,
        growing: bool = False,
        tails: Tails = (),
    ) -> Future[Result] | None:
        """Queue a store of the job's blocks from index `first` on.

        `on_done` receives the result on the engine thread; until then `job.open_transfers` counts the transfer.

        Args:
            growing: the blocks are about to be written. Returns None, with nothing done, if the store would have to wait.
            tails: what is stored with them. A block whose tail fails has failed.

        Returns:
            The future of the operation, if it has started.
        """
        if self.listener is not None and not self.in_place:
            on_done = partial(_report_stored, self.listener, job.seq, first, keys, on_done)
        if tails:
            keys, blocks, on_done = self._with_tails(keys, blocks, tails, on_done)
        store = self._connector.store_growing if growing else self._connector.store
        start = partial(store, keys, blocks, lease_s=lease_s)
        num_moved = 0 if self._connector.in_place else len(blocks)
        transfer = _Transfer(job, blocks, num_moved, True, start, on_done, lease_s > 0, self._context.now())
        if growing and (self._waiting or not self._fits(transfer)):
            return None
        self._add(transfer)
        return transfer.future

    def load(
        self,
        job: Job,
        keys: Sequence[bytes],
        blocks: list[int],
        on_done: OnDone,
        tickets: Sequence[bytes] = (),
        source: Source | None = None,
        tails: Tails = (),
    ) -> None:
        """Queue a load from `source`, by default the connector. `on_done` and `tails` as in `store`."""
        if self.listener is not None and source is None:
            on_done = partial(_report_loaded, self.listener, keys, on_done)
        if tails:
            keys, blocks, on_done = self._with_tails(keys, blocks, tails, on_done)
        start = partial((source or self._connector).load, keys, blocks, tickets=tickets)
        self._add(_Transfer(job, blocks, len(blocks), False, start, on_done, True, self._context.now()))

    def follow(self, job: Job, keys: Sequence[bytes], blocks: list[int], on_done: OnDone, tails: Tails = ()) -> None:
        """Queue a load of blocks that are still being stored. `on_done` and `tails` as in `store`."""
        if tails:
            keys, blocks, on_done = self._with_tails(keys, blocks, tails, on_done)
        start = partial(self._connector.follow, keys, blocks, patience_s=FOLLOW_PATIENCE_S)
        self._add(_Transfer(job, blocks, len(blocks), False, start, on_done, True, self._context.now()))

    def probe(self) -> None:
        """Ask a store that is out for a block that no store has: its answer shows that it is back, also without requests."""
        if self._connector.stats().any_out and self._pool.num_free:
            blocks = self._pool.allocate(1)
            self.num_holding += 1
            future = self._connector.load([PROBE_KEY], blocks[:1])
            when_done(self._context, future, lambda _: self._release_blocks(blocks))

    def end_leases(
        self, keys: Sequence[bytes], tails: Sequence[tuple[bytes, int]] = (), tickets: Sequence[bytes] = ()
    ) -> None:
        """End the leases of stored blocks: of the first group those under `keys`, of others by key and an id of the group."""
        if tails:
            all_keys, ids = [*keys, *(key for key, _ in tails)], [0] * len(keys) + [block for _, block in tails]
            self._connector.release_blocks(all_keys, ids, tickets=tickets)
        elif keys or tickets:
            self._connector.release(keys, tickets=tickets)

    def split(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split a range of blocks into (first, stop) parts, so that several threads move them and others can interleave."""
        minimum = max(1, MIN_PART_BYTES // self._block_bytes)
        step = min(max(minimum, -(-(stop - first) // SPLIT_PARTS)), self.max_transfer_blocks)
        for start in range(first, stop, step):
            yield start, min(start + step, stop)

    def cancel(self, job: Job) -> None:
        """Cancel the job's transfers.

        Queued ones end without starting; active ones end after the block being moved, if the connector supports that.
        Stores without a lease go on once started, since they serve later requests.
        """
        for transfer in self._active:
            if transfer.job is job and transfer.is_needed and transfer.future is not None:
                request_cancel(transfer.future)
        cancelled = [transfer for transfer in self._waiting if transfer.job is job]
        self._waiting = deque(transfer for transfer in self._waiting if transfer.job is not job)
        self._count_waiting()
        self._fail(cancelled)

    def _add(self, transfer: _Transfer) -> None:
        self._pool.hold(transfer.blocks)
        self.num_holding += 1
        transfer.job.open_transfers += 1
        if not self._waiting and self._fits(transfer):
            self._start(transfer)
        else:
            self._waiting.append(transfer)
            self._start_or_fail_waiting()

    def _start(self, transfer: _Transfer) -> None:
        transfer.queue_seconds = self._context.now() - transfer.queued_at
        self.in_flight += transfer.num_moved
        transfer.future = transfer.start()
        self._active.add(transfer)
        when_done(self._context, transfer.future, partial(self._on_done, transfer))

    def _start_or_fail_waiting(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        self._count_waiting()
        if self._waiting and self._context.now() < self._unresponsive_until:
            self._context.count("kv_transfer_given_up_blocks", self.waiting)
            failed, self._waiting = self._waiting, deque()
            self._count_waiting()
            self._fail(failed)

    def _count_waiting(self) -> None:
        self.waiting = sum(len(transfer.blocks) for transfer in self._waiting)
        self.has_waiting_stores = any(transfer.is_store for transfer in self._waiting)

    def _on_done(self, transfer: _Transfer, result: Result) -> None:
        self._active.discard(transfer)
        transfer.future = None  # it refers to the transfer: such a cycle would keep the request until a collection
        self.in_flight -= transfer.num_moved
        if Outcome.OK in result.outcomes:
            self._unresponsive_until = -math.inf
        elif Outcome.UNAVAILABLE in result.outcomes:
            self._unresponsive_until = self._context.now() + result.seconds
        self._end(transfer, replace(result, seconds=result.seconds + transfer.queue_seconds))
        if transfer.num_moved and (moved := result.outcomes.count(Outcome.OK)):
            num_bytes = moved * self._block_bytes
            if self._pool.tail_groups:
                num_bytes = self._bytes_of(transfer.blocks, result)
            self._context.record_transfer(num_bytes, result.seconds, self._context.now())
        if self._waiting:
            self._start_or_fail_waiting()

    def _with_tails(
        self, keys: Sequence[bytes], blocks: list[int], tails: Tails, on_done: OnDone
    ) -> tuple[list[bytes], list[int], OnDone]:
        """Return keys and blocks of a transfer of all groups, after which `on_done` gets an outcome for each of `keys`."""
        all_keys, all_blocks = [*keys, *(keys[place] for place, _ in tails)], [*blocks, *(block for _, block in tails)]

        def fold(result: Result) -> None:
            outcomes = result.outcomes[: len(keys)]
            for (place, _), outcome in zip(tails, result.outcomes[len(keys) :], strict=True):
                outcomes[place] = first_failure((outcomes[place], outcome))
            tail_bytes = self._bytes_of(all_blocks, result) - outcomes.count(Outcome.OK) * self._block_bytes
            on_done(GroupedResult(outcomes, result.seconds, result.ticket, result.held, tail_bytes))

        return all_keys, all_blocks, fold

    def _bytes_of(self, blocks: list[int], result: Result) -> int:
        """Return the bytes of the blocks that were moved."""
        first_ids = [group.first_id for group in self._pool.groups]
        moved = (block for block, outcome in zip(blocks, result.outcomes, strict=True) if outcome is Outcome.OK)
        return sum(self._group_bytes[bisect_right(first_ids, block) - 1] for block in moved)

    def _fail(self, transfers: Iterable[_Transfer]) -> None:
        """End transfers as UNAVAILABLE, asynchronously: a caller that has just queued one expects its callback later."""
        for transfer in transfers:
            future: Future[Result] = Future()
            future.set_result(Result([Outcome.UNAVAILABLE] * len(transfer.blocks), 0.0))
            when_done(self._context, future, partial(self._end, transfer))

    def _end(self, transfer: _Transfer, result: Result) -> None:
        transfer.job.open_transfers -= 1
        if result.held is None:
            self._release_blocks(transfer.blocks)
        else:
            when_done(self._context, result.held, lambda _: self._release_blocks(transfer.blocks))
        transfer.on_done(result)

    def _release_blocks(self, blocks: list[int]) -> None:
        self.num_holding -= 1
        self._pool.release(blocks)

    def _fits(self, transfer: _Transfer) -> bool:
        return self.in_flight == 0 or self.in_flight + transfer.num_moved <= self._max_blocks


@dataclass(frozen=True)
class _Fetch:
    """One prompt: the keys of the blocks that may be loaded, and the callback for a job that ends in the meantime."""

    job: Job
    keys: list[bytes]
    on_cancelled: Callable[[], None]


class Fetcher:
    """Loads stored prefixes for both roles. Runs on the engine thread."""

    def __init__(self, engine: Engine, connector: Connector, transfers: Transfers, context: InstanceContext) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._context = context
        self._break_even = BreakEven()

    def fetch(self, job: Job, on_cancelled: Callable[[], None]) -> None:
        """Load what the store has of the job's sequence, then queue the sequence in the engine.

        A sequence that already has blocks, as after a preemption, is loaded into these.

        Args:
            on_cancelled: called instead of queueing if the job has ended in the meantime.
        """
        seq = job.seq
        fetch = _Fetch(job, seq.usable_keys, on_cancelled)
        keys = fetch.keys
        if self._connector.in_place or seq.kv.num_local(self._engine.pool, keys) >= len(keys):
            self._engine.add(seq)
            return
        job.open_transfers += 1
        when_done(self._context, self._connector.match(keys), partial(self._on_match, fetch))

    def _on_match(self, fetch: _Fetch, stored: int) -> None:
        """Load blocks if the store has more than the pool and loading pays, else queue the sequence.

        Args:
            stored: number of leading blocks that the store has.
        """
        fetch.job.open_transfers -= 1
        if self._transfers.listener is not None:
            self._transfers.listener.on_missing(
                fetch.keys[stored : stored + 1]
            )  # of those that follow, nothing is known
        if fetch.job.ended:
            fetch.on_cancelled()
            return
        local = fetch.job.seq.kv.num_local(self._engine.pool, fetch.keys)
        if stored > local and self._should_load(fetch, local, stored):
            # The pool may have more than `local`, which others read: what reaches behind that is loaded anyway.
            self._load(fetch, fetch.job.seq.kv.num_registered, stored)
        else:
            self._engine.add(fetch.job.seq)

    def _should_load(self, fetch: _Fetch, local: int, stored: int) -> bool:
        """Decide whether to load blocks [local, stored). If so, the sequence has blocks reserved in the pool."""
        seq, scheduler = fetch.job.seq, self._engine.scheduler
        has_blocks = bool(seq.kv.block_ids)
        blocks, costs = stored - local, scheduler.costs
        # The constant term is left out: a step is made in both cases.
        compute_s = costs.prefill_seconds(
            blocks * seq.kv.block_size, local * seq.kv.block_size
        ) - costs.prefill_seconds(0)
        reason = self._break_even.decide(blocks, compute_s, self._context.now())
        loads = reason is not Reason.DEARER
        # Respect the queue, or new requests with prefix hits would take every block that a long prompt waits for.
        if (
            loads
            and not has_blocks
            and not scheduler.reserve(
                seq,
                len(fetch.keys),
                seq.kv.num_initial,
                respect_queue=True,
                num_now=stored,
                num_coming=stored * seq.kv.block_size,
            )
        ):
            self._context.count("store_hits", 1, decision="no_room")
            return False
        self._context.count("store_hits", 1, decision=reason)
        return loads

    def _load(self, fetch: _Fetch, first: int, stop: int) -> None:
        end, kv = min(stop, first + self._transfers.max_transfer_blocks), fetch.job.seq.kv
        keys, blocks, pool = fetch.keys[first:end], kv.blocks(first, end), self._engine.pool
        if kv.tails:
            kv.tails.drop(pool, stop * kv.block_size)  # of these, nothing is loaded
        tails = kv.tails.blocks(first, end) if kv.tails else ()

        def on_done(result: Result) -> None:
            self._on_loaded(fetch, first, stop, result)

        self._transfers.load(fetch.job, keys, blocks, on_done, tails=tails)

    def _on_loaded(self, fetch: _Fetch, first: int, stop: int, result: Result) -> None:
        loaded = result.outcomes.count(Outcome.OK)
        if loaded or Outcome.UNAVAILABLE in result.outcomes:
            self._break_even.record_load(loaded, result.seconds, self._context.now())
        if fetch.job.ended:
            fetch.on_cancelled()
            return
        seq, end = fetch.job.seq, first + result.leading
        if end < stop and result.leading == len(result.outcomes):
            self._load(fetch, end, stop)
            return
        num_tokens, pool = end * seq.kv.block_size, self._engine.pool
        if seq.kv.tails and seq.kv.tails.lack(pool, num_tokens):
            num_tokens = 0  # the next token attends to blocks that were not loaded
            seq.kv.give_up_blocks(pool)
        seq.kv.mark_loaded(num_tokens)
        seq.kv.register_full_blocks(self._engine.pool)
        self._engine.add(seq)


def _report_stored(
    listener: StoreListener,
    seq: EngineSequence,
    first: int,
    keys: Sequence[bytes],
    on_done: OnDone,
    result: Result,
) -> None:
    listener.on_stored(seq, first, keys, result.outcomes)
    on_done(result)


def _report_loaded(listener: StoreListener, keys: Sequence[bytes], on_done: OnDone, result: Result) -> None:
    outcomes = zip(keys, result.outcomes, strict=True)
    listener.on_missing(key for key, outcome in outcomes if outcome is Outcome.MISSING)
    on_done(result)
