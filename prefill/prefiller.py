"""The prefill role: what to load from the KV store, what to compute, what to store, and when the hand-over is complete.

submit ─► fetch what the store has already ─► queue in the engine
       ─► after each step: store the blocks that became full ─► after the last: first token, partial block
       ─► when every store is done: "final", and nothing of the request is left here
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.engine import Engine
from pdserve.kv_transfer.connector import Result
from pdserve.lifetime import Stage
from pdserve.roles.fetcher import Fetcher
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Transfers


@dataclass(eq=False)
class _Store:
    """Some blocks of a prompt: how many, and how many leading ones of them arrived; None while they are under way."""

    blocks: int
    arrived: int | None = None


@dataclass(eq=False)
class _Prefill:
    """What the role remembers of one job.

    Attributes:
        lease_s: of what is stored for decode.
        submitted: leading blocks of the prompt handed to the connector.
        stores: one behind the other.
        sampled: the first token is out.
    """

    job: Job
    lease_s: float
    submitted: int = 0
    stores: list[_Store] = field(default_factory=list)
    announced: int = 0
    sampled: bool = False

    @property
    def has_gap(self) -> bool:
        """A block did not arrive: nobody would find what comes after it."""
        return any(store.arrived is not None and store.arrived < store.blocks for store in self.stores)

    @property
    def stored(self) -> int:
        """Leading blocks of the prompt that are in the store by now."""
        total = 0
        for store in self.stores:
            total += store.arrived or 0
            if store.arrived != store.blocks:
                break
        return total


class Prefiller:
    def __init__(
        self, engine: Engine, transfers: Transfers, fetcher: Fetcher, context: InstanceContext, lease_seconds: float
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._fetcher = fetcher
        self._context = context
        self._lease_seconds = lease_seconds
        self._prefills: dict[Job, _Prefill] = {}

    def submit(self, job: Job) -> None:
        job.keys = job.seq.given_keys()
        job.seq.exported = True
        last = job.seq.sampling.max_tokens - job.seq.num_output == 1  # then there is no decode that loads them
        prefill = self._prefills[job] = _Prefill(job, 0.0 if last else self._lease_seconds)
        if last and self._transfers.in_place:
            prefill.submitted = len(job.keys)  # and no other prefill can
        self._fetcher.fetch(job, cancelled=lambda: self._end_if_done(prefill))

    def advanced(self, job: Job, sampled: bool, step_started: float) -> None:
        """After a step that computed part of this prompt."""
        prefill = self._prefills[job]
        job.stamp(Stage.PREFILL_STARTED, step_started)
        self._store_computed(prefill)
        if sampled:
            self._first_token(prefill)
        else:
            self._announce(prefill)

    def returned(self, job: Job) -> None:
        """A prompt that was preempted has blocks again: what the store has of it need not be computed."""
        prefill = self._prefills[job]
        self._fetcher.fetch(job, cancelled=lambda: self._end_if_done(prefill))

    def cancel(self, job: Job) -> None:
        """Stops computing; blocks under transfer are let go when the transfers end."""
        if job in self._prefills:
            job.over, prefill = True, self._prefills[job]
            if not self._transfers.in_place and prefill.lease_s:  # in place, decode may be reading yet
                self._transfers.release(job.keys[: prefill.stored], b"")
            self._engine.remove(job.seq)
            self._end_if_done(self._prefills[job])

    def _store_computed(self, prefill: _Prefill) -> None:
        """Hands newly computed blocks of the prompt to the connector, the partial last one once it is complete."""
        job, seq = prefill.job, prefill.job.seq
        done = seq.num_computed >= seq.num_given
        ready = len(job.keys) if done else seq.num_computed // seq.block_size
        first = prefill.submitted
        if ready <= first or prefill.has_gap:
            return
        if done and seq.num_given % seq.block_size:
            self._engine.runner.clear_tail(seq.block_ids[ready - 1], seq.num_given % seq.block_size)
        prefill.submitted = ready
        # In pieces, so that decode loads the first while the last is still on its way out.
        for start, stop in self._transfers.pieces(first, ready):
            self._store(prefill, start, stop)

    def _store(self, prefill: _Prefill, first: int, stop: int) -> None:
        job = prefill.job
        store = _Store(stop - first)
        prefill.stores.append(store)
        keys, blocks = job.keys[first:stop], job.seq.blocks(first, stop)
        self._transfers.store(
            job, keys, blocks, prefill.lease_s, lambda result: self._stored(prefill, store, keys, result)
        )

    def _stored(self, prefill: _Prefill, store: _Store, keys: Sequence[bytes], result: Result) -> None:
        job = prefill.job
        store.arrived = result.leading
        if job.over and prefill.lease_s:  # too late: decode will not hear of them
            self._transfers.release(keys[: result.leading], result.ticket)
        if prefill.has_gap:
            self._transfers.drop(job)
        if not job.over:
            job.moved(result, self._context.now())
            if result.ticket:
                job.pending_output().stored.tickets.append(result.ticket)
            self._announce(prefill)
        self._end_if_done(prefill)

    def _first_token(self, prefill: _Prefill) -> None:
        """The prompt is computed: the token goes out at once, the sequence leaves the engine, its stores go on."""
        job, seq, now = prefill.job, prefill.job.seq, self._context.now()
        prefill.sampled = True
        job.stamp(Stage.FIRST_TOKEN, now)
        job.report_token()
        self._context.count("generation_tokens", 1)
        job.report_prompt_sources()
        self._context.count_sources(job)
        reason = seq.finish_reason()
        if reason is not None:
            job.finish(reason, now)
        self._engine.remove(seq)
        self._announce(prefill)
        self._end_if_done(prefill)

    def _announce(self, prefill: _Prefill) -> None:
        """Tells the router how many leading blocks decode may load, or follow, and whether more will come."""
        job = prefill.job
        stored = prefill.stored
        coming = prefill.submitted if self._transfers.follows and not prefill.has_gap else stored
        final = prefill.sampled and all(store.arrived is not None for store in prefill.stores)
        if job.over or (coming <= prefill.announced and not final):
            return
        prefill.announced = coming
        if job.moved_blocks:
            job.report_transfer(self._engine.layout.block_bytes)
        pending_output = job.pending_output().stored
        pending_output.num_blocks, pending_output.coming = stored, coming
        pending_output.final = final
        if final:
            job.stamp(Stage.KV_STORED, self._context.now())

    def _end_if_done(self, prefill: _Prefill) -> None:
        if prefill.job.transfers == 0 and (prefill.sampled or prefill.job.over) and prefill.job in self._prefills:
            del self._prefills[prefill.job]
            self._context.close_job(prefill.job)
