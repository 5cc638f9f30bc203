"""What the KV store already has of a prompt: loaded before the sequence queues, where that is cheaper than computing.

fetch ─► ask the store which leading blocks it has ─► load those that the pool lacks, or not ─► queue in the engine
"""

from collections.abc import Callable

from pdserve.break_even import BreakEven
from pdserve.engine.engine import Engine
from pdserve.job import Desk, Job
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.transfers import Transfers


class Fetcher:
    def __init__(self, engine: Engine, connector: Connector, transfers: Transfers, desk: Desk) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._desk = desk
        self.break_even = BreakEven(engine.pool.block_size)

    def fetch(self, job: Job, cancelled: Callable[[], None]) -> None:
        """Queues the job's sequence in the engine, now or when the store has answered.

        Args:
            cancelled: called instead if the job is over by then.
        """
        seq = job.seq
        usable = seq.full_keys()[: (seq.num_given - 1) // seq.block_size]
        if self._connector.in_place or len(self._engine.pool.match(usable)) == len(usable):
            self._engine.add(seq)
            return
        job.transfers += 1
        self._desk.when_done(self._connector.match(usable), lambda found: self._matched(job, usable, found, cancelled))

    def _matched(self, job: Job, usable: list[bytes], found: int, cancelled: Callable[[], None]) -> None:
        """Loads what the store has and the pool lacks, as far as that pays and there is room now; then it just queues."""
        job.transfers -= 1
        if job.over:
            cancelled()
            return
        seq = job.seq
        have = len(self._engine.pool.match(usable))
        count = self._worth(job, found - have, len(usable)) if found > have else 0
        if count == 0:
            self._engine.add(seq)
            return
        keys, blocks = usable[have : have + count], seq.block_ids[have : have + count]
        self._transfers.load(job, keys, blocks, lambda result: self._loaded(job, have, result, cancelled))

    def _worth(self, job: Job, blocks: int, usable: int) -> int:
        """How many of the blocks to load. If any, the sequence has its place in the pool."""
        seq, scheduler = job.seq, self._engine.scheduler
        count, reason = self.break_even.decide(blocks, self._desk.now())
        # Who waits comes first, or newcomers with hits would take every block that a long prompt waits for.
        if count and (scheduler.waiting or not scheduler.reserve(seq, usable, seq.num_given)):
            self._desk.count("store_hits", 1, decision="no_room")
            return 0
        self._desk.count("store_hits", 1, decision=reason)
        return count

    def _loaded(self, job: Job, have: int, result: Result, cancelled: Callable[[], None]) -> None:
        moved = result.outcomes.count(Outcome.OK)
        if moved or Outcome.UNAVAILABLE in result.outcomes:
            self.break_even.loaded(moved, result.seconds, self._desk.now())
        if job.over:
            cancelled()
            return
        seq = job.seq
        seq.num_loaded = result.leading * seq.block_size
        seq.num_computed = (have + result.leading) * seq.block_size
        seq.admitted = True
        self._engine.register_full_blocks(seq)
        self._engine.add(seq)
