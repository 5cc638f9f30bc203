"""Scheduler with continuous batching and chunked prefill: decides how many tokens of which sequences the next step computes.

All sequences share one budget per step (`budget.py`): a decoding sequence asks for 1 token, a prefilling one for its next
chunk, a preempted one for the tokens whose KV it lost. Nothing else distinguishes them.

Order within a step:
    1. running sequences, decoding ones before prefilling ones;
    2. loaded sequences, which hold blocks already (their KV was loaded, or they are forks), and waiting ones, by rank.
       Prompts do not hold up a sequence that only decodes, and one that lacks blocks does not hold up one that has its own.

A prompt that would fill the rest of a step leaves half of that to shorter ones of its tenant: those that fit into the step or
are at most half as long as what is left of it (for longer ones, sharing costs more time than it saves). The shortest goes
first. So short prompts do not wait for long ones, and long ones take at most twice their time, however many short ones come.

A prompt begins once the pool has room for all of it. It takes its blocks as it is computed; the others are promised to it.
Others go before one that lacks blocks `MAX_OVERTAKEN` times at most: shorter ones, and later ones before a hand-over.

When a running sequence needs a block and none is free, the running sequence of the highest rank is preempted. Its blocks are
copied to host memory if there is room and copying takes less time than computing them again; otherwise they are recomputed
later, except for what is still in the prefix cache or is worth loading from the store.

Several sequences of one request have the same rank. Those of another request are preempted together.

Tenants share the instance by weight. The *level* of a tenant is the number of its running sequences, divided by its weight.
While several tenants have sequences here, those of the lowest level go first, whatever their rank. If one of them finds no
slot or no room, the tenant of the highest level gives way, with its newest sequence that has had its 32 tokens since it last
did so, as long as the other's level stays below: without slots to spare, levels become equal, and no slot goes to and fro. A
sequence that loses its slot keeps its blocks until they are needed. A step is not longer for a tenant than its share asks
for, and hardly longer than alone for one that has used less than its share lately (`budget.py`); what then is left out of it
takes turns.

A sequence is left out of a step while it waits for the store, or for its grammar's mask. For the latter, it lends its slot. A
beam that waits for others of its search has none: searches of several tenants would keep the slots that the others wait for.

Rank is the order of arrival. A level of priority counts as `ARRIVALS_PER_PRIORITY` arrivals, which bounds how many later
requests can overtake one of a lower priority: no sequence starves.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from itertools import count, islice
from operator import attrgetter, itemgetter
from typing import Any

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import SwappedKV, pages_behind
from pdserve.engine.memory.swap_space import SwapSpace
from pdserve.engine.scheduling.budget import Credit, StepBudget
from pdserve.engine.scheduling.levels import Order, giving_way, levels_of, place_alone, precedes, tokens_now
from pdserve.engine.scheduling.preemption import Preemption
from pdserve.engine.sequence import TURN, Feature, Sequence
from pdserve.engine.step import SchedulerOutput, StepPlan
from pdserve.request import ARRIVALS_PER_PRIORITY, SamplingParams, Tenant

Queues = tuple[list[Sequence], Sequence | None, Order]  # loaded ones in order, the first waiting one, and the order
Size = tuple[int, int, int, Sequence]  # of one without blocks: tokens to compute, rank, number in the order of queueing
MAX_OVERTAKEN = 64  # how often others go before one that lacks blocks
MAX_PREEMPTIONS = 32  # of a sequence that may still have hits in pages of several blocks
_RANK, _TURN, _FIRST = attrgetter("rank"), attrgetter("turn"), itemgetter(0)
_NO_COPY = SwappedKV(0, 0, [])  # of a sequence that was not swapped


class Scheduler:
    """Queues of sequences over one block pool.

    Args:
        window: attention window in tokens, the token itself included, that holds for every layer; None if some layer
            attends to all tokens.
        host_pool: block ids in host memory, for swapping.
        itl_target: seconds between two tokens of a decoding sequence that prompts in the same step should not exceed.
        refetch_preempted: return resumed sequences to their owner (`SchedulerOutput.resumed`), which looks for their KV in
            the store.
        grows_ahead: give decoding sequences the block of the token after the next one, too, while there are enough.

    Attributes:
        costs: forecasts of swapping and computing, which the owner replaces by newer ones.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        swap_space: KV of preempted sequences in host memory.
        unreserved: the next sequence that waits for `reserve`, outside of the queues; None if there is none.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        host_pool: BlockPool | None = None,
        itl_target: float | None = None,
        refetch_preempted: bool = False,
        grows_ahead: bool = False,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.swap_space = SwapSpace(host_pool)
        self.costs = Costs()
        self.itl_target = itl_target
        self.refetch_preempted = refetch_preempted
        self.grows_ahead = grows_ahead
        # Queues, each in order of rank.
        self.waiting: list[Sequence] = []
        self.loaded: list[Sequence] = []  # these hold blocks
        self.running: list[Sequence] = []
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self.num_pauses = 0
        self.unreserved: Sequence | None = None
        self._by_tenant: dict[Tenant, dict[Sequence, None]] = {}  # all, in the order in which they came
        self._beams = set[Sequence]()
        self._sizes: dict[Sequence, Size] = {}  # of those that wait
        self._by_size: dict[Tenant, list[Size]] = {}  # the same, in order
        self._numbers = count()
        self._credit = Credit()
        self._num_steps = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with or without blocks."""
        self._by_tenant.setdefault(seq.tenant, {})[seq] = None
        if seq.group is not None:
            self._beams.add(seq)
        if seq.kv.block_ids:
            insort(self.loaded, seq, key=_RANK)
        else:
            self.wait(seq, len(seq) - len(self.pool.match(seq.usable_keys)) * self.pool.block_size)

    def wait(self, seq: Sequence, num_tokens: int) -> None:
        """Queue a sequence without blocks, of which that many tokens are to be computed."""
        insort(self.waiting, seq, key=_RANK)
        self._sizes[seq] = num_tokens, seq.rank, next(self._numbers), seq
        insort(self._by_size.setdefault(seq.tenant, []), self._sizes[seq])

    def _end_wait(self, seq: Sequence) -> None:
        """Remove a sequence from those that wait."""
        self.waiting.remove(seq)
        by_size = self._by_size[seq.tenant]
        del by_size[bisect_left(by_size, self._sizes.pop(seq))]

    def fork(
        self, seq: Sequence, request_id: str, sampling: SamplingParams, features: tuple[Feature, ...] = ()
    ) -> Sequence:
        """Queue and return a copy of a sequence that shares all KV computed so far. Later writes are copy-on-write."""
        fork = seq.fork(self.pool, request_id, sampling, features)
        self.add(fork)
        return fork

    def remove(self, seq: Sequence) -> None:
        """Dequeue a finished or aborted sequence and release its blocks."""
        for queue in (self.running, self.loaded):
            if seq in queue:
                queue.remove(seq)
        if seq in self._sizes:
            self._end_wait(seq)
        seq.kv.release_blocks(self.pool)
        self._beams.discard(seq)
        if seq.kv.swapped is not None:
            self.swap_space.discard(seq)
        if seq in (of_tenant := self._by_tenant.get(seq.tenant, {})):
            del of_tenant[seq]
            if not of_tenant:
                del self._by_tenant[seq.tenant]
                self._by_size.pop(seq.tenant, None)

    def order(self) -> Callable[[Sequence], Any]:
        """Return the order of sequences in all queues, as a key: the level of the tenant if it has rivals, and the rank."""
        if not self._has_rivals:
            return _RANK
        levels = levels_of(self.running)
        return lambda seq: (levels.get(seq.tenant, 0.0), seq.rank)

    @property
    def _has_rivals(self) -> bool:
        """True if several tenants have sequences here. Alone, a tenant has the order of rank, and no limits."""
        if self.unreserved is None or self.unreserved.tenant in self._by_tenant:
            return len(self._by_tenant) > 1
        return len(self._by_tenant) > 0

    def schedule(self, *, pause_storing: bool = False, late: AbstractSet[Sequence] = frozenset()) -> SchedulerOutput:
        """Decide the next step. It contains at least one sequence whenever one can run.

        Args:
            pause_storing: leave out sequences whose KV is stored as it is computed.
            late: further ones to leave out, since the masks of their grammars are not there.
        """
        self._num_steps += 1
        if not self._by_tenant:
            return SchedulerOutput()
        output = SchedulerOutput(storing_paused=pause_storing and any(seq.stores_kv for seq in self.sequences()))
        preemption, before = Preemption(self, output), self.running[:]
        if output.storing_paused or late:
            output.late = {seq for seq in self.sequences() if seq in late}
            output.left_out = output.late | {seq for seq in self.sequences() if pause_storing and seq.stores_kv}
            preemption.lend_slots()
        if self._beams:
            for seq in [one for one in self.running if one.awaits_beams]:
                preemption.take_slot(seq)
        budget = self._schedule_running(output, preemption)
        if not output.preempted:
            self._admit(output, budget, preemption)
            if self._has_rivals and not (output.swap_in or output.paused):
                self._make_room(preemption)
        if self.pool.num_promised:
            for seq, count in [*output.plan.counts.items()]:
                output.plan.counts[seq] = seq.kv.take_promised(self.pool, count)
                if output.plan.counts[seq] <= 0:
                    del output.plan.counts[seq]
                    if seq not in before:  # sequences that held blocks took what was promised to it
                        preemption.take_slot(seq)
        if not (self.running or output.left_out or output.preempted) and self.loaded:
            # Forks hold every block, and each needs one more to advance.
            preemption.preempt_forks(is_in_vain=self.loaded[-1].kv.num_preemptions >= MAX_PREEMPTIONS)
        has_acted = output.preempted or output.resumed or output.swap_in
        if (self.running or self.loaded) and not (output.plan.counts or output.left_out or has_acted):
            preemption.preempt_behind_beams()
        if self.grows_ahead:
            self._grow_ahead(output)
        if output.plan.counts and not self._credit.is_settled(self._by_tenant.keys()):
            seconds = defaultdict[Tenant, float](float)
            for seq, count in output.plan.counts.items():
                seconds[seq.tenant] += budget.seconds(seq, count)
            self._credit.spend(budget.base, seconds)
        self.num_preemptions += len(output.preempted)
        self.num_pauses += len(output.paused)
        return output

    def _grow_ahead(self, output: SchedulerOutput) -> None:
        """Give decoding sequences the block of the token after the next one, but leave one for each running sequence."""
        for seq in output.plan.counts:
            least = len(self.running) + len(self.pool.tail_groups)
            if seq.kv.is_decoding and not seq.output.awaits_last_token and self.pool.num_spare > least:
                seq.kv.grow(self.pool, 1)

    def add_drafts(self, plan: StepPlan, proposed: Mapping[Sequence, SequenceABC[int]]) -> None:
        """Add the proposed drafts to a plan, as far as the step has room for their tokens, and the pool for their KV."""
        room = self.max_num_batched_tokens - sum(plan.counts.values())
        for seq, drafts in proposed.items():
            # One stays for each running one.
            spare = max(0, self.pool.num_spare - len(self.running)) // len(self.pool.groups) + len(seq.kv.block_ids)
            left = seq.sampling.max_tokens - seq.output.num_generated - 1
            most = min(room, left, spare * seq.kv.block_size - len(seq))
            if most > 0 and drafts:
                plan.drafts[seq] = list(drafts[:most])
                seq.kv.grow(self.pool, len(plan.drafts[seq]))
                room -= len(plan.drafts[seq])

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.loaded
        yield from self.waiting

    def reserve(
        self,
        seq: Sequence,
        max_hit_blocks: int,
        num_tokens: int,
        *,
        first_block: int = 0,
        respect_queue: bool = False,
        watermark: int = 0,
        num_now: int | None = None,
        num_coming: int = 0,
    ) -> bool:
        """Give a sequence without blocks room for `num_tokens`: prefix hits first, new blocks for the rest.

        Args:
            max_hit_blocks: only this many leading full blocks may be prefix hits.
            first_block: index of the first block that it needs.
            respect_queue: leave the blocks that waiting sequences before it in the order, or of its rank, need.
            watermark: leave this many blocks free.
            num_now: leading blocks that it gets now, while the others are promised to it. None: all.
            num_coming: leading tokens that nobody computes here, see `BlockPool.match`.

        Returns:
            False if the pool has too few blocks, or a hand-over that lacks them was overtaken too often; nothing was taken.
        """
        assert not seq.kv.block_ids
        overtaken = self.unreserved
        if overtaken is not None and (overtaken is seq or self.order()(overtaken) >= self.order()(seq)):
            overtaken = None
        if overtaken is not None and overtaken.overtaken >= MAX_OVERTAKEN:
            return False
        claimed = self._claimed_before(seq) if respect_queue and self.waiting else 0
        hits = self.pool.match(seq.kv.full_keys()[first_block:max_hit_blocks], first_block, num_coming)
        self.pool.hold(hits)
        num_blocks, room = self.pool.blocks_for(num_tokens), -claimed - watermark
        stop = num_blocks if num_now is None else min(num_blocks, num_now)
        if self.pool.tail_groups:
            if not seq.kv.take_groups(self.pool, first_block, hits, num_coming, num_blocks, stop, room):
                return False
        else:
            needed = num_blocks - first_block - len(hits)
            if needed > self.pool.num_spare + room:
                self.pool.release(hits)
                return False
            now = max(0, stop - first_block - len(hits))
            seq.kv.take_blocks(first_block, hits, self.pool.allocate(now))
            seq.kv.promise(self.pool, needed - now)
        if overtaken is not None:
            overtaken.let_pass()
        self.prefix_queries += len(seq.kv.tokens) - first_block * self.pool.block_size
        self.prefix_hits += (seq.kv.num_registered - first_block) * self.pool.block_size
        return True

    def _claimed_before(self, seq: Sequence) -> int:
        """Return how many pages the waiting sequences need that are before one in the order, or of its rank."""
        order = self.order()
        ahead = [other for other in self.waiting if order(other) <= order(seq)]
        return sum(map(self._pages_needed, ahead)) + max((self._watermark(other) for other in ahead), default=0)

    def num_out_of_window(self, num_computed: int) -> int:
        """Return how many leading blocks lie outside the windows of all tokens behind the first `num_computed`.

        The next step of a running sequence releases them.
        """
        return 0 if self.window is None else max(0, num_computed + 1 - self.window) // self.pool.block_size

    def _schedule_running(self, output: SchedulerOutput, preemption: Preemption) -> StepBudget:
        if self.window is not None:
            for seq in self.running:
                seq.kv.drop_blocks(self.pool, self.num_out_of_window(seq.kv.num_computed))
        if self.pool.tail_groups:
            for seq in self.running:
                seq.kv.tails.drop(self.pool, seq.kv.num_computed)
        # Decoding sequences need one token each and have a latency target; long prompts share the rest.
        are_rivals, decoding, prompts = len(self._by_tenant) > 1, list[Sequence](), list[Sequence]()
        for seq in self.running:
            if seq not in output.left_out:
                (decoding if seq.kv.is_decoding else prompts).append(seq)
        for seq in prompts if are_rivals else self.running[:]:
            if seq not in output.late:
                self._take_room(seq, output, preemption)
        if output.preempted:
            decoding = [seq for seq in decoding if seq not in output.preempted]
            prompts = [seq for seq in prompts if seq not in output.preempted]
        most, plan = self.max_num_batched_tokens, output.plan
        budget = StepBudget.for_step(self.costs, most, decoding, self.itl_target, self.pool.block_size, plan)
        if not are_rivals:
            for seq in decoding:
                budget.allocate(seq)
            for seq in prompts:
                self._schedule_prompt(seq, output, budget)
        else:
            self._share_step(decoding, prompts, output, budget, preemption)
            order = self.order()
            for seq in sorted(prompts, key=order):
                if not output.preempted:
                    self._admit(output, budget, preemption, below=order(seq)[0])
                if seq not in output.paused and seq not in output.preempted:
                    self._schedule_prompt(seq, output, budget)
        return budget

    def _take_room(self, seq: Sequence, output: SchedulerOutput, preemption: Preemption) -> bool:
        """Give a running sequence the blocks of its tokens, unless they are promised. Returns False if it is preempted."""
        if seq in output.preempted:
            return False
        needed = seq.kv.blocks_needed(self.pool)
        if needed and not needed <= seq.kv.num_promised <= self.pool.num_free:
            if needed > self.pool.num_free and not preemption.make_room_for(seq):
                return False
            output.block_copies += seq.kv.take_room(self.pool)
        return True

    def _share_step(
        self,
        decoding: list[Sequence],
        prompts: list[Sequence],
        output: SchedulerOutput,
        budget: StepBudget,
        preemption: Preemption,
    ) -> None:
        """Limit the tenants to their shares of a step, and schedule decoding sequences within them.

        These get room now, since the step may leave out most of them.
        """
        demands: dict[Tenant, list[Sequence]] = {tenant: [] for tenant in self._by_tenant}
        for seq in (*decoding, *prompts):
            demands[seq.tenant].append(seq)
        queued, is_full = self._queued(output.late), len(self.running) >= self.max_num_seqs
        may_run = giving_way(self.running, self._by_tenant) if is_full else self._by_tenant
        demanding = [seq for tenant in may_run for seq in queued[tenant]]
        tokens = tokens_now(demands, demanding, self.pool)
        demands = {tenant: seqs + queued[tenant] for tenant, seqs in demands.items() if seqs or queued[tenant]}
        budget.share(demands, tokens, self._credit.creditors(self._by_tenant.keys()), self._num_steps)
        # A tenant's decoding sequences may take all of its share, but not for ever.
        overdue = [seq for seq in prompts if seq.tenant in budget.shares and self._num_steps - seq.last_turn > TURN]
        overdue.sort(key=self.order())
        spent = set[Tenant]()
        for seq in [*overdue, *sorted(decoding, key=_TURN)] if budget.shares else decoding:
            if seq.tenant in spent or not budget.has_share(seq.tenant):
                spent.add(seq.tenant)
            elif self._take_room(seq, output, preemption):
                budget.allocate(seq)

    def _schedule_prompt(self, seq: Sequence, output: SchedulerOutput, budget: StepBudget) -> None:
        """Schedule a prompt that has blocks; if it does not end in this step, behind shorter ones in half of the time."""
        if seq in output.plan.counts or not (room := budget.room(seq)):
            return
        left = seq.kv.num_uncomputed
        limit = max(left // 2, room if room < left else 0)
        if 1 < room <= left and (shorter := self._shorter(seq, limit, output)):
            budget.keep_half(seq)
            for other in shorter:
                if budget.room(other) and (other in self.running or self._overtakes(other, output)):
                    budget.allocate(other)
        budget.allocate(seq)

    def _shorter(self, seq: Sequence, limit: int, output: SchedulerOutput) -> list[Sequence]:
        """Return the prompts that go before one that does not end in this step, the shortest first.

        They run, or there is a slot for them.
        """
        slots = 0 if output.preempted else max(0, self.max_num_seqs - len(self.running))

        def may_go(other: Sequence) -> bool:
            return (
                other.rank < seq.rank + ARRIVALS_PER_PRIORITY
                and other not in output.left_out
                and not (other.reads_logits or other.kv.swapped is not None or other.kv.needs_refetch)
            )

        shorter = [
            (size, other.rank, other)
            for other in (*self.running, *(self.loaded if slots else ()))
            if other.tenant == seq.tenant
            and other is not seq
            and 1 < (size := other.kv.num_uncomputed) <= limit
            and other not in output.plan.counts
            and may_go(other)
        ]
        sizes = self._by_size.get(seq.tenant, [])
        waiting = sizes[bisect_right(sizes, 1, key=_FIRST) : bisect_right(sizes, limit, key=_FIRST)] if slots else []
        shorter += islice(((size, rank, other) for size, rank, _, other in waiting if may_go(other)), slots)
        return [other for _, _, other in sorted(shorter, key=lambda one: one[:2])]

    def _overtakes(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Run a queued prompt if it has room, and if those that arrived before it and lack room have not waited too often."""
        first = seq if seq.kv.block_ids else self.waiting[0]
        is_last_chance = first is not seq and first.overtaken >= MAX_OVERTAKEN
        if len(self.running) >= self.max_num_seqs or is_last_chance or not self._dequeue(seq):
            return False
        if first is not seq and not self._fits(first):
            first.let_pass()
        output.block_copies += seq.kv.admit(self.pool)
        insort(self.running, seq, key=_RANK)
        return True

    def _dequeue(self, seq: Sequence) -> bool:
        """Take a sequence from its queue if the pool has room for it.

        A waiting one gets hits and a block, while the others are promised, unless KV comes at once.
        """
        if seq.kv.block_ids:
            if has_room := seq.kv.blocks_needed(self.pool) <= self.pool.num_free:
                self.loaded.remove(seq)
            return has_room
        copy, most, spare = seq.kv.swapped or _NO_COPY, len(self._usable_keys(seq)), self._watermark(seq)
        first, coming = copy.first_block, copy.num_tokens
        now = 1 if copy is _NO_COPY and not seq.kv.needs_refetch else None
        has_room = self.reserve(seq, most, len(seq), first_block=first, watermark=spare, num_now=now, num_coming=coming)
        if has_room:
            self._end_wait(seq)
        return has_room

    def _queued(self, late: set[Sequence]) -> dict[Tenant, list[Sequence]]:
        """Return sequences that could run, of each tenant as many as there are slots: if it were alone, they would."""
        running = late.union(self.running)
        return {
            tenant: [*islice((seq for seq in seqs if seq not in running), self.max_num_seqs)]
            for tenant, seqs in self._by_tenant.items()
        }

    def _admit(
        self, output: SchedulerOutput, budget: StepBudget, preemption: Preemption, below: float = math.inf
    ) -> None:
        """Admit sequences of tenants whose level is below the given one, as far as the budget, slots and blocks allow."""
        while budget.tokens > 0:
            seq = self._pop_next(output, budget, below)
            if seq is None:
                return
            if seq.kv.needs_refetch:
                seq.kv.end_refetch()
                output.resumed.append(seq)
                continue
            if len(self.running) >= self.max_num_seqs and (giving := giving_way(self.running, [seq.tenant])):
                budget.take_back(preemption.pause(giving[seq.tenant]))
            if seq.kv.swapped is not None:
                output.swap_in += self.swap_space.swap_in(seq)
                seq.kv.register_full_blocks(self.pool)  # others of its request find them at once
            output.block_copies += seq.kv.admit(self.pool)
            insort(self.running, seq, key=_RANK)
            if seq.kv.num_uncomputed:  # else a beam that has waited for others, and was swapped
                if seq.kv.is_decoding or budget.room(seq) > seq.kv.num_uncomputed:  # it leaves room for others
                    budget.allocate(seq)
                else:
                    self._schedule_prompt(seq, output, budget)
                assert seq in output.plan.counts, "its role stores its blocks before any is released"

    def _make_room(self, preemption: Preemption) -> None:
        """Preempt a sequence of another tenant if the first one that waits for blocks has none, and should go before it."""
        queued = [*self.waiting, self.unreserved]
        first = min((seq for seq in queued if seq is not None), key=self.order(), default=None)
        if first is not None and not self._fits(first):
            preemption.preempt_for(first)

    def _fits(self, seq: Sequence) -> bool:
        """Return whether the pool has the blocks that a sequence without any needs to be admitted."""
        return self._pages_needed(seq, len(self._hits(seq))) + self._watermark(seq) <= self.pool.num_spare

    def _pages_needed(self, seq: Sequence, num_hits: int = 0) -> int:
        """Return how many pages a sequence without any takes, but for hits; if it was swapped, of windows only the last."""
        copy, pool = seq.kv.swapped or _NO_COPY, self.pool
        first, stop = copy.first_block + num_hits, pool.blocks_for(len(seq))
        return pages_behind(first, stop, copy.num_tokens, pool.groups, pool.block_size)

    def _hits(self, seq: Sequence) -> list[int]:
        """Return the blocks of the pool's first group that a sequence without any finds there."""
        copy = seq.kv.swapped or _NO_COPY
        return self.pool.match(self._usable_keys(seq)[copy.first_block :], copy.first_block, copy.num_tokens)

    def _usable_keys(self, seq: Sequence) -> list[bytes]:
        """Return the keys of the blocks that a sequence may take as prefix hits.

        Where pages have several blocks, it may take none once it was preempted MAX_PREEMPTIONS times: a page is held as a
        whole, so hits in many pages can take the room of the other beams of its search each time.
        """
        is_scattered = self.pool.tail_groups and seq.kv.num_preemptions >= MAX_PREEMPTIONS
        return [] if is_scattered else seq.usable_keys

    def _pop_next(self, output: SchedulerOutput, budget: StepBudget, below: float) -> Sequence | None:
        """Dequeue and return the next sequence to admit: the first loaded one that has room, or the first waiting one.

        No prompt overtakes one for which there is no time.

        Args:
            output: of the step, which names sequences to leave out.
            budget: leave out sequences of which it has no room for a token.
            below: leave out tenants of this level or a higher one.
        """
        if not self._has_rivals and len(self.running) >= self.max_num_seqs:
            return None
        loaded, waiting, order = self._queues(budget, below, output.late)
        computable, has_time = list[Sequence](), True
        for seq in loaded if waiting is None else [*loaded, waiting]:
            if seq in output.left_out or (not budget.scored_tokens and seq.reads_logits):
                continue
            if seq.group is not None and seq.awaits_beams:
                continue
            computed = seq.kv.num_computed
            if not seq.kv.block_ids:
                copy = seq.kv.swapped or _NO_COPY
                num_blocks = copy.first_block + len(self._hits(seq))
                computed = max(num_blocks * self.pool.block_size, copy.num_tokens)
            is_prompt = len(seq) - computed > 1
            has_time = has_time and (not is_prompt or budget.min_chunk > 0 or budget.affordable(computed) > 0)
            if has_time or not is_prompt:
                computable.append(seq)
        waiting = computable.pop() if computable and computable[-1] is waiting else None
        first_loaded = None
        for seq in computable:
            if seq.kv.blocks_needed(self.pool) <= self.pool.num_free:
                first_loaded = seq
                break
        goes_first = waiting is not None and (not computable or precedes(waiting, computable, first_loaded, order))
        if waiting is not None and goes_first and self._dequeue(waiting):
            return waiting
        return first_loaded if first_loaded is not None and self._dequeue(first_loaded) else None

    def _queues(self, budget: StepBudget, below: float, late: set[Sequence]) -> Queues:
        """Return the loaded sequences that may be admitted, in order, the first waiting one, and what the order is."""
        # Scored prompts share a small budget, and must not hold up the others.
        scored = budget.scored_tokens
        may_wait = (seq for seq in self.waiting if seq not in late and (scored or not seq.reads_logits))
        if not self._has_rivals:
            return self.loaded, next(may_wait, None), place_alone
        tenants, order = self._eligible_tenants(budget, below), self.order()
        loaded = sorted((seq for seq in self.loaded if seq.tenant in tenants), key=order)
        return loaded, min((seq for seq in may_wait if seq.tenant in tenants), key=order, default=None), order

    def _eligible_tenants(self, budget: StepBudget, below: float) -> set[Tenant]:
        """Return the tenants of which a sequence may be admitted: there is a slot, or another gives way, and time is left."""
        levels = levels_of(self.running)
        eligible = {one for one in self._by_tenant if levels.get(one, 0.0) < below and budget.has_share(one)}
        return set(giving_way(self.running, eligible)) if len(self.running) >= self.max_num_seqs else eligible

    def _watermark(self, seq: Sequence) -> int:
        """Return how many blocks must stay free when a sequence gets its own.

        A preempted sequence is readmitted only if each running one keeps a spare block; otherwise it thrashes.
        """
        return len(self.running) if seq.kv.num_preemptions else 0
