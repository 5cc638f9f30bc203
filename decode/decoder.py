"""Decode role: loads the KV that a prefill instance has stored, and generates the tokens after the first one.

The life of one request (phase DECODE) on the decode instance:

    hand_over ─► the router reports blocks that prefill has stored: take blocks for these and load them, chunk by chunk.
                 Where the connector supports it, follow: start to load blocks while prefill is still storing them
              ─► the router reports the first token, and finally that no more blocks will come
           ─► all blocks loaded, or no more to come: join the engine's running batch with the first token
    on_step ─► report the tokens of each step, until the request finishes and its blocks are released

A prompt gets its first blocks once the pool has room for all of it and one more token, in the scheduler's order; prefix hits
are kept. The blocks that it does not have yet are promised to it: only running sequences may use them in the meantime. Until
then its KV waits in the store. If every layer has an attention window, it gets no blocks but those that the window of the
last prompt token reaches.

While a prompt waits for room, the leases of what is stored are prolonged in good time. With a connector that cannot do that,
the store may evict blocks once their leases have ended; they are computed here.

Of several choices of one prompt, the first one loads it. The others share its KV when it joins the engine, and join once they
have their own first tokens. If it ends before, the next one takes its place.

If a block cannot be loaded, the engine computes it and everything after it, or the whole prompt if the block's own window
reaches blocks that were not reserved. A request without a hand-over (phase BOTH) has no reservation: its prefix is fetched
from the store and the rest computed here, as in the prefill role.

Full blocks that were computed here and are worth it are stored back, so that the next turn of a conversation finds them: a
few blocks at a time, and without a lease, since no instance waits for them. The engine never waits for these stores.
"""

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace
from functools import partial

from pdserve.beam_search import BeamSearch
from pdserve.decode.layout_converter import ConvertedPrompt
from pdserve.decode.load_machine import Action, Load, LoadMachine, Start
from pdserve.engine.engine import Engine
from pdserve.engine.memory.groups import stored_tails
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Accepted
from pdserve.errors import RequestError
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Fetcher, Tails, Transfers

STEPS_PER_REPORT = 16  # of a beam search, so that routers see its progress
TOO_FEW_ANSWERS = (
    "the beam search has found {found} of {due} answers: what the request allows leaves too few tokens; lower n and "
    "beam_width, or exclude less"
)
LEASE_PARTS = 3  # of a lease, after each of which it is prolonged
MAX_EARLY = 32  # requests that ended before prefill's final report, of which that is expected
STORE_BACK_BLOCKS = 8  # per store, except for the last one, so that a step starts few stores


@dataclass(eq=False)
class _Leases:
    """The leases of a prompt's stored blocks. Its choices share them, and end them once: other prompts may lease the same.

    Attributes:
        num_choices: those that have not ended.
        ended: whether the leases have been ended.
    """

    num_choices: int
    ended: bool = False


@dataclass(frozen=True)
class _Early:
    """The leases of a request that ended before prefill's final report, which may be on its way.

    Attributes:
        leases: those of the prompt.
        keys: of the prompt's blocks.
        tails: key and id of what prefill stores in further groups.
    """

    leases: _Leases
    keys: list[bytes]
    tails: list[tuple[bytes, int]]


@dataclass(eq=False)
class _DecodeState:
    """State of one job in the decode role.

    Attributes:
        loading: decides which blocks of the prompt to load, and when to join the engine.
        leases: of the prompt's stored blocks.
        first_token: sampled by prefill; None until it is reported.
        tickets: of the blocks to load, from prefill's connector.
        store_limit: leading tokens, of prompt and output, that are worth storing back.
        submitted_blocks: leading blocks of prompt and output that came from the store or were passed to the connector.
        converted: source of the blocks if prefill's layout differs.
        followers: states of the other choices of the prompt that this one loads.
        loader: state of the choice that loads the prompt of this one, or has loaded it.
        has_heir: it has ended, and one of its followers loads the prompt instead.
        unprolonged: how often its leases should have been prolonged while it waited, and could not be.
    """

    job: Job
    loading: LoadMachine
    leases: _Leases
    first_token: int | None = None
    tickets: list[bytes] = field(default_factory=list)
    store_limit: float = 0
    submitted_blocks: int = 0
    converted: ConvertedPrompt | None = None
    followers: "list[_DecodeState]" = field(default_factory=list)
    loader: "_DecodeState | None" = None
    has_heir: bool = False
    unprolonged: int = 0

    def lead(self, followers: "list[_DecodeState]") -> None:
        self.followers = followers
        for follower in followers:
            follower.loader = self


class Decoder:
    """The decode role of an instance. Runs on the engine thread.

    Args:
        store_generated: which blocks to store back: `on` (all), `off` (none), or `auto` (those of the prompt, and of the
            output if another turn may follow).
        lease_seconds: for which the leases of KV that waits in the store are prolonged.

    Attributes:
        waiting: requests that have no blocks yet, by sequence; of several choices the one that loads the prompt.
        unreserved: those of which there is KV.
        cramped: requests of which there is more KV than they have blocks for, likewise.
    """

    def __init__(
        self,
        engine: Engine,
        connector: Connector,
        transfers: Transfers,
        fetcher: Fetcher,
        context: InstanceContext,
        store_generated: str,
        lease_seconds: float,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._fetcher = fetcher
        self._context = context
        self._store_generated = store_generated
        self._lease_seconds = lease_seconds
        self._leases_due_at = -math.inf
        self._states: dict[Job, _DecodeState] = {}
        self.waiting: dict[Sequence, _DecodeState] = {}
        self.unreserved: dict[Sequence, _DecodeState] = {}
        self.cramped: dict[Sequence, _DecodeState] = {}
        self._early: dict[tuple[str, str], _Early] = {}  # by router and id

    def submit(self, job: Job, converted: ConvertedPrompt | None = None, others: SequenceABC[Job] = ()) -> None:
        """Start a request: wait for its KV or, in phase BOTH, fetch its prefix and queue it in the engine.

        Args:
            converted: source of the prompt's blocks, if prefill's layout differs.
            others: further choices of the same prompt.
        """
        if job.phase == pb.DECODE:
            job.keys = job.seq.kv.initial_keys
        limit: float = job.seq.kv.num_initial  # tokens whose KV later requests may load, if it is computed here
        if self._store_generated == "off" or self._connector.in_place:
            limit = 0
        elif self._store_generated == "on" or job.multi_turn:
            limit = math.inf
        leases = _Leases(1 + len(others))
        for one in (job, *others):
            loading = LoadMachine(len(job.keys), self._transfers.max_transfer_blocks, self._transfers.split)
            one.keys = job.keys
            self._states[one] = _DecodeState(one, loading, leases, store_limit=limit, converted=converted)
        state, followers = self._states[job], [*map(self._states.__getitem__, others)]
        if job.phase == pb.BOTH:
            for one_state in (state, *followers):
                one_state.loading.skip()
            if others:
                job.seq.lead([other.seq for other in others])
            self._fetcher.fetch(job, on_cancelled=lambda: self._end(state))
        else:
            self.waiting[job.seq] = state
            if followers:
                state.lead(followers)

    def hand_over(self, job: Job, message: pb.HandOver) -> None:
        """Handle the progress of prefill: stored blocks, the first token, or that no more blocks will come."""
        state = self._states.get(job)
        if state is None:
            return
        converted, loading = state.converted, state.loading
        has_started = loading.has_started
        if not has_started:
            state.tickets += message.tickets
        if message.HasField("first_token"):
            state.first_token = message.first_token
        actions = loading.reported(
            message.num_blocks if converted is None else converted.num_complete_blocks(message.num_blocks),
            message.coming if converted is None and self._transfers.follows else 0,
            is_final=message.final,
            has_first_token=message.HasField("first_token"),
        )
        if has_started:  # otherwise `_start` ends them, when the loads no longer need them
            self._end_leases(state, message.tickets)
        self._carry_out(state, actions)
        if loading.lacks_room:
            self.cramped[job.seq] = state
        elif job.seq in self.waiting:
            self.unreserved[job.seq] = state
        else:
            return
        self.reserve()

    def hand_over_late(self, link: str, message: pb.HandOver) -> None:
        """Handle prefill's report of a request that has ended here: with the final one, the leases are to be ended here."""
        early = self._early.pop((link, message.request_id), None) if message.final else None
        if early is not None and not (early.leases.ended or early.leases.num_choices):
            early.leases.ended = True
            keys = early.keys[: message.num_blocks]
            told = {*keys}
            self._transfers.end_leases(keys, [one for one in early.tails if one[0] in told])

    def reserve(self) -> None:
        """Give blocks to requests whose KV is there. To be called whenever blocks were freed.

        Those that have some get more, as many as are free; then those without any, in the scheduler's order.
        """
        scheduler, pool = self._engine.scheduler, self._engine.pool
        for seq, state in [*self.cramped.items()]:
            if state.loading.lacks_room:
                seq.kv.take_promised(pool, stop=state.loading.wanted)
                self._carry_out(state, state.loading.grown(len(seq.kv.block_ids)))
            if not state.loading.lacks_room:
                del self.cramped[seq]
        seqs = [*self.unreserved] if self._engine.adapters is None else self._with_slots()
        while seqs:
            seq = scheduler.unreserved = min(seqs, key=scheduler.order())
            # The last token counts as not computed, because it is computed again if prefill fails before the first token. A
            # state has it in any case: then, the whole prompt is.
            coming = seq.kv.num_initial - (0 if pool.has_states else 1)
            first = scheduler.num_out_of_window(coming)
            # Respect the queue, or new requests would take every block that a preempted sequence waits for.
            # In further groups, hits have what the token behind them reaches: it may be that last one.
            max_hit_blocks = (coming if pool.tail_groups else seq.kv.num_initial) // seq.kv.block_size
            state, num_tokens = self.unreserved[seq], seq.kv.num_initial + 1
            now = max(1, state.loading.wanted)
            if not scheduler.reserve(
                seq, max_hit_blocks, num_tokens, first_block=first, respect_queue=True, num_now=now, num_coming=coming
            ):
                return
            seqs.remove(seq)
            del self.unreserved[seq], self.waiting[seq]
            for one in (state, *state.followers):
                one.job.stamp(Stage.RESERVED, self._context.now())
            self._carry_out(state, state.loading.reserved(seq.kv.num_registered, len(seq.kv.block_ids)))
        scheduler.unreserved = None

    def prolong_leases(self) -> None:
        """Prolong the leases of KV that waits for room here, thrice in their time. To be called often."""
        now = self._context.now()
        if now < self._leases_due_at or not self._lease_seconds:
            return
        self._leases_due_at = now + self._lease_seconds / LEASE_PARTS
        for state in (*self.cramped.values(), *self.unreserved.values()):
            keys = state.job.keys[: state.loading.available]
            if not self._connector.capabilities.prolongs or state.converted is not None:
                state.unprolonged += 1
                if state.unprolonged == LEASE_PARTS + 1:
                    self._context.count("kv_lease_overruns", 1)
            elif keys:
                self._connector.prolong(keys, lease_s=self._lease_seconds, tickets=tuple(state.tickets))
                self._context.count("kv_leases_prolonged", len(keys))

    def _with_slots(self) -> list[Sequence]:
        """Return those of which there is KV, without those that wait for the slots of their adapters."""
        adapters, seqs = self._engine.adapters, list[Sequence]()
        for seq, state in self.unreserved.items():
            siblings = (follower.job.seq for follower in state.followers)
            if seq.adapter is None or (adapters is not None and adapters.acquire(seq, *siblings)):
                seqs.append(seq)
        return seqs

    def on_step(self, job: Job, accepted: Accepted, step_started: float) -> None:
        """Report the new tokens, if any, after an engine step that computed part of the sequence."""
        seq, now, state = job.seq, self._context.now(), self._states[job]
        if job.phase == pb.BOTH:
            job.stamp(Stage.PREFILL_STARTED, step_started)
        state.submitted_blocks = max(state.submitted_blocks, seq.kv.num_shared // seq.kv.block_size)
        # Blocks that are about to leave the attention window must be stored now, even one at a time.
        is_urgent = self._engine.scheduler.num_out_of_window(seq.kv.num_computed) > state.submitted_blocks
        if seq.kv.tails:
            is_urgent |= seq.kv.tails.drop_soon(
                self._engine.pool, state.submitted_blocks, seq.kv.num_initial, seq.kv.num_computed
            )
        is_urgent |= seq.group is not None and seq.kv.num_uncomputed == 0  # the search is about to release them
        self._store_back(state, 1 if is_urgent else STORE_BACK_BLOCKS)
        if seq.group is not None and seq.group.search.num_steps:
            self._report_search(state, seq.group.search)
        if seq.features and job.report_embedding(now):
            job.report_prompt_sources()
            job.count_prompt_sources(self._context)
            self._end(state)
        if not accepted.tokens:
            return
        if len(seq) - seq.kv.num_initial == len(accepted.tokens):
            job.report_prompt_sources()
            if job.phase == pb.BOTH:
                job.count_prompt_sources(self._context)
        job.stamp(Stage.DECODE_STARTED, now)
        job.report_tokens(accepted, now)
        if job.ended:
            self._store_back(state)
            self._end(state)

    def _report_search(self, state: _DecodeState, search: BeamSearch) -> None:
        """Report a step of a beam search. It has no tokens before its end, since later ones may change every choice."""
        job, now = state.job, self._context.now()
        if search.num_steps == 1 and job.phase == pb.BOTH:
            job.report_prompt_sources()
            job.count_prompt_sources(self._context)
        job.stamp(Stage.DECODE_STARTED, now)
        if search.is_over or search.num_steps % STEPS_PER_REPORT == 1:
            job.pending_output().searching = True
        if search.is_over:
            due = job.seq.sampling.num_answers
            answers = search.hypotheses(due)
            self._context.count("generation_tokens", sum(len(answer.token_ids) for answer in answers))
            if len(answers) < due:
                job.reject(RequestError(TOO_FEW_ANSWERS.format(found=len(answers), due=due), kind="too_few_answers"))
            else:
                job.report_answers(answers)
                job.finish("stop", now)
            self._end(state)

    def on_resumed(self, job: Job) -> None:
        """Reload a preempted sequence that has blocks again, as far as the store has it."""
        state = self._states[job]
        self._fetcher.fetch(job, on_cancelled=lambda: self._end(state))

    def steps_until_store(self, job: Job) -> float:
        """Return how many more tokens a decoding job computes before it stores blocks back; infinite if only at its end.

        What is about to leave a window is stored at once, so that with windows it may be each full block.
        """
        state, size = self._states[job], job.seq.kv.block_size
        drops = self._engine.scheduler.window is not None or bool(job.seq.kv.tails)
        due = (state.submitted_blocks + (1 if drops else STORE_BACK_BLOCKS)) * size
        return due - job.seq.kv.num_computed if due <= state.store_limit else math.inf

    def cancel(self, job: Job) -> None:
        """Stop the request. Blocks that a load is writing to are released when it ends."""
        state = self._states.get(job)
        if state is not None:
            job.ended = True
            self._transfers.cancel(job)
            if state.loading.has_started:
                self._store_back(state)  # still useful: the router cancels at a stop string, or to migrate the request
            self._end(state)

    def _carry_out(self, state: _DecodeState, actions: list[Action]) -> None:
        job = state.job
        for action in actions:
            if isinstance(action, Start):
                self._start(state, action)
                continue
            keys, blocks = job.keys[action.first : action.stop], job.seq.kv.blocks(action.first, action.stop)
            on_done = partial(self._on_loaded, state, action)
            tails = job.seq.kv.tails.blocks(action.first, action.stop) if job.seq.kv.tails else ()
            if action.follows:
                self._transfers.follow(job, keys, blocks, on_done, tails)
            else:
                tickets = tuple(state.tickets)
                self._transfers.load(job, keys, blocks, on_done, tickets, source=state.converted, tails=tails)

    def _on_loaded(self, state: _DecodeState, load: Load, result: Result) -> None:
        job, leading = state.job, result.leading
        missed = leading < len(result.outcomes) and result.outcomes[leading] is Outcome.MISSING
        actions = state.loading.loaded(load, leading, missed=missed)
        if job.ended:
            self._end(state)
            return
        if load.follows and missed:  # no failure: these blocks are loaded later
            result = replace(result, outcomes=result.outcomes[:leading])
        if result.outcomes:
            job.record_transfer(result, self._context.now())
        self._carry_out(state, actions)

    def _start(self, state: _DecodeState, start: Start) -> None:
        """Join the engine with the KV that was loaded. The engine computes what is missing, as for a preempted sequence."""
        job, seq = state.job, state.job.seq
        self._end_leases(state, state.tickets)  # all loads have ended
        num_tokens = min(start.num_blocks * seq.kv.block_size, seq.kv.num_initial)
        pool, is_lost = self._engine.pool, bool(seq.kv.tails) and seq.kv.tails.lack(self._engine.pool, num_tokens)
        is_lost |= pool.has_states and state.first_token is None and num_tokens == seq.kv.num_initial
        if is_lost or self._engine.scheduler.num_out_of_window(num_tokens) < seq.kv.num_dropped:
            num_tokens = 0  # the next token attends to blocks that were not reserved
            seq.kv.give_up_blocks(pool)
        seq.kv.mark_loaded(num_tokens)
        if seq.kv.num_loaded and state.converted is not None and not state.converted.exact:
            # KV that was rounded otherwise differs from what our own prefill would compute, and so does everything computed
            # from it. It is good enough for this request, as the deployer allowed it, but other requests must not find it
            # under its keys: it is neither cached in the pool nor stored back.
            seq.kv.forbid_caching()
            state.store_limit = 0
            self._context.count("inexact_prompts", 1)
        if state.followers:
            self._share(state, start.num_blocks if num_tokens else 0)
        if state.first_token is None and seq.kv.num_computed == seq.kv.num_initial:
            seq.kv.reopen_prompt()  # prefill failed before the first token
        state.submitted_blocks = seq.kv.num_computed // seq.kv.block_size
        seq.kv.register_full_blocks(self._engine.pool)
        if state.first_token is not None:
            seq.output.append(state.first_token)
        job.report_transfers(self._engine.layout)
        job.stamp(Stage.KV_READY, self._context.now())
        job.count_prompt_sources(self._context)
        self._engine.add(seq)

    def _share(self, state: _DecodeState, num_blocks: int) -> None:
        """Let the other choices of the prompt share the KV of its first `num_blocks`."""
        followers, state.followers = state.followers, []
        for follower in followers:
            follower.job.seq.share(state.job.seq, self._engine.pool)
            follower.store_limit = min(follower.store_limit, state.store_limit)
            self._carry_out(follower, follower.loading.shared(num_blocks))

    def _end_leases(self, state: _DecodeState, tickets: SequenceABC[bytes]) -> None:
        """End the leases of tickets, and of all keys after prefill's final report. Before that they are prefill's, which ends
        them when it is cancelled."""
        if state.loader is not None and state.loader.job in self._states:
            return  # which ends them
        is_due = state.loading.is_final and not state.leases.ended
        keys = state.job.keys[: state.loading.available] if is_due else []
        state.leases.ended |= is_due
        if state.converted is None and keys and self._engine.pool.tail_groups:
            told = {*keys}
            self._transfers.end_leases(keys, [one for one in self._tails(state.job) if one[0] in told], tickets)
        elif keys or tickets:
            (state.converted or self._connector).release(keys, tickets=tuple(tickets))

    def _tails(self, job: Job) -> list[tuple[bytes, int]]:
        """Return key and id of what prefill stores of a prompt in further groups.

        Perhaps some more, which prefill had in its pool: no hand-over waits for such blocks.
        """
        kv, pool = job.seq.kv, self._engine.pool
        tails = stored_tails(pool, kv.tokens[: kv.num_initial], multi_turn=job.multi_turn) if pool.tail_groups else []
        return [(job.keys[index], block) for index, block in tails]

    def _store_back(self, state: _DecodeState, min_blocks: int = 1) -> None:
        """Store the full blocks computed here since the last call, if there are at least `min_blocks`.

        Blocks for which the transfer queue has no room are skipped rather than delaying transfers that requests wait for.
        """
        job, seq, first, pool = state.job, state.job.seq, state.submitted_blocks, self._engine.pool
        if state.store_limit and seq.kv.num_dropped > first:  # there was no room while the sequence held these blocks
            self._context.count("store_back_skipped_blocks", seq.kv.num_dropped - first)
            state.store_limit = 0
        ready = int(min(seq.kv.num_computed, state.store_limit)) // seq.kv.block_size
        stop = ready
        if ready > first:
            stop = min(ready, first + min(self._transfers.free_capacity, self._transfers.max_transfer_blocks))
        if job.ended:
            self._context.count("store_back_skipped_blocks", max(0, ready - stop))
            if pool.has_states and ready == stop:
                # With the last block, which has the state that another turn needs, unless it was dropped.
                first = min(first, max(seq.kv.num_dropped, stop - 1))
        if stop - first < min_blocks:
            return
        state.submitted_blocks = stop
        keys, blocks = seq.kv.full_keys()[first:stop], seq.kv.blocks(first, stop)
        tails: Tails = ()
        if seq.kv.tails:
            tails = seq.kv.tails.answer_blocks(
                pool, first, stop, seq.kv.num_initial, is_end=job.ended and stop == ready
            )
        on_done = partial(self._on_stored_back, state)
        self._transfers.store(job, first, keys, blocks, 0.0, on_done, tails=tails)

    def _on_stored_back(self, state: _DecodeState, result: Result) -> None:
        if result.leading < len(result.outcomes):
            state.store_limit = 0  # a prefix match cannot find blocks after a gap
        if state.job.ended:
            self._end(state)

    def _end(self, state: _DecodeState) -> None:
        """Release the sequence's blocks, and close the job once no transfer is left."""
        job = state.job
        if job not in self._states:
            return
        self.waiting.pop(job.seq, None)
        self.unreserved.pop(job.seq, None)
        self.cramped.pop(job.seq, None)
        if self._engine.scheduler.unreserved is job.seq:
            self._engine.scheduler.unreserved = None
        loading = state.loading
        loading.end()
        if state.loader is not None and state in state.loader.followers:
            state.loader.followers.remove(state)
        elif state.followers and not loading.has_started:
            heir, *others = state.followers
            state.followers, state.has_heir, heir.loader = [], True, None
            heir.lead(others)
            self.waiting[heir.job.seq] = heir
            if heir.loading.is_announced:
                self.unreserved[heir.job.seq] = heir
        if job.seq.kv.block_ids or loading.has_started:
            self._engine.remove(job.seq)
        if job.open_transfers == 0:
            state.leases.num_choices -= 1
            if not loading.has_started and not state.has_heir:
                self._end_leases(state, state.tickets)  # no instance will load what was stored for this request
            if not loading.is_final and job.phase == pb.DECODE and state.converted is None:
                self._early[job.link, job.seq.request_id] = _Early(state.leases, job.keys, self._tails(job))
                if len(self._early) > MAX_EARLY:
                    del self._early[next(iter(self._early))]
            del self._states[job]
            self._context.close_job(job)
