"""The scheduler: how many tokens of which sequences the next step computes.

One budget per step (`budget.py`), shared by all: a decoding sequence asks for 1 token, a prefilling one for its next chunk, a
preempted one for what it lost. Nothing else tells them apart. Sequences that run come first, those that decode before
others. Then those join that hold blocks already (their KV was loaded) and new ones, in order of rank; but one that only
decodes waits for no prompt, and one for which there are not enough blocks holds up nobody who has his. When a running
sequence needs a block and none is free, the last in rank gives up its blocks. They are copied to host memory, where there is
room and that takes less time than computing them; or else they are computed again later, but for what is still in the prefix
cache then, or is worth loading from the store.

The rank is the order of arrival. A level of priority counts as `LEVEL` arrivals, so nobody starves: whoever has a lower
priority waits for so many newcomers at most, however many there are.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdserve.costs import Costs
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.budget import Budget
from pdserve.engine.sequence import Sequence, Swapped
from pdserve.request import SamplingParams


@dataclass
class Schedule:
    """One step.

    Attributes:
        tokens: to compute per sequence, in batch order.
        copies: (from, to): blocks to copy before, one after the other, because their holder is about to write to a block
            that others hold as well.
        preempted: who lost their blocks for it.
        returned: who have blocks again and may find their KV in the store. They are in no queue until they are added.
        swap_out, swap_in: (block, place in host memory), to copy before anything else. Never both in one step.
        held_back: whether some were.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    returned: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    held_back: bool = False


class Scheduler:
    """Decides over a pool.

    Args:
        window: a token sees so many at most, itself included, in every layer; None if some layer sees all.
        host: places for blocks in host memory.

    Attributes:
        costs: of swapping and computing.
        itl_target: seconds between two tokens of those that decode, which prompts beside them should not exceed.
        fetches: whoever adds sequences wants to see those again that return after a preemption (`Schedule.returned`).
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        host: BlockPool | None = None,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.host = host
        self.costs = Costs()
        self.itl_target: float | None = None
        self.fetches = False
        # Each in order of rank.
        self.waiting: list[Sequence] = []
        self.loaded: list[Sequence] = []  # hold blocks: their KV was loaded, or they are forks of others
        self.running: list[Sequence] = []
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found
        self.num_preemptions = 0
        self.num_swaps = 0  # of these, by swapping

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, with or without blocks."""
        _enqueue(self.loaded if seq.block_ids else self.waiting, seq)

    def fork(self, seq: Sequence, request_id: str, sampling: SamplingParams) -> Sequence:
        """Queues a copy of a sequence that shares all KV computed so far; what either writes from now on is its own."""
        blocks = seq.block_ids[: self.pool.blocks_for(seq.num_computed)]
        self.pool.hold(blocks[seq.num_dropped :])
        fork = replace(
            seq,
            request_id=request_id,
            sampling=sampling,
            tokens=[*seq.tokens],
            keys=[*seq.keys],
            block_ids=blocks,
            swapped=None,
        )
        self.add(fork)
        return fork

    def remove(self, seq: Sequence) -> None:
        """Takes a finished or aborted sequence out and releases its blocks."""
        for queue in (self.running, self.loaded, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self.release(seq)
        self._forget_swapped(seq)

    def release(self, seq: Sequence) -> None:
        self.pool.release(seq.held)
        seq.block_ids = []
        seq.num_computed = seq.num_registered = seq.num_dropped = 0

    def schedule(self, *, hold_back: bool = False) -> Schedule:
        """Decides the next step. At least one sequence is in it whenever there is one that can run.

        Args:
            hold_back: leave out those whose KV is stored as it is computed.
        """
        step = Schedule(held_back=hold_back and any(seq.exported for seq in self.sequences()))
        budget = self._schedule_running(step)
        if not step.preempted:
            self._admit(step, budget)
        if not (self.running or step.held_back or step.preempted) and self.loaded:
            # Forks hold every block, and each needs one more to go on.
            self._preempt(self.loaded[-1], self.loaded, step)
        return step

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.loaded
        yield from self.waiting

    def reserve(self, seq: Sequence, usable: int, num_tokens: int, *, beside: bool = False, spare: int = 0) -> bool:
        """Gives a sequence without blocks room for `num_tokens`: prefix hits among its first `usable` full blocks, new
        blocks for the rest. False, and nothing taken, if the pool has not that many; with `beside`, has not that many
        beside what those need who wait and rank before it; with `spare`, would not keep so many more."""
        assert not seq.block_ids
        first = seq.swapped.first if seq.swapped is not None else 0
        before = [other for other in self.waiting if other.rank <= seq.rank] if beside else []
        spoken_for = sum(self.pool.blocks_for(len(other)) for other in before)
        spoken_for += max((self._spare(other) for other in before), default=0)
        hits = self.pool.match(seq.full_keys()[first:usable])
        self.pool.hold(hits)
        need = self.pool.blocks_for(num_tokens) - first - len(hits)
        if need > self.pool.num_free - spoken_for - spare:
            self.pool.release(hits)
            return False
        seq.block_ids = [0] * first + hits + self.pool.allocate(need)
        seq.num_dropped, seq.num_registered = first, first + len(hits)
        seq.num_computed = seq.num_registered * self.pool.block_size
        if not seq.admitted:
            seq.num_local_hit = seq.num_computed
        self.prefix_queries += len(seq)
        self.prefix_hits += len(hits) * self.pool.block_size
        return True

    def num_unseen(self, seq: Sequence) -> int:
        """Leading blocks that its next token does not see, and none to come. They are given back with the next step."""
        return 0 if self.window is None else max(0, seq.num_computed + 1 - self.window) // self.pool.block_size

    def _schedule_running(self, step: Schedule) -> Budget:
        for seq in self.running:
            self._drop_unseen(seq)
        for seq in list(self.running):
            if seq not in step.preempted:
                self._ensure_blocks(seq, step)
        # Those that decode need one token each and are waited for; long prompts share what is left.
        able = [seq for seq in self.running if not (step.held_back and seq.exported)]
        decoding = [seq for seq in able if seq.num_missing == 1]
        budget = Budget.of(self.costs, self.max_num_batched_tokens, decoding, self.itl_target, self.pool.block_size)
        for seq in sorted(able, key=lambda seq: seq.num_missing > 1):
            if count := budget.take(seq):
                step.tokens[seq] = count
        return budget

    def _drop_unseen(self, seq: Sequence) -> None:
        unseen = max(seq.num_dropped, self.num_unseen(seq))
        self.pool.release(seq.blocks(seq.num_dropped, unseen))
        seq.num_dropped = unseen

    def _ensure_blocks(self, seq: Sequence, step: Schedule) -> None:
        """Gives a running sequence the blocks for all its tokens, at the cost of the last, which may be itself."""
        while self._blocks_needed(seq) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, self.running, step)
            if victim is seq:
                return
        self._append_blocks(seq, step)

    def _blocks_needed(self, seq: Sequence) -> int:
        """Blocks that its next step takes: for tokens that have no room, and in place of one that it may not write to."""
        shared = self._shared_tail(seq) is not None
        return max(0, self.pool.blocks_for(len(seq)) - len(seq.block_ids)) + shared

    def _append_blocks(self, seq: Sequence, step: Schedule) -> None:
        shared = self._shared_tail(seq)
        if shared is not None:
            (own,) = self.pool.allocate(1)
            step.copies.append((seq.block_ids[shared], own))
            self.pool.release([seq.block_ids[shared]])
            seq.block_ids[shared] = own
        seq.block_ids += self.pool.allocate(max(0, self.pool.blocks_for(len(seq)) - len(seq.block_ids)))

    def _shared_tail(self, seq: Sequence) -> int | None:
        """The place of the block that its next token is written to, if others hold that too."""
        place = seq.num_computed // self.pool.block_size
        return place if place < len(seq.block_ids) and self.pool.is_shared(seq.block_ids[place]) else None

    def _preempt(self, seq: Sequence, queue: list[Sequence], step: Schedule) -> None:
        queue.remove(seq)
        step.copies = [copy for copy in step.copies if copy[1] not in seq.held]
        step.preempted.append(seq)
        if self._pays_to_swap(seq):
            self._swap_out(seq, step)
        seq.refetch = self.fetches and seq.swapped is None
        self.release(seq)
        _enqueue(self.waiting, seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _pays_to_swap(self, seq: Sequence) -> bool:
        blocks = self.pool.blocks_for(seq.num_computed) - seq.num_dropped
        if self.host is None or not 0 < blocks <= self.host.num_free:
            return False
        return 2 * self.costs.swap_seconds(blocks) < self.costs.prefill_seconds(seq.num_computed)

    def _swap_out(self, seq: Sequence, step: Schedule) -> None:
        assert self.host is not None
        blocks = seq.blocks(seq.num_dropped, self.pool.blocks_for(seq.num_computed))
        seq.swapped = Swapped(seq.num_dropped, seq.num_computed, self.host.allocate(len(blocks)))
        step.swap_out += zip(blocks, seq.swapped.places, strict=True)
        self.num_swaps += 1

    def _swap_in(self, seq: Sequence, step: Schedule) -> None:
        """It has blocks again: those that were not in the prefix cache come from host memory."""
        if seq.swapped is not None:
            have = seq.num_registered
            places = seq.swapped.places[have - seq.swapped.first :]
            step.swap_in += zip(seq.block_ids[have : have + len(places)], places, strict=True)
            seq.num_computed = max(seq.num_computed, seq.swapped.tokens)
            self._forget_swapped(seq)

    def _forget_swapped(self, seq: Sequence) -> None:
        if seq.swapped is not None:
            assert self.host is not None
            self.host.release(seq.swapped.places)
            seq.swapped = None

    def _admit(self, step: Schedule, budget: Budget) -> None:
        while budget.tokens > 0 and len(self.running) < self.max_num_seqs:
            seq = self._next(step.held_back, budget.has_time)
            if seq is None:
                return
            if seq.refetch:
                seq.refetch = False
                step.returned.append(seq)
                continue
            self._swap_in(seq, step)
            self._append_blocks(seq, step)
            seq.admitted = True
            _enqueue(self.running, seq)
            if count := budget.take(seq):
                step.tokens[seq] = count

    def _next(self, hold_back: bool, prompts: bool) -> Sequence | None:
        """Takes a sequence that can be admitted out of its queue; without `prompts`, one that has only to decode."""
        able = [seq for seq in self.loaded if not (hold_back and seq.exported) and (prompts or seq.num_missing == 1)]
        loaded = next((seq for seq in able if self._blocks_needed(seq) <= self.pool.num_free), None)
        waiting = self.waiting[0] if self.waiting and not (hold_back and self.waiting[0].exported) else None
        if waiting is not None and not (prompts or waiting.swapped):
            waiting = None
        if waiting is not None and self._is_turn_of(waiting, loaded, able) and self._reserve(waiting):
            return self.waiting.pop(0)
        if loaded is not None:
            self.loaded.remove(loaded)
        return loaded

    def _is_turn_of(self, waiting: Sequence, loaded: Sequence | None, able: list[Sequence]) -> bool:
        """Before `loaded`, the first that can go on of those that are `able` to once they have another block."""
        if loaded is None:
            return not able
        return loaded.num_missing > 1 and waiting.rank < min(seq.rank for seq in able)

    def _reserve(self, seq: Sequence) -> bool:
        usable = (len(seq) - 1) // self.pool.block_size
        return self.reserve(seq, usable=usable, num_tokens=len(seq), spare=self._spare(seq))

    def _spare(self, seq: Sequence) -> int:
        """Blocks that must be left when it gets its own: who has lost them comes back only when each of those that run can
        have another one, or he would soon lose them again."""
        return len(self.running) if seq.num_preemptions else 0


def _enqueue(queue: list[Sequence], seq: Sequence) -> None:
    insort(queue, seq, key=lambda one: one.rank)
