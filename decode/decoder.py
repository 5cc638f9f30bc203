"""The decode role: reserve, load, admit, run, release.

    submit ─► reserve blocks for the prompt and one more token, in order of rank (local prefix hits are kept)
           ─► load what each HandOver announces, chunk by chunk ─► once nothing is missing, or no more will come:
           join the running batch with the first token ─► one token per step ─► finished: blocks are released

A block that cannot be loaded is computed here, with everything after it. A request without a hand-over (phase BOTH) is
fetched and computed as on prefill.

What is computed here and worth it is stored back, so that another turn of the conversation finds it: full blocks, a few at
a time, without a lease, since nobody waits for them. The engine waits for none of these stores either.
"""

import math
from bisect import insort
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial

from pdserve.decode.layout_converter import ConvertedPrompt
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles.fetcher import Fetcher
from pdserve.roles.job import InstanceContext, Job
from pdserve.roles.transfers import Transfers

STORE_BACK_BLOCKS = 8  # in one store, unless it is the last: a step starts few of them


@dataclass(eq=False)
class _Decode:
    """What the role remembers of one job.

    Attributes:
        available: leading blocks of the prompt that are in the KV store.
        coming: leading blocks that are there, or being stored.
        requested: leading blocks that are here, or for which a load was started.
        outrun: a load did not find all that is being stored. The rest is loaded when it is there.
        broken: the first block that a load did not bring, or None.
        final: no more blocks will become available.
        reserved, started: it has its blocks; it has joined the engine.
        worth: how many leading tokens are worth storing back.
        kept: leading blocks that are in the store, or on their way there.
        converted: where the blocks come from if prefill's are of another layout; `available` counts ours all the same.
    """

    job: Job
    available: int = 0
    coming: int = 0
    requested: int = 0
    follow_missed: bool = False
    first_bad_block: int | None = None
    final: bool = False
    first_token: int | None = None
    tickets: list[bytes] = field(default_factory=list)
    reserved: bool = False
    started: bool = False
    store_limit: float = 0
    stored_blocks: int = 0
    converted: ConvertedPrompt | None = None


class Decoder:
    def __init__(
        self,
        engine: Engine,
        connector: Connector,
        transfers: Transfers,
        fetcher: Fetcher,
        context: InstanceContext,
        store_generated: str,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._fetcher = fetcher
        self._context = context
        self._store_generated = store_generated
        self._decodes: dict[Job, _Decode] = {}
        self._unreserved: list[_Decode] = []  # in order of rank

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks yet."""
        return len(self._unreserved)

    def submit(self, job: Job, converted: ConvertedPrompt | None = None) -> None:
        decode = self._decodes[job] = _Decode(job, store_limit=self._store_limit(job), converted=converted)
        if job.phase == pb.BOTH:
            decode.started = True
            self._fetcher.fetch(job, cancelled=lambda: self._end(decode))
        else:
            job.keys = job.seq.given_keys()
            insort(self._unreserved, decode, key=lambda one: one.job.seq.rank)
            self.reserve()

    def hand_over(self, job: Job, message: pb.HandOver) -> None:
        """What is in the store by now, the first token, or that no more will come."""
        decode = self._decodes.get(job)
        if decode is None:
            return
        blocks = message.num_blocks if decode.converted is None else decode.converted.covered(message.num_blocks)
        decode.available = max(decode.available, blocks)
        decode.final = decode.final or message.final
        if decode.started:  # they are here already
            self._release(decode, message.tickets)
            return
        if decode.converted is None and self._transfers.follows:
            decode.coming = max(decode.coming, message.coming)
        decode.tickets += message.tickets
        if message.HasField("first_token"):
            decode.first_token = message.first_token
        self._proceed(decode)

    def reserve(self) -> None:
        """Gives blocks to the requests that wait for them, in order of rank. Call it when blocks were freed."""
        while self._unreserved:
            decode = self._unreserved[0]
            seq = decode.job.seq
            # Beside those who wait, or newcomers would take every block that a preempted sequence waits for.
            usable = seq.num_given // seq.block_size
            if not self._engine.scheduler.reserve(seq, usable, seq.num_given + 1, beside=True):
                return
            self._unreserved.pop(0)
            decode.reserved = True
            decode.requested = seq.num_registered
            decode.job.stamp(Stage.RESERVED, self._context.now())
            self._proceed(decode)

    def advanced(self, job: Job, sampled: bool, step_started: float) -> None:
        """After a step that computed part of this sequence."""
        seq, now, decode = job.seq, self._context.now(), self._decodes[job]
        if job.phase == pb.BOTH:
            job.stamp(Stage.PREFILL_STARTED, step_started)
        # Blocks that leave the window cannot wait for others.
        self._store_back(
            decode, 1 if self._engine.scheduler.num_unseen(seq) > decode.stored_blocks else STORE_BACK_BLOCKS
        )
        if not sampled:
            return
        if len(seq) - seq.num_given == 1:
            job.stamp(Stage.FIRST_TOKEN, now)
            job.report_prompt_sources()
            if job.phase == pb.BOTH:
                self._context.count_sources(job)
        job.stamp(Stage.DECODE_STARTED, now)
        job.report_token()
        self._context.count("generation_tokens", 1)
        reason = seq.finish_reason()
        if reason is not None:
            job.finish(reason, now)
            self._store_back(decode)
            self._end(decode)

    def returned(self, job: Job) -> None:
        """A sequence that was preempted has blocks again: what the store has of it need not be computed."""
        decode = self._decodes[job]
        self._fetcher.fetch(job, cancelled=lambda: self._end(decode))

    def cancel(self, job: Job) -> None:
        """Stops; blocks that a load is writing to are let go when it ends."""
        decode = self._decodes.get(job)
        if decode is not None:
            job.over = True
            if decode.started:
                self._store_back(decode)  # the router may have found a stop string, or moved the request
            self._end(decode)

    def _proceed(self, decode: _Decode) -> None:
        """Starts the next load or, if nothing is missing or will come, the decoding."""
        if not decode.reserved or decode.started or decode.job.over:
            return
        if decode.follow_missed and decode.job.transfers > 0:
            return  # what follows may be on its way to the same rows
        decode.follow_missed = False
        while decode.first_bad_block is None and decode.available > decode.requested:
            self._load(decode)
        if decode.first_bad_block is None:
            self._follow(decode)
        if decode.job.transfers > 0:
            return
        complete = decode.requested == len(decode.job.keys) and decode.first_token is not None
        if decode.final or (complete and decode.first_bad_block is None):
            self._start(decode)

    def _load(self, decode: _Decode) -> None:
        job, first = decode.job, decode.requested
        stop = min(decode.available, first + self._transfers.largest)
        keys, blocks = job.keys[first:stop], job.seq.blocks(first, stop)
        decode.requested = stop
        then, tickets = partial(self._loaded, decode, first), tuple(decode.tickets)
        self._transfers.load(job, keys, blocks, then, tickets, source=decode.converted)

    def _follow(self, decode: _Decode) -> None:
        """Starts to load what is being stored, in the pieces in which it is."""
        job = decode.job
        for first, stop in self._transfers.pieces(decode.requested, max(decode.requested, decode.coming)):
            decode.requested = stop
            then = partial(self._followed, decode, first)
            self._transfers.follow(job, job.keys[first:stop], job.seq.blocks(first, stop), then)

    def _followed(self, decode: _Decode, first: int, result: Result) -> None:
        if result.leading < len(result.outcomes) and result.outcomes[result.leading] is Outcome.MISSING:
            decode.requested, decode.coming = min(decode.requested, first + result.leading), 0
            decode.follow_missed = True
            result = replace(result, outcomes=result.outcomes[: result.leading])
        self._loaded(decode, first, result)

    def _loaded(self, decode: _Decode, first: int, result: Result) -> None:
        job = decode.job
        if job.over:
            self._end(decode)
            return
        if result.outcomes:
            job.moved(result, self._context.now())
        if result.leading < len(result.outcomes):
            first_bad_block = first + result.leading
            decode.first_bad_block = (
                first_bad_block if decode.first_bad_block is None else min(first_bad_block, decode.first_bad_block)
            )
        self._proceed(decode)

    def _start(self, decode: _Decode) -> None:
        """Joins the engine with the KV that is here; what is missing is computed like a preempted sequence's."""
        job, seq = decode.job, decode.job.seq
        # Blocks that came too late may lie before the broken one: then they are not here either.
        here = decode.requested if decode.first_bad_block is None else min(decode.first_bad_block, decode.requested)
        seq.num_computed = min(here * seq.block_size, seq.num_given)
        if decode.first_token is not None:
            seq.tokens.append(decode.first_token)
        elif seq.num_computed == seq.num_given:
            self._reopen_prompt(seq)
        seq.num_loaded = max(0, seq.num_computed - seq.num_local_hit)
        decode.stored_blocks = seq.num_computed // seq.block_size
        if seq.num_loaded and decode.converted is not None and not decode.converted.exact:
            # KV that was rounded to another dtype is not what our own prefill would compute, and neither is what is
            # computed on top of it. It is good enough for this request, which asked for it, but under its keys others
            # would take it for exact: it is neither found in the pool nor stored back.
            seq.exact, decode.store_limit = False, 0
        decode.started = seq.admitted = True
        self._engine.register_full_blocks(seq)
        self._release(decode, decode.tickets)
        self._context.count_sources(job)
        job.report_transfer(self._engine.layout.block_bytes)
        job.stamp(Stage.KV_READY, self._context.now())
        self._engine.add(seq)

    def _release(self, decode: _Decode, tickets: Many[bytes]) -> None:
        """Ends the leases, of keys once all is stored: a prefill that is told to stop before that ends those itself."""
        keys = decode.job.keys[: decode.available] if decode.final else ()
        if keys or tickets:
            (decode.converted or self._connector).release(keys, tickets=tuple(tickets))

    def _reopen_prompt(self, seq: Sequence) -> None:
        """Prefill died before it could say the first token: the prompt's end is computed again for its logits."""
        if seq.num_given % seq.block_size:
            seq.num_computed -= 1
            return
        # The last block is full and may be shared: it makes way for the spare one, which nobody else can see.
        self._engine.pool.release([seq.block_ids.pop(seq.num_given // seq.block_size - 1)])
        seq.num_computed -= seq.block_size
        seq.num_registered = min(seq.num_registered, seq.num_computed // seq.block_size)

    def _store_limit(self, job: Job) -> float:
        """Leading tokens whose KV, if it is computed here, somebody may want to load later."""
        if self._store_generated == "off" or self._connector.in_place:
            return 0
        return math.inf if self._store_generated == "on" or job.multi_turn else job.seq.num_given

    def _store_back(self, decode: _Decode, at_least: int = 1) -> None:
        """Stores the full blocks that were computed here since the last time, if these are many enough.

        They never wait for room: it is better to lose them than to delay what somebody waits for.
        """
        job, seq, first = decode.job, decode.job.seq, decode.stored_blocks
        if decode.store_limit and seq.num_dropped > first:  # there was no room while it had them
            self._context.count("store_back_skipped_blocks", seq.num_dropped - first)
            decode.store_limit = 0
        ready = int(min(seq.num_computed, decode.store_limit)) // seq.block_size
        stop = min(ready, first + min(self._transfers.room, self._transfers.largest))
        if job.over:
            self._context.count("store_back_skipped_blocks", max(0, ready - stop))
        if stop - first < at_least:
            return
        decode.stored_blocks = stop
        keys, blocks = seq.full_keys()[first:stop], seq.blocks(first, stop)
        self._transfers.store(job, keys, blocks, 0.0, lambda result: self._stored_back(decode, result))

    def _stored_back(self, decode: _Decode, result: Result) -> None:
        if result.leading < len(result.outcomes):
            decode.store_limit = 0  # nobody finds what comes after a gap
        if decode.job.over:
            self._end(decode)

    def _end(self, decode: _Decode) -> None:
        """Releases the sequence's blocks; the job is forgotten when no transfer is under way any more."""
        job = decode.job
        if job not in self._decodes:
            return
        if decode in self._unreserved:
            self._unreserved.remove(decode)
        if job.seq.block_ids or decode.started:
            self._engine.remove(job.seq)
        if job.transfers == 0:
            if not decode.started:
                self._release(decode, decode.tickets)  # what was stored for it, nobody will load
            elif decode.coming and not decode.final:  # it followed, and was done before prefill's last news came
                self._connector.release(job.keys)
            del self._decodes[job]
            self._context.close_job(job)
