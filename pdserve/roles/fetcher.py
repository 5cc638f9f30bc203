"""What the KV store already has of a prompt: loaded before the sequence queues, where that is cheaper than computing.

fetch ─► ask the store which leading blocks it has ─► load those that the pool lacks, or not ─► queue in the engine
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.engine import Engine
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.roles.break_even import BreakEven, Reason
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Transfers


@dataclass(frozen=True)
class _Fetch:
    """One prompt: keys of the blocks that may be loaded, and whom to tell if the job is over by then."""

    job: Job
    keys: list[bytes]
    cancelled: Callable[[], None]


class Fetcher:
    def __init__(self, engine: Engine, connector: Connector, transfers: Transfers, context: InstanceContext) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._context = context
        self._break_even = BreakEven()

    def fetch(self, job: Job, cancelled: Callable[[], None]) -> None:
        """Queues the job's sequence in the engine, now or when the store has answered. If it has blocks already, as after a
        preemption, these are loaded into.

        Args:
            cancelled: called instead if the job is over by then.
        """
        seq = job.seq
        fetch = _Fetch(job, seq.full_keys()[: (len(seq) - 1) // seq.block_size], cancelled)
        keys = fetch.keys
        if self._connector.in_place or self._have(fetch) == len(keys):
            self._engine.add(seq)
            return
        job.transfers += 1
        self._context.when_done(self._connector.match(keys), lambda found: self._matched(fetch, found))

    def _have(self, fetch: _Fetch) -> int:
        """Leading blocks that need no load."""
        seq = fetch.job.seq
        return seq.num_registered if seq.block_ids else len(self._engine.pool.match(fetch.keys))

    def _matched(self, fetch: _Fetch, found: int) -> None:
        """Loads what the store has and the pool lacks, as far as that pays and there is room now; then it just queues."""
        fetch.job.transfers -= 1
        if fetch.job.over:
            fetch.cancelled()
            return
        have = self._have(fetch)
        if found > have and self._pays(fetch, have, found):
            self._load(fetch, have, found)
        else:
            self._engine.add(fetch.job.seq)

    def _pays(self, fetch: _Fetch, have: int, found: int) -> bool:
        """Whether to load what follows the first blocks. If so, the sequence has its place in the pool."""
        seq, scheduler = fetch.job.seq, self._engine.scheduler
        has_place = bool(seq.block_ids)
        blocks, costs = found - have, scheduler.costs
        longer = costs.prefill_seconds(blocks * seq.block_size, have * seq.block_size) - costs.prefill_seconds(0)
        reason = self._break_even.decide(blocks, longer, self._context.now())  # some step is made anyway
        # Beside those who wait, or newcomers with hits would take every block that a long prompt waits for.
        loads = reason is not Reason.DEARER
        if loads and not has_place and not scheduler.reserve(seq, len(fetch.keys), seq.num_given, beside=True):
            self._context.count("store_hits", 1, decision="no_room")
            return False
        self._context.count("store_hits", 1, decision=reason)
        return loads

    def _load(self, fetch: _Fetch, first: int, stop: int) -> None:
        end = min(stop, first + self._transfers.largest)
        keys, blocks = fetch.keys[first:end], fetch.job.seq.blocks(first, end)
        self._transfers.load(fetch.job, keys, blocks, lambda result: self._loaded(fetch, first, stop, result))

    def _loaded(self, fetch: _Fetch, first: int, stop: int, result: Result) -> None:
        moved = result.outcomes.count(Outcome.OK)
        if moved or Outcome.UNAVAILABLE in result.outcomes:
            self._break_even.loaded(moved, result.seconds, self._context.now())
        if fetch.job.over:
            fetch.cancelled()
            return
        seq, arrived = fetch.job.seq, first + result.leading
        if arrived < stop and result.leading == len(result.outcomes):
            self._load(fetch, arrived, stop)
            return
        seq.num_computed = arrived * seq.block_size
        if not seq.admitted:
            seq.num_loaded = seq.num_computed - seq.num_local_hit
        seq.admitted = True
        self._engine.register_full_blocks(seq)
        self._engine.add(seq)
