"""What the KV store already has of a prompt: loaded before the sequence queues, instead of computed.

fetch ─► ask the store which leading blocks it has ─► load those that the pool lacks ─► queue in the engine
"""

from collections.abc import Callable

from pdserve.engine.engine import Engine
from pdserve.job import Desk, Job
from pdserve.kv_transfer.connector import Connector, Result
from pdserve.transfers import Transfers


class Fetcher:
    def __init__(self, engine: Engine, connector: Connector, transfers: Transfers, desk: Desk) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._desk = desk

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
        """Loads what the store has and the pool lacks, if there is room for the sequence now; else it just queues."""
        job.transfers -= 1
        if job.over:
            cancelled()
            return
        seq, scheduler = job.seq, self._engine.scheduler
        have = len(self._engine.pool.match(usable))
        # Who waits comes first, or newcomers with hits would take every block that a long prompt waits for.
        if found <= have or scheduler.waiting or not scheduler.reserve(seq, len(usable), seq.num_given):
            self._engine.add(seq)
            return
        blocks = seq.block_ids[have:found]
        self._transfers.load(job, usable[have:found], blocks, lambda result: self._loaded(job, have, result, cancelled))

    def _loaded(self, job: Job, have: int, result: Result, cancelled: Callable[[], None]) -> None:
        if job.over:
            cancelled()
            return
        seq = job.seq
        seq.num_loaded = result.leading * seq.block_size
        seq.num_computed = (have + result.leading) * seq.block_size
        seq.admitted = True
        self._engine.register_full_blocks(seq)
        self._engine.add(seq)
