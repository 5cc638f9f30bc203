"""Preemption: which sequences lose their blocks, or only their slots, so that others can run. The scheduler has the rules."""

from dataclasses import dataclass

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.swap_space import SwapSpace
from pdserve.engine.scheduling.queues import Queues, giving_way, last_to_run
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput


@dataclass
class Preemption:
    """Takes blocks and slots from sequences in one step, and records that in its output.

    Attributes:
        costs: forecasts of swapping and computing.
        is_stored: the KV of preempted sequences may be in the store.
    """

    queues: Queues
    pool: BlockPool
    swap_space: SwapSpace
    costs: Costs
    output: SchedulerOutput
    is_stored: bool

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a sequence. Their content is copied to host memory if that is there and pays."""
        output, swapped = self.output, None
        self.queues.take(seq)
        seq.kv.tails.drop(self.pool, seq.kv.num_computed)
        held = set(seq.kv.held_blocks)
        copies = [copy for copy in output.block_copies if copy[1] not in held]
        is_whole = len(copies) == len(output.block_copies)  # else a block gets its content only after the swap
        output.block_copies = copies
        output.preempted.append(seq)
        num_blocks = self.pool.blocks_for(seq.kv.num_computed) - seq.kv.num_dropped
        if is_whole and self.swap_space.pays(seq, num_blocks, self.costs):
            swapped, pairs = self.swap_space.swap_out(seq, num_blocks)
            output.swap_out += pairs
        output.plan.counts.pop(seq, None)
        seq.preempt(self.pool, swapped, is_stored=self.is_stored and seq.group is None)
        self.queues.wait(seq, len(seq))

    def make_room_for(self, seq: Sequence) -> bool:
        """Preempt until a running sequence has blocks for all its tokens. Returns False if it was preempted itself."""
        running, late = self.queues.running, self.output.late
        while seq.kv.blocks_needed(self.pool) > self.pool.num_free:
            idle = [one for one in self.queues.loaded if one.gave_way_at is not None or one in late]
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
        order = self.queues.order()
        level, _ = order(first)
        paused = [one for one in self.queues.loaded if one.gave_way_at is not None and order(one)[0] > level]
        if paused:
            self.preempt(paused[-1])
        elif giving := giving_way(self.queues.running, [first.tenant]):
            giving[first.tenant].give_way()
            self.preempt(giving[first.tenant])

    def preempt_behind_beams(self) -> None:
        """Preempt the last request if beams wait for others of their search, which wait for the room that it holds."""
        holding = [*self.queues.running, *self.queues.loaded]
        last = max((seq.rank for seq in holding), default=0)
        if any(seq.rank < last for seq in self.queues):
            for seq in holding:
                if seq.rank == last:
                    self.preempt(seq)

    def pause(self, seq: Sequence) -> int:
        """Take the slot of a running sequence, which keeps its blocks. Returns how many tokens of it the plan had."""
        self.queues.take_slot(seq)
        seq.give_way()
        self.output.paused.append(seq)
        return self.output.plan.counts.pop(seq, 0)

    def lend_slots(self, num_slots: int) -> None:
        """Take the slots of late sequences, the newest first, for those that could use them."""
        queues = self.queues
        wanting = sum(seq not in self.output.left_out for seq in (*queues.loaded, *queues.waiting))
        lenders = [seq for seq in queues.running if seq in self.output.late]
        for seq in lenders[::-1][: max(0, len(queues.running) + wanting - num_slots)]:
            queues.take_slot(seq)
