"""Loads the prefix of a prompt that the KV store already has, before the sequence is queued in the engine.

fetch ─► match: the store's number of leading blocks ─► load the blocks that the pool lacks, if that is cheaper than
         computing them ─► queue the sequence in the engine, which computes the rest
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdserve.engine.engine import Engine
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.roles.break_even import BreakEven, Reason
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Transfers


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
        fetch = _Fetch(job, seq.kv.full_keys()[: seq.num_usable_hits], on_cancelled)
        keys = fetch.keys
        if self._connector.in_place or self._num_local(fetch) >= len(keys):
            self._engine.add(seq)
            return
        job.open_transfers += 1
        self._context.add_done_callback(self._connector.match(keys), partial(self._on_match, fetch))

    def _num_local(self, fetch: _Fetch) -> int:
        """Return the number of leading blocks that the pool has."""
        seq = fetch.job.seq
        return seq.kv.num_registered if seq.kv.block_ids else len(self._engine.pool.match(fetch.keys))

    def _on_match(self, fetch: _Fetch, stored: int) -> None:
        """Load blocks if the store has more than the pool and loading pays, else queue the sequence.

        Args:
            stored: number of leading blocks that the store has.
        """
        fetch.job.open_transfers -= 1
        self._transfers.report_missing(fetch.keys[stored : stored + 1])  # of those that follow, nothing is known
        if fetch.job.ended:
            fetch.on_cancelled()
            return
        local = self._num_local(fetch)
        if stored > local and self._should_load(fetch, local, stored):
            self._load(fetch, local, stored)
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
            and not scheduler.reserve(seq, len(fetch.keys), seq.kv.num_initial, respect_queue=True)
        ):
            self._context.count("store_hits", 1, decision="no_room")
            return False
        self._context.count("store_hits", 1, decision=reason)
        return loads

    def _load(self, fetch: _Fetch, first: int, stop: int) -> None:
        end = min(stop, first + self._transfers.max_transfer_blocks)
        keys, blocks = fetch.keys[first:end], fetch.job.seq.kv.blocks(first, end)
        self._transfers.load(fetch.job, keys, blocks, lambda result: self._on_loaded(fetch, first, stop, result))

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
        seq.kv.mark_loaded(end * seq.kv.block_size)
        seq.kv.register_full_blocks(self._engine.pool)
        self._engine.add(seq)
