"""Schedule: one step as the scheduler decides it, that is, how many tokens of which sequences the step computes.

All sequences share one budget per step (`budget.py`): a decoding sequence asks for 1 token, a prefilling one for its next
chunk, a preempted one for the tokens whose KV it lost. Nothing else distinguishes them.

Order within a step:
    1. running sequences, decoding ones before prefilling ones;
    2. loaded sequences, which hold blocks already (their KV was loaded, or they are forks), and waiting ones, by rank.
       Prompts do not hold up a sequence that only decodes, and one that lacks blocks does not hold up one that has its own.

A prompt that would fill the rest of a step leaves half of that to shorter ones of its tenant: those that fit into the step or
are at most half as long as what is left of it (for longer ones, sharing costs more time than it saves). The shortest goes
first. So short prompts do not wait for long ones, and long ones take at most twice their time, however many short ones come.

A sequence is left out of a step while it waits for the store, or for its grammar's mask. For the latter, it lends its slot. A
beam that waits for others of its search has none: searches of several tenants would keep the slots that the others wait for.
"""

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import filterfalse, islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.budget import StepBudget
from pdserve.engine.scheduling.levels import Order, giving_way, levels_of, place_alone, precedes, tokens_now
from pdserve.engine.scheduling.preemption import MAX_PREEMPTIONS, Preemption
from pdserve.engine.sequence import TURN, Sequence
from pdserve.engine.step import SchedulerOutput
from pdserve.request import ARRIVALS_PER_PRIORITY, Tenant

if TYPE_CHECKING:
    from pdserve.engine.scheduling.scheduler import Scheduler

Queues = tuple[list[Sequence], Sequence | None, Order]  # loaded ones in order, the first waiting one, and the order
MAX_OVERTAKEN = 64  # how often others go before one that lacks blocks
_RANK, _TURN, _FIRST = attrgetter("rank"), attrgetter("turn"), itemgetter(0)


@dataclass
class Schedule:
    """Gives sequences of a scheduler's queues their slots, blocks and tokens of one step, and records that in its output.

    Attributes:
        pool, running: of the scheduler.
        has_rivals: several tenants have sequences here.
        output: of the step; the sequences to leave out are in it already.
        budget: of the step, once its running sequences have their blocks.
    """

    scheduler: "Scheduler"
    pool: BlockPool
    running: list[Sequence]
    has_rivals: bool
    output: SchedulerOutput
    preemption: Preemption
    budget: StepBudget = field(init=False)

    def decide(self) -> None:
        """Decide the step. It contains at least one sequence whenever one can run."""
        output, preemption, loaded, before = self.output, self.preemption, self.scheduler.loaded, self.running[:]
        if output.late:
            preemption.lend_slots()
        if self.scheduler.beams:
            for seq in [one for one in self.running if one.awaits_beams]:
                preemption.take_slot(seq)
        self._schedule_running()
        if not output.preempted:
            self._admit()
            if self.has_rivals and not (output.swap_in or output.paused):
                self._make_room()
        if self.pool.num_promised:
            for seq, count in [*output.plan.counts.items()]:
                output.plan.counts[seq] = seq.kv.take_promised(self.pool, count)
                if output.plan.counts[seq] <= 0:
                    del output.plan.counts[seq]
                    if seq not in before:  # sequences that held blocks took what was promised to it
                        preemption.take_slot(seq)
        if not (self.running or output.left_out or output.preempted) and loaded:
            # Forks hold every block, and each needs one more to advance.
            preemption.preempt_forks(is_in_vain=loaded[-1].kv.num_preemptions >= MAX_PREEMPTIONS)
        has_acted = output.preempted or output.resumed or output.swap_in
        if (self.running or loaded) and not (output.plan.counts or output.left_out or has_acted):
            preemption.preempt_behind_beams()

    def _schedule_running(self) -> None:
        scheduler, output = self.scheduler, self.output
        if scheduler.window is not None:
            for seq in self.running:
                seq.kv.drop_blocks(self.pool, scheduler.num_out_of_window(seq.kv.num_computed))
        if self.pool.tail_groups:
            for seq in self.running:
                seq.kv.tails.drop(self.pool, seq.kv.num_computed)
        # Decoding sequences need one token each and have a latency target; long prompts share the rest.
        are_rivals, decoding, prompts = len(scheduler.by_tenant) > 1, list[Sequence](), list[Sequence]()
        for seq in self.running:
            if seq not in output.left_out:
                (decoding if seq.kv.is_decoding else prompts).append(seq)
        for seq in prompts if are_rivals else self.running[:]:
            if seq not in output.late:
                self._take_room(seq)
        if output.preempted:
            decoding = [seq for seq in decoding if seq not in output.preempted]
            prompts = [seq for seq in prompts if seq not in output.preempted]
        most, target, size = scheduler.max_num_batched_tokens, scheduler.itl_target, self.pool.block_size
        self.budget = StepBudget.for_step(scheduler.costs, most, decoding, target, size, output.plan)
        if not are_rivals:
            for seq in decoding:
                self.budget.allocate(seq)
            for seq in prompts:
                self._schedule_prompt(seq)
        else:
            self._share_step(decoding, prompts)
            order = scheduler.order()
            for seq in sorted(prompts, key=order):
                if not output.preempted:
                    self._admit(below=order(seq)[0])
                if seq not in output.paused and seq not in output.preempted:
                    self._schedule_prompt(seq)

    def _take_room(self, seq: Sequence) -> bool:
        """Give a running sequence the blocks of its tokens, unless they are promised. Returns False if it is preempted."""
        if seq in self.output.preempted:
            return False
        needed = seq.kv.blocks_needed(self.pool)
        if needed and not needed <= seq.kv.num_promised <= self.pool.num_free:
            if needed > self.pool.num_free and not self.preemption.make_room_for(seq):
                return False
            self.output.block_copies += seq.kv.take_room(self.pool)
        return True

    def _share_step(self, decoding: list[Sequence], prompts: list[Sequence]) -> None:
        """Limit the tenants to their shares of a step, and schedule decoding sequences within them.

        These get room now, since the step may leave out most of them.
        """
        scheduler, budget, tenants = self.scheduler, self.budget, self.scheduler.by_tenant
        demands: dict[Tenant, list[Sequence]] = {tenant: [] for tenant in tenants}
        for seq in (*decoding, *prompts):
            demands[seq.tenant].append(seq)
        queued, is_full = self._queued(), len(self.running) >= scheduler.max_num_seqs
        may_run = giving_way(self.running, tenants) if is_full else tenants
        demanding = [seq for tenant in may_run for seq in queued[tenant]]
        tokens = tokens_now(demands, demanding, self.pool)
        demands = {tenant: seqs + queued[tenant] for tenant, seqs in demands.items() if seqs or queued[tenant]}
        budget.share(demands, tokens, scheduler.credit.creditors(tenants.keys()), scheduler.num_steps)
        # A tenant's decoding sequences may take all of its share, but not for ever.
        overdue = [seq for seq in prompts if seq.tenant in budget.shares and scheduler.num_steps - seq.last_turn > TURN]
        overdue.sort(key=scheduler.order())
        spent = set[Tenant]()
        for seq in [*overdue, *sorted(decoding, key=_TURN)] if budget.shares else decoding:
            if seq.tenant in spent or not budget.has_share(seq.tenant):
                spent.add(seq.tenant)
            elif self._take_room(seq):
                budget.allocate(seq)

    def _queued(self) -> dict[Tenant, list[Sequence]]:
        """Return sequences that could run, of each tenant as many as there are slots: if it were alone, they would."""
        running = self.output.late.union(self.running)
        return {
            tenant: [*islice((seq for seq in seqs if seq not in running), self.scheduler.max_num_seqs)]
            for tenant, seqs in self.scheduler.by_tenant.items()
        }

    def _schedule_prompt(self, seq: Sequence) -> None:
        """Schedule a prompt that has blocks; if it does not end in this step, behind shorter ones in half of the time."""
        budget = self.budget
        if seq in self.output.plan.counts or not (room := budget.room(seq)):
            return
        left = seq.kv.num_uncomputed
        limit = max(left // 2, room if room < left else 0)
        if 1 < room <= left and (shorter := self._shorter(seq, limit)):
            budget.keep_half(seq)
            for other in shorter:
                if budget.room(other) and (other in self.running or self._overtakes(other)):
                    budget.allocate(other)
        budget.allocate(seq)

    def _shorter(self, seq: Sequence, limit: int) -> list[Sequence]:
        """Return the prompts that go before one that does not end in this step, the shortest first.

        They run, or there is a slot for them.
        """
        scheduler, output = self.scheduler, self.output
        slots = 0 if output.preempted else max(0, scheduler.max_num_seqs - len(self.running))

        def may_go(other: Sequence) -> bool:
            return (
                other.rank < seq.rank + ARRIVALS_PER_PRIORITY
                and other not in output.left_out
                and not (other.reads_logits or other.kv.swapped is not None or other.kv.needs_refetch)
            )

        shorter = [
            (size, other.rank, other)
            for other in (*self.running, *(scheduler.loaded if slots else ()))
            if other.tenant == seq.tenant
            and other is not seq
            and 1 < (size := other.kv.num_uncomputed) <= limit
            and other not in output.plan.counts
            and may_go(other)
        ]
        waiting = scheduler.waiting_up_to(seq.tenant, limit) if slots else ()
        shorter += islice(((size, rank, other) for size, rank, _, other in waiting if may_go(other)), slots)
        return [other for _, _, other in sorted(shorter, key=lambda one: one[:2])]

    def _overtakes(self, seq: Sequence) -> bool:
        """Run a queued prompt if it has room, and if those that arrived before it and lack room have not waited too often."""
        scheduler = self.scheduler
        first = seq if seq.kv.block_ids else scheduler.waiting[0]
        is_last_chance = first is not seq and first.overtaken >= MAX_OVERTAKEN
        if len(self.running) >= scheduler.max_num_seqs or is_last_chance or not scheduler.dequeue(seq):
            return False
        if first is not seq and not scheduler.fits(first):
            first.let_pass()
        self.output.block_copies += seq.kv.admit(self.pool)
        insort(self.running, seq, key=_RANK)
        return True

    def _admit(self, below: float = math.inf) -> None:
        """Admit sequences of tenants whose level is below the given one, as far as the budget, slots and blocks allow."""
        output, budget = self.output, self.budget
        while budget.tokens > 0:
            seq = self._pop_next(below)
            if seq is None:
                return
            if seq.kv.needs_refetch:
                seq.kv.end_refetch()
                output.resumed.append(seq)
                continue
            is_full = len(self.running) >= self.scheduler.max_num_seqs
            if is_full and (giving := giving_way(self.running, [seq.tenant])):
                budget.take_back(self.preemption.pause(giving[seq.tenant]))
            if seq.kv.swapped is not None:
                output.swap_in += self.scheduler.swap_space.swap_in(seq)
                seq.kv.register_full_blocks(self.pool)  # others of its request find them at once
            output.block_copies += seq.kv.admit(self.pool)
            insort(self.running, seq, key=_RANK)
            if seq.kv.num_uncomputed:  # else a beam that has waited for others, and was swapped
                if seq.kv.is_decoding or budget.room(seq) > seq.kv.num_uncomputed:  # it leaves room for others
                    budget.allocate(seq)
                else:
                    self._schedule_prompt(seq)
                assert seq in output.plan.counts, "its role stores its blocks before any is released"

    def _make_room(self) -> None:
        """Preempt a sequence of another tenant if the first one that waits for blocks has none, and should go before it."""
        queued = [*self.scheduler.waiting, self.scheduler.unreserved]
        first = min((seq for seq in queued if seq is not None), key=self.scheduler.order(), default=None)
        if first is not None and not self.scheduler.fits(first):
            self.preemption.preempt_for(first)

    def _pop_next(self, below: float) -> Sequence | None:
        """Dequeue and return the next sequence to admit: the first loaded one that has room, or the first waiting one.

        No prompt overtakes one for which there is no time, and none is taken of which the step has no room for a token.

        Args:
            below: leave out tenants of this level or a higher one.
        """
        scheduler, budget = self.scheduler, self.budget
        if not self.has_rivals and len(self.running) >= scheduler.max_num_seqs:
            return None
        loaded, waiting, order = self._queues(below)
        computable, has_time = list[Sequence](), True
        for seq in loaded if waiting is None else [*loaded, waiting]:
            if seq in self.output.left_out or (not budget.scored_tokens and seq.reads_logits):
                continue
            if seq.group is not None and seq.awaits_beams:
                continue
            computed = seq.kv.num_computed if seq.kv.block_ids else scheduler.num_found(seq)
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
        if waiting is not None and goes_first and scheduler.dequeue(waiting):
            return waiting
        return first_loaded if first_loaded is not None and scheduler.dequeue(first_loaded) else None

    def _queues(self, below: float) -> Queues:
        """Return the loaded sequences that may be admitted, in order, the first waiting one, and what the order is."""
        scheduler, late = self.scheduler, self.output.late
        may_wait: Iterator[Sequence] = filterfalse(late.__contains__, scheduler.waiting)
        if not self.budget.scored_tokens:  # which scored prompts share; they must not hold up the others
            may_wait = (seq for seq in may_wait if not seq.reads_logits)
        if not self.has_rivals:
            return scheduler.loaded, next(may_wait, None), place_alone
        tenants, order = self._eligible_tenants(below), scheduler.order()
        loaded = sorted((seq for seq in scheduler.loaded if seq.tenant in tenants), key=order)
        return loaded, min((seq for seq in may_wait if seq.tenant in tenants), key=order, default=None), order

    def _eligible_tenants(self, below: float) -> set[Tenant]:
        """Return the tenants of which a sequence may be admitted: there is a slot, or another gives way, and time is left."""
        levels, tenants = levels_of(self.running), self.scheduler.by_tenant
        eligible = {one for one in tenants if levels.get(one, 0.0) < below and self.budget.has_share(one)}
        is_full = len(self.running) >= self.scheduler.max_num_seqs
        return set(giving_way(self.running, eligible)) if is_full else eligible
