"""The prefill role: what to load from the KV store, what to compute, what to store, and when the hand-over is complete.

submit ─► ask the store which leading blocks it has ─► load those that the pool lacks ─► queue in the engine
       ─► after each step: store the blocks that became full ─► after the last: first token, partial block
       ─► when every store is done: "final", and nothing of the request is left here
"""

from dataclasses import dataclass, field

from pdserve.engine.engine import Engine
from pdserve.job import Desk, Job
from pdserve.kv_transfer.connector import Connector, Result
from pdserve.lifetime import Stage


@dataclass(eq=False)
class _Prefill:
    """What the role remembers of one job.

    Attributes:
        submitted: leading blocks of the prompt handed to the connector.
        stores: (first block, blocks, leading blocks that arrived or None while under way), in order.
        sampled: the first token is out.
    """

    job: Job
    submitted: int = 0
    stores: list[list[int | None]] = field(default_factory=list)
    announced: int = 0
    sampled: bool = False

    @property
    def stored(self) -> int:
        """Leading blocks of the prompt that are in the store by now."""
        total = 0
        for _, count, arrived in self.stores:
            total += arrived or 0
            if arrived != count:
                break
        return total


class Prefiller:
    def __init__(self, engine: Engine, connector: Connector, desk: Desk, lease_seconds: float) -> None:
        self._engine = engine
        self._connector = connector
        self._desk = desk
        self._lease_seconds = lease_seconds
        self._prefills: dict[Job, _Prefill] = {}

    def submit(self, job: Job) -> None:
        """Starts with the question what the store has, unless the pool has as much as can be used."""
        seq = job.seq
        job.keys = seq.given_keys()
        self._prefills[job] = _Prefill(job)
        usable = job.keys[: (seq.num_given - 1) // seq.block_size]
        if len(self._engine.pool.match(usable)) == len(usable):
            self._engine.add(seq)
            return
        job.transfers += 1
        self._desk.when_done(self._connector.match(usable), lambda found: self._matched(job, found))

    def advanced(self, job: Job, sampled: bool, step_started: float) -> None:
        """After a step that computed part of this prompt."""
        prefill = self._prefills[job]
        job.stamp(Stage.PREFILL_STARTED, step_started)
        self._store_computed(prefill)
        if sampled:
            self._first_token(prefill)

    def cancel(self, job: Job) -> None:
        """Stops computing; blocks under transfer are let go when the transfers end."""
        if job in self._prefills:
            job.over = True
            self._engine.remove(job.seq)
            self._end_if_done(self._prefills[job])

    def _matched(self, job: Job, found: int) -> None:
        """Loads what the store has and the pool lacks, if there is room for the sequence now; else it just queues."""
        job.transfers -= 1
        prefill, seq, pool = self._prefills[job], job.seq, self._engine.pool
        if job.over:
            self._end_if_done(prefill)
            return
        usable = (seq.num_given - 1) // seq.block_size
        have = len(pool.match(job.keys[:usable]))
        scheduler = self._engine.scheduler
        # Who waits comes first, or newcomers with hits would take every block that a long prompt waits for.
        if found <= have or scheduler.waiting or not scheduler.reserve(seq, usable, seq.num_given):
            self._engine.add(seq)
            return
        keys, blocks = job.keys[have:found], seq.block_ids[have:found]
        pool.hold(blocks)
        job.transfers += 1
        self._desk.when_done(
            self._connector.load(keys, blocks), lambda result: self._loaded(prefill, have, blocks, result)
        )

    def _loaded(self, prefill: _Prefill, have: int, blocks: list[int], result: Result) -> None:
        job = prefill.job
        job.transfers -= 1
        self._engine.pool.release(blocks)
        if job.over:
            self._end_if_done(prefill)
            return
        seq = job.seq
        seq.num_loaded = result.leading * seq.block_size
        seq.num_computed = (have + result.leading) * seq.block_size
        seq.admitted = True
        self._engine.register_full_blocks(seq)
        self._engine.add(seq)

    def _store_computed(self, prefill: _Prefill) -> None:
        """Hands newly computed blocks of the prompt to the connector, the partial last one once it is complete."""
        job, seq = prefill.job, prefill.job.seq
        done = seq.num_computed >= seq.num_given
        ready = len(job.keys) if done else seq.num_computed // seq.block_size
        first, count = prefill.submitted, ready - prefill.submitted
        if count <= 0:
            return
        blocks = seq.block_ids[first:ready]
        if done and seq.num_given % seq.block_size:
            self._engine.runner.clear_tail(blocks[-1], seq.num_given % seq.block_size)
        self._engine.pool.hold(blocks)
        store: list[int | None] = [first, count, None]
        prefill.stores.append(store)
        prefill.submitted = ready
        job.transfers += 1
        future = self._connector.store(job.keys[first:ready], blocks, lease_s=self._lease_seconds)
        self._desk.when_done(future, lambda result: self._stored(prefill, store, blocks, result))

    def _stored(self, prefill: _Prefill, store: list[int | None], blocks: list[int], result: Result) -> None:
        job = prefill.job
        if result.held is None:
            self._let_go(prefill, blocks)
        else:
            self._desk.when_done(result.held, lambda _: self._read(prefill, blocks))
        store[2] = result.leading
        if not job.over:
            job.moved(result, self._engine.layout.block_bytes)
            if result.ticket:
                job.news().stored.tickets.append(result.ticket)
            self._announce(prefill)
        self._end_if_done(prefill)

    def _read(self, prefill: _Prefill, blocks: list[int]) -> None:
        """A peer has read blocks in place, or their lease is over."""
        self._let_go(prefill, blocks)
        self._end_if_done(prefill)

    def _let_go(self, prefill: _Prefill, blocks: list[int]) -> None:
        prefill.job.transfers -= 1
        self._engine.pool.release(blocks)

    def _first_token(self, prefill: _Prefill) -> None:
        """The prompt is computed: the token goes out at once, the sequence leaves the engine, its stores go on."""
        job, seq, now = prefill.job, prefill.job.seq, self._desk.now()
        prefill.sampled = True
        job.stamp(Stage.FIRST_TOKEN, now)
        job.news().token_ids.append(seq.tokens[-1])
        self._desk.count("generation_tokens", 1)
        job.tell_sources()
        self._desk.count_sources(job)
        reason = seq.finish_reason()
        if reason is not None:
            job.finish(reason, now)
        self._engine.remove(seq)
        self._announce(prefill)
        self._end_if_done(prefill)

    def _announce(self, prefill: _Prefill) -> None:
        """Tells the router how many leading blocks decode may load, and whether more will come."""
        job = prefill.job
        stored = prefill.stored
        final = prefill.sampled and all(arrived is not None for _, _, arrived in prefill.stores)
        if job.over or (stored <= prefill.announced and not final):
            return
        prefill.announced = stored
        news = job.news().stored
        news.num_blocks = stored
        news.final = final
        if final:
            job.stamp(Stage.KV_STORED, self._desk.now())

    def _end_if_done(self, prefill: _Prefill) -> None:
        if prefill.job.transfers == 0 and (prefill.sampled or prefill.job.over) and prefill.job in self._prefills:
            del self._prefills[prefill.job]
            self._desk.close_job(prefill.job)
