"""Prefill role: computes prompts, samples their first tokens, and stores their KV for a decode instance.

The life of one request (phase PREFILL) on the prefill instance:

    submit ─► fetch: load the leading blocks that the KV store already has, if that is cheaper than computing them
           ─► queue in the engine, which computes the rest of the prompt in chunks, one per step
    on_step ─► after each chunk: store the blocks that it filled, while the engine computes the next chunk; announce to the
               router how many leading blocks are stored or under way, which it passes on to the decode instance
           ─► after the last chunk: store the partial last block too, report the first token, leave the engine
    last store done ─► announce that no more will come ("final"); the job ends and its blocks are released

Several choices of one prompt share a state: the first one's sequence computes and stores the prompt, and each samples its
first token from the same logits. Each reports everything, so that any of them may end at any time.

The prompt of a beam search has no first token: decode computes its last token again, for the candidates.

The decode instance loads stored blocks while later ones are still computed. Stores have a lease, which decode ends once it
has loaded them and has the final report; a prompt that the router cancels before it has that report ends its own. If a
block cannot be stored, later blocks are not stored either, since a load needs all preceding ones; decode computes the
missing part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence as TokenSequence
from pdserve.engine.step import Accepted, StepPlan
from pdserve.kv_transfer.connector import GrowingStore, Outcome, Result
from pdserve.lifetime import Stage
from pdserve.prefill.layer_stores import LayerStores
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Fetcher, Tails, Transfers

MAX_REPORTED = 32  # prompts whose final report may not have reached the router


@dataclass(eq=False)
class _StorePart:
    """A store of consecutive blocks of a prompt.

    Attributes:
        first: index in the prompt of the first one.
        blocks: number of blocks.
        stored: number of leading blocks stored; None until the store has ended.
        tails: blocks of further groups that are stored with them, as `Transfers.store` has them.
        leased: outcomes of those whose leases have not been ended here, once the store has ended.
    """

    first: int
    blocks: int
    tails: Tails = ()
    stored: int | None = None
    leased: list[Outcome] = field(default_factory=list)


@dataclass(eq=False)
class _Reported:
    """A prompt that has ended, and whose final report may not have reached the router. Its choices share it.

    Attributes:
        keys: of its blocks.
        parts: its stores.
        num_choices: those that were not cancelled.
    """

    keys: list[bytes]
    parts: list[_StorePart]
    num_choices: int


@dataclass(eq=False)
class _PrefillState:
    """State of one prompt in the prefill role.

    Until its jobs end, `stored_blocks` <= `announced_blocks` <= `submitted_blocks`.

    Attributes:
        job: to which the transfers belong.
        jobs: of all choices of the prompt, itself included.
        seq: the sequence that computes the prompt.
        lease_s: lease of the stored blocks; 0 if no decode instance will load them.
        submitted_blocks: leading blocks of the prompt that were passed to the connector.
        parts: stores of consecutive parts of the prompt, in order.
        announced_blocks: leading blocks that were reported to the router as loadable, or followable.
        unsampled: jobs that wait for their first tokens.
        open_stores: stores that have not ended.
        has_gap: a block could not be stored, which makes all later ones useless.
        growing: stores of the blocks that the current step fills.
    """

    job: Job
    jobs: list[Job]
    seq: TokenSequence
    lease_s: float
    unsampled: set[Job]
    submitted_blocks: int = 0
    parts: list[_StorePart] = field(default_factory=list)
    announced_blocks: int = 0
    open_stores: int = 0
    has_gap: bool = False
    growing: list[GrowingStore] = field(default_factory=list)

    @property
    def running(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self.jobs if not job.ended]

    @property
    def stores_are_over(self) -> bool:
        """True if the prompt is computed, and every store of it has ended."""
        return not self.unsampled and not self.open_stores

    @property
    def stored_blocks(self) -> int:
        """Leading blocks of the prompt that are in the store."""
        total = 0
        for part in self.parts:
            total += part.stored or 0
            if part.stored != part.blocks:
                break
        return total


class Prefiller:
    """The prefill role of an instance. Runs on the engine thread.

    Args:
        lease_seconds: lease of blocks that are stored for a decode instance.
    """

    def __init__(
        self, engine: Engine, transfers: Transfers, fetcher: Fetcher, context: InstanceContext, lease_seconds: float
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._fetcher = fetcher
        self._context = context
        self._lease_seconds = lease_seconds
        self._states: dict[Job, _PrefillState] = {}
        # Those that have ended with a final report, by router and id: a cancellation may have crossed it.
        self._reported: dict[tuple[str, str], _Reported] = {}
        if transfers.ranges > 1 and engine.runner.kv.final_bytes:
            engine.on_planned = self._begin_stores

    def submit(self, job: Job, others: Sequence[Job] = ()) -> None:
        """Start a request: fetch stored blocks, then queue the sequence in the engine. `others` continue the same prompt."""
        job.keys = job.seq.kv.initial_keys
        job.seq.mark_for_storing()  # the scheduler pauses it while stores are queued
        # A request for a single token has no decode phase, so its blocks need no lease.
        is_last_token = job.seq.output.awaits_last_token and job.seq.group is None
        if others:
            job.seq.lead([other.seq for other in others])
        jobs, lease_s = [job, *others], 0.0 if is_last_token else self._lease_seconds
        state = _PrefillState(job, jobs, job.seq, lease_s, set(jobs))
        self._states.update(dict.fromkeys(state.jobs, state))
        if is_last_token and self._transfers.in_place:
            # No decode will read the blocks in place, and other prefills cannot: mark them as submitted.
            state.submitted_blocks = len(job.keys)
        self._fetcher.fetch(job, on_cancelled=lambda: self._announce(state))

    def on_step(self, job: Job, accepted: Accepted, step_started: float) -> None:
        """Store the new blocks after an engine step that computed part of the prompt."""
        state, seq, now = self._states[job], job.seq, self._context.now()
        running = state.running
        if state.growing:
            self._end_growth(state)
        self._store_computed(state)
        for one in running:
            one.stamp(Stage.PREFILL_STARTED, step_started)
        if accepted.tokens:
            job.report_tokens(accepted, now)
        is_searching = seq.group is not None and seq.kv.num_uncomputed == 0
        if accepted.tokens or is_searching or (seq.features and job.report_embedding(now)):
            job.report_prompt_sources()
            job.count_prompt_sources(self._context)
            state.unsampled.discard(job)
            self._engine.remove(seq)  # its stores continue
        self._announce(state)

    def on_resumed(self, job: Job) -> None:
        """Reload a preempted prompt that has blocks again, as far as the store has it."""
        state = self._states[job]
        self._fetcher.fetch(job, on_cancelled=lambda: self._announce(state))

    def cancel(self, job: Job) -> None:
        """Stop computing. Blocks in use by a transfer are released when it ends."""
        if job in self._states:
            job.ended, state = True, self._states[job]
            self._end_growth(state)  # a step has computed it, even if it failed then
            state.unsampled.discard(job)
            if job.seq.siblings:  # the first of them takes its place
                state.seq = job.seq.siblings[0]
                state.seq.mark_for_storing()
            self._engine.remove(job.seq)
            if not state.running:
                self._transfers.cancel(state.job)
                if not self._transfers.in_place:  # else decode may still be reading
                    self._end_leases(state)
            self._announce(state)

    def cancel_late(self, link: str, request_id: str) -> None:
        """Handle that a request was cancelled before its router had the final report: decode will not end the leases."""
        reported = self._reported.pop((link, request_id), None)
        if reported is not None:
            reported.num_choices -= 1
            if not reported.num_choices:
                self._transfers.end_leases(*_take_leases(reported.keys, reported.parts, 0))

    def _begin_stores(self, plan: StepPlan) -> LayerStores | None:
        """Begin to store what a step is about to compute. Returns what is to be told of each layer, if there is anything."""
        states = [state for state in {*self._states.values()} if state.seq in plan.counts]
        for state in states:
            self._store_computed(state, plan.counts[state.seq])
        stores = [store for state in states for store in state.growing]

        def announce() -> None:
            for state in states:
                self._announce(state)
            self._context.send_outputs()

        range_bytes = self._engine.layout.block_bytes // self._transfers.ranges
        final_bytes = self._engine.runner.kv.final_bytes
        return LayerStores(stores, final_bytes, range_bytes, announce, self._context.now) if stores else None

    def _end_growth(self, state: _PrefillState) -> None:
        """Let the stores of a step end with it. A step that was replayed has told them nothing before."""
        growing, state.growing = state.growing, []
        for store in growing:
            store.advance(self._engine.layout.block_bytes)

    def _store_computed(self, state: _PrefillState, coming: int = 0) -> None:
        """Store the full blocks that have KV by now, and the partial last one once the prompt is complete.

        Prefix hits and loaded blocks too: decode may lack them, and the store knows what it has.

        Args:
            coming: tokens that the current step is about to compute. Then the stores are growing ones.
        """
        job, seq = state.job, state.seq
        num_computed = seq.kv.num_computed + coming
        is_complete = num_computed >= seq.kv.num_initial
        ready = len(job.keys) if is_complete else num_computed // seq.kv.block_size
        first = state.submitted_blocks
        if ready <= first or state.has_gap:
            return
        if seq.kv.num_dropped > first:  # they have left the attention window
            self._context.count("store_skipped_blocks", len(job.keys) - first)
            state.parts.append(_StorePart(first, seq.kv.num_dropped - first, stored=0))
            state.has_gap = True
            return
        if is_complete and seq.kv.num_initial % seq.kv.block_size:
            for block in (seq.kv.block_ids[ready - 1], *(tail.ids[ready - 1] for tail in seq.kv.tails)):
                self._engine.runner.kv.clear_tail(block, seq.kv.num_initial % seq.kv.block_size)
        blocks = seq.kv.blocks(first, ready)
        # Split, so that decode can load the first part while the last is still being stored.
        for start, stop in self._transfers.split(first, ready):
            tails: Tails = ()
            if seq.kv.tails:
                pool, length = self._engine.pool, seq.kv.num_initial
                tails = seq.kv.tails.prompt_blocks(pool, start, stop, length, multi_turn=job.multi_turn)
            part, keys = _StorePart(start, stop - start, tails), job.keys[start:stop]
            on_done = partial(self._on_stored, state, part)
            store = job, start, keys, blocks[start - first : stop - first], state.lease_s, on_done
            future = self._transfers.store(*store, growing=coming > 0, tails=tails)
            if isinstance(future, GrowingStore):
                state.growing.append(future)
            elif coming:
                return  # it is stored once it is computed
            state.submitted_blocks = stop
            state.parts.append(part)
            state.open_stores += 1

    def _on_stored(self, state: _PrefillState, part: _StorePart, result: Result) -> None:
        job = state.job
        part.stored = result.leading
        state.open_stores -= 1
        state.has_gap |= part.stored < part.blocks
        if state.lease_s:
            part.leased = result.outcomes
        if state.has_gap:
            self._transfers.cancel(job)
        if not state.running:  # too late: decode will not be told of these blocks
            self._end_leases(state, result.ticket)
        elif state.has_gap and not state.open_stores:
            self._end_leases(state)
        job.record_transfer(result, self._context.now())
        for one in state.running:
            if result.ticket:
                one.pending_stored().tickets.append(result.ticket)
        if job.ended and state.stores_are_over and not state.has_gap:  # decode followed, and finished before this
            job.report_transfers(self._engine.layout)
            job.stamp(Stage.KV_STORED, self._context.now())
        self._announce(state)

    def _end_leases(self, state: _PrefillState, ticket: bytes = b"") -> None:
        """End once each lease of what decode will not be told of: all, or what is stored behind a gap."""
        ended, tails = _take_leases(state.job.keys, state.parts, state.stored_blocks if state.running else 0)
        if ended:
            self._transfers.end_leases(ended, tails, [ticket] if ticket else [])

    def _announce(self, state: _PrefillState) -> None:
        """Report to the router how many leading blocks decode may load or follow, and whether more will come.

        Then close the jobs, if all have their first tokens or were cancelled, and no transfer is left.
        """
        stored, final = state.stored_blocks, state.stores_are_over
        coming = state.submitted_blocks if self._transfers.follows and not state.has_gap else stored
        if coming > state.announced_blocks or final:
            state.announced_blocks = coming
            for job in state.running:
                if job.transferred_blocks:
                    job.report_transfers(self._engine.layout)
                announcement = job.pending_stored()
                announcement.num_blocks, announcement.coming = stored, coming
                announcement.final = final
                if final:
                    job.stamp(Stage.KV_STORED, self._context.now())
        if state.unsampled:
            return
        for job in state.jobs:
            if job.open_transfers:
                return
        running = [] if self._transfers.in_place or not state.lease_s else state.running
        reported = _Reported(state.job.keys, state.parts, len(running))
        for job in state.jobs:
            if self._states.pop(job, None) is not None:
                self._context.close_job(job)
                if job in running:
                    self._reported[job.link, job.seq.request_id] = reported
                    if len(self._reported) > MAX_REPORTED:
                        del self._reported[next(iter(self._reported))]


def _take_leases(
    keys: Sequence[bytes], parts: Sequence[_StorePart], told: int
) -> tuple[list[bytes], list[tuple[bytes, int]]]:
    """Return the keys of leased blocks behind the first `told`, and those of further groups with an id, once each."""
    taken, tails = list[bytes](), list[tuple[bytes, int]]()
    for part in parts:
        kept = max(0, told - part.first)
        leased = {
            place: keys[part.first + place]
            for place, outcome in enumerate(part.leased)
            if place >= kept and outcome is Outcome.OK
        }
        taken += leased.values()
        tails += [(leased[place], block) for place, block in part.tails if place in leased]
        part.leased = part.leased[:kept]
    return taken, tails
