"""Preemption: which sequences lose their blocks, or only their slots, so that others can run.

When a running sequence needs a block and none is free, the running sequence of the highest rank is preempted. Its blocks are
copied to host memory if there is room and copying takes less time than computing them again; otherwise they are recomputed
later, except for what is still in the prefix cache or is worth loading from the store.

Several sequences of one request have the same rank. Those of another request are preempted together.
"""

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.scheduling.levels import giving_way, last_to_run
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput

if TYPE_CHECKING:
    from pdserve.engine.scheduling.scheduler import Scheduler

MAX_PREEMPTIONS = 32  # of a sequence that may still have hits in pages of several blocks


@dataclass
class Preemption:
    """Takes blocks and slots from a scheduler's sequences in one step, and records that in its output."""

    scheduler: "Scheduler"
    output: SchedulerOutput

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a sequence. Their content is copied to host memory if that is there and pays."""
        scheduler, output, swapped = self.scheduler, self.output, None
        pool, swap_space = scheduler.pool, scheduler.swap_space
        (scheduler.running if seq in scheduler.running else scheduler.loaded).remove(seq)
        seq.kv.tails.drop(pool, seq.kv.num_computed)
        held = set(seq.kv.held_blocks)
        copies = [copy for copy in output.block_copies if copy[1] not in held]
        is_whole = len(copies) == len(output.block_copies)  # else a block gets its content only after the swap
        output.block_copies = copies
        output.preempted.append(seq)
        num_blocks = pool.blocks_for(seq.kv.num_computed) - seq.kv.num_dropped
        if is_whole and swap_space.pays(seq, num_blocks, scheduler.costs):
            swapped, pairs = swap_space.swap_out(seq, num_blocks)
            output.swap_out += pairs
        output.plan.counts.pop(seq, None)
        seq.preempt(pool, swapped, is_stored=scheduler.refetch_preempted and seq.group is None)
        scheduler.wait(seq, len(seq))

    def make_room_for(self, seq: Sequence) -> bool:
        """Preempt until a running sequence has blocks for all its tokens. Returns False if it was preempted itself."""
        pool, running, late = self.scheduler.pool, self.scheduler.running, self.output.late
        while seq.kv.blocks_needed(pool) > pool.num_free:
            idle = [one for one in self.scheduler.loaded if one.gave_way_at is not None or one in late]
            if idle := idle or [one for one in running if one in late]:
                self.preempt(idle[-1])
                continue
            last = last_to_run(running, seq.tenant)
            # The sequences of another request leave together. Those of its own leave one by one: together, a request that
            # does not fit into the pool as a whole would never advance.
            is_own = last.rank == seq.rank
            victims = [last] if is_own else [one for one in running if one.rank == last.rank]
            if last.tenant != seq.tenant:
                victims = [one for one in victims if one.may_give_way]
            for victim in victims:
                if victim.tenant != seq.tenant:
                    victim.give_way()
                self.preempt(victim)
            if seq in victims:
                return False
        return True

    def preempt_for(self, first: Sequence) -> None:
        """Preempt a sequence of another tenant for one that should go before it and lacks blocks, if there is one."""
        order, running = self.scheduler.order(), self.scheduler.running
        level, _ = order(first)
        paused = [one for one in self.scheduler.loaded if one.gave_way_at is not None and order(one)[0] > level]
        if paused:
            self.preempt(paused[-1])
        elif giving := giving_way(running, [first.tenant]):
            giving[first.tenant].give_way()
            self.preempt(giving[first.tenant])

    def preempt_forks(self, *, is_in_vain: bool) -> None:
        """Preempt the last of the loaded sequences, which have blocks and no slot.

        Args:
            is_in_vain: that did not help before: preempt all loaded sequences of its request.
        """
        loaded = self.scheduler.loaded
        last = loaded[-1]
        for seq in [one for one in loaded if one is last or (is_in_vain and one.rank == last.rank)]:
            self.preempt(seq)

    def preempt_behind_beams(self) -> None:
        """Preempt the last request if beams wait for others of their search, which wait for the room that it holds."""
        holding = [*self.scheduler.running, *self.scheduler.loaded]
        last = max((seq.rank for seq in holding), default=0)
        if any(seq.rank < last for seq in self.scheduler.sequences()):
            for seq in holding:
                if seq.rank == last:
                    self.preempt(seq)

    def pause(self, seq: Sequence) -> int:
        """Take the slot of a running sequence, which keeps its blocks. Returns how many tokens of it the plan had."""
        self.take_slot(seq)
        seq.give_way()
        self.output.paused.append(seq)
        return self.output.plan.counts.pop(seq, 0)

    def lend_slots(self) -> None:
        """Take the slots of late sequences, the newest first, for those that could use them."""
        scheduler, output = self.scheduler, self.output
        wanting = sum(seq not in output.left_out for seq in (*scheduler.loaded, *scheduler.waiting))
        lenders = [seq for seq in scheduler.running if seq in output.late]
        for seq in lenders[::-1][: max(0, len(scheduler.running) + wanting - scheduler.max_num_seqs)]:
            self.take_slot(seq)

    def take_slot(self, seq: Sequence) -> None:
        self.scheduler.running.remove(seq)
        insort(self.scheduler.loaded, seq, key=lambda one: one.rank)
