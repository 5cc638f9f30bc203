"""Scheduler with continuous batching and chunked prefill: decides how many tokens of which sequences the next step computes.

All sequences share one budget per step (`budget.py`): a decoding sequence asks for 1 token, a prefilling one for its next
chunk, a preempted one for the tokens whose KV it lost. Nothing else distinguishes them.

Order within a step:
    1. running sequences, decoding ones before prefilling ones;
    2. loaded sequences, which hold blocks already (their KV was loaded, or they are forks), and waiting ones, by rank.
       Prompts do not hold up a sequence that only decodes, and one that lacks blocks does not hold up one that has its own.

When a running sequence needs a block and none is free, the running sequence of the highest rank is preempted. Its blocks are
copied to host memory if there is room and copying takes less time than computing them again; otherwise they are recomputed
later, except for what is still in the prefix cache or is worth loading from the store.

Rank is the order of arrival. A level of priority counts as `ARRIVALS_PER_PRIORITY` arrivals, which bounds how many later
requests can overtake one of a lower priority: no sequence starves.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdserve.costs import Costs
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.budget import StepBudget
from pdserve.engine.sequence import Sequence, SwappedKV
from pdserve.request import SamplingParams


@dataclass
class SchedulerOutput:
    """Work of the next step.

    Attributes:
        num_scheduled_tokens: tokens to compute per sequence, in batch order.
        block_copies: (source, target) blocks to copy first, in order: a sequence is about to write to a shared block.
        preempted: sequences that lost their blocks.
        resumed: preempted sequences that have blocks again and whose KV may be in the store. They are in no queue until
            their owner adds them again.
        swap_out, swap_in: (block, host block) pairs to copy before anything else. Never both in one step.
        publishers_paused: whether sequences that publish their KV were left out.
    """

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    storing_paused: bool = False


class Scheduler:
    """Queues of sequences over one block pool.

    Args:
        window: attention window in tokens, the token itself included, that holds for every layer; None if some layer
            attends to all tokens.
        host_pool: block ids in host memory, for swapping.

    Attributes:
        costs: forecasts of swapping and computing.
        itl_target: seconds between two tokens of a decoding sequence that prompts in the same step should not exceed.
        refetch_preempted: return resumed sequences to their owner (`SchedulerOutput.resumed`), which looks for their KV in
            the store.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        num_swaps: preemptions that swapped.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        host_pool: BlockPool | None = None,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.host_pool = host_pool
        self.costs = Costs()
        self.itl_target: float | None = None
        self.refetch_preempted = False
        # Queues, each in order of rank.
        self.waiting: list[Sequence] = []
        self.loaded: list[Sequence] = []  # these hold blocks
        self.running: list[Sequence] = []
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self.num_swaps = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with or without blocks."""
        _enqueue(self.loaded if seq.block_ids else self.waiting, seq)

    def fork(self, seq: Sequence, request_id: str, sampling: SamplingParams) -> Sequence:
        """Queue and return a copy of a sequence that shares all KV computed so far. Later writes are copy-on-write."""
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
        """Dequeue a finished or aborted sequence and release its blocks."""
        for queue in (self.running, self.loaded, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self.release(seq)
        self._discard_swapped(seq)

    def release(self, seq: Sequence) -> None:
        self.pool.release(seq.held_blocks)
        seq.block_ids = []
        seq.num_computed = seq.num_registered = seq.num_dropped = 0

    def schedule(self, *, pause_storing: bool = False) -> SchedulerOutput:
        """Decide the next step. It contains at least one sequence whenever one can run.

        Args:
            pause_publishers: leave out sequences whose KV is stored as it is computed.
        """
        output = SchedulerOutput(storing_paused=pause_storing and any(seq.stores_kv for seq in self.sequences()))
        budget = self._schedule_running(output)
        if not output.preempted:
            self._admit(output, budget)
        if not (self.running or output.storing_paused or output.preempted) and self.loaded:
            # Forks hold every block, and each needs one more to advance.
            self._preempt(self.loaded[-1], self.loaded, output)
        return output

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
        respect_queue: bool = False,
        watermark: int = 0,
    ) -> bool:
        """Give a sequence without blocks room for `num_tokens`: prefix hits first, new blocks for the rest.

        Args:
            max_hit_blocks: only this many leading full blocks may be prefix hits.
            respect_queue: leave the blocks that waiting sequences of lower or equal rank need.
            watermark: leave this many blocks free.

        Returns:
            False if the pool has too few blocks; nothing was taken.
        """
        assert not seq.block_ids
        first = seq.swapped.first_block if seq.swapped is not None else 0
        ahead = [other for other in self.waiting if other.rank <= seq.rank] if respect_queue else []
        claimed = sum(self.pool.blocks_for(len(other)) for other in ahead)
        claimed += max((self._watermark(other) for other in ahead), default=0)
        hits = self.pool.match(seq.full_keys()[first:max_hit_blocks])
        self.pool.hold(hits)
        needed = self.pool.blocks_for(num_tokens) - first - len(hits)
        if needed > self.pool.num_free - claimed - watermark:
            self.pool.release(hits)
            return False
        seq.block_ids = [0] * first + hits + self.pool.allocate(needed)
        seq.num_dropped, seq.num_registered = first, first + len(hits)
        seq.num_computed = seq.num_registered * self.pool.block_size
        if not seq.admitted:
            seq.num_local_hit = seq.num_computed
        self.prefix_queries += len(seq)
        self.prefix_hits += len(hits) * self.pool.block_size
        return True

    def num_out_of_window(self, seq: Sequence) -> int:
        """Return how many leading blocks lie outside the window of all later tokens. The next step releases them."""
        return 0 if self.window is None else max(0, seq.num_computed + 1 - self.window) // self.pool.block_size

    def _schedule_running(self, output: SchedulerOutput) -> StepBudget:
        for seq in self.running:
            self._release_out_of_window(seq)
        for seq in list(self.running):
            if seq not in output.preempted:
                self._ensure_blocks(seq, output)
        # Decoding sequences need one token each and have a latency target; long prompts share the rest.
        candidates = [seq for seq in self.running if not (output.storing_paused and seq.stores_kv)]
        decoding = [seq for seq in candidates if seq.num_uncomputed == 1]
        budget = StepBudget.for_step(
            self.costs, self.max_num_batched_tokens, decoding, self.itl_target, self.pool.block_size
        )
        for seq in sorted(candidates, key=lambda seq: seq.num_uncomputed > 1):
            if count := budget.allocate(seq):
                output.num_scheduled_tokens[seq] = count
        return budget

    def _release_out_of_window(self, seq: Sequence) -> None:
        stop = max(seq.num_dropped, self.num_out_of_window(seq))
        self.pool.release(seq.blocks(seq.num_dropped, stop))
        seq.num_dropped = stop

    def _ensure_blocks(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Give a running sequence blocks for all its tokens, preempting from the end of the queue (itself included)."""
        while self._blocks_needed(seq) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, self.running, output)
            if victim is seq:
                return
        self._append_blocks(seq, output)

    def _blocks_needed(self, seq: Sequence) -> int:
        """Return how many new blocks the next step of a sequence takes, a copy of a shared block included."""
        copied = self._shared_block_index(seq) is not None
        return max(0, self.pool.blocks_for(len(seq)) - len(seq.block_ids)) + copied

    def _append_blocks(self, seq: Sequence, output: SchedulerOutput) -> None:
        shared = self._shared_block_index(seq)
        if shared is not None:
            (copy,) = self.pool.allocate(1)
            output.block_copies.append((seq.block_ids[shared], copy))
            self.pool.release([seq.block_ids[shared]])
            seq.block_ids[shared] = copy
        seq.block_ids += self.pool.allocate(max(0, self.pool.blocks_for(len(seq)) - len(seq.block_ids)))

    def _shared_block_index(self, seq: Sequence) -> int | None:
        """Return the index of the block that the next token is written to if it has other holders, else None."""
        index = seq.num_computed // self.pool.block_size
        return index if index < len(seq.block_ids) and self.pool.is_shared(seq.block_ids[index]) else None

    def _preempt(self, seq: Sequence, queue: list[Sequence], output: SchedulerOutput) -> None:
        queue.remove(seq)
        output.block_copies = [copy for copy in output.block_copies if copy[1] not in seq.held_blocks]
        output.preempted.append(seq)
        if self._should_swap(seq):
            self._swap_out(seq, output)
        seq.needs_refetch = self.refetch_preempted and seq.swapped is None
        self.release(seq)
        _enqueue(self.waiting, seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _should_swap(self, seq: Sequence) -> bool:
        blocks = self.pool.blocks_for(seq.num_computed) - seq.num_dropped
        if self.host_pool is None or not 0 < blocks <= self.host_pool.num_free:
            return False
        return 2 * self.costs.swap_seconds(blocks) < self.costs.prefill_seconds(seq.num_computed)

    def _swap_out(self, seq: Sequence, output: SchedulerOutput) -> None:
        assert self.host_pool is not None
        blocks = seq.blocks(seq.num_dropped, self.pool.blocks_for(seq.num_computed))
        seq.swapped = SwappedKV(seq.num_dropped, seq.num_computed, self.host_pool.allocate(len(blocks)))
        output.swap_out += zip(blocks, seq.swapped.host_blocks, strict=True)
        self.num_swaps += 1

    def _swap_in(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Restore the KV of a sequence that has blocks again, except for what the prefix cache still had."""
        if seq.swapped is not None:
            cached = seq.num_registered
            host_blocks = seq.swapped.host_blocks[cached - seq.swapped.first_block :]
            output.swap_in += zip(seq.block_ids[cached : cached + len(host_blocks)], host_blocks, strict=True)
            seq.num_computed = max(seq.num_computed, seq.swapped.num_tokens)
            self._discard_swapped(seq)

    def _discard_swapped(self, seq: Sequence) -> None:
        if seq.swapped is not None:
            assert self.host_pool is not None
            self.host_pool.release(seq.swapped.host_blocks)
            seq.swapped = None

    def _admit(self, output: SchedulerOutput, budget: StepBudget) -> None:
        while budget.tokens > 0 and len(self.running) < self.max_num_seqs:
            seq = self._pop_next(output.storing_paused, budget.has_prompt_time)
            if seq is None:
                return
            if seq.needs_refetch:
                seq.needs_refetch = False
                output.resumed.append(seq)
                continue
            self._swap_in(seq, output)
            self._append_blocks(seq, output)
            seq.admitted = True
            _enqueue(self.running, seq)
            if count := budget.allocate(seq):
                output.num_scheduled_tokens[seq] = count

    def _pop_next(self, pause_storing: bool, allow_prompts: bool) -> Sequence | None:
        """Dequeue and return the next sequence to admit; without `allow_prompts`, one that only decodes."""
        candidates = [
            seq
            for seq in self.loaded
            if not (pause_storing and seq.stores_kv) and (allow_prompts or seq.num_uncomputed == 1)
        ]
        loaded = next((seq for seq in candidates if self._blocks_needed(seq) <= self.pool.num_free), None)
        waiting = self.waiting[0] if self.waiting and not (pause_storing and self.waiting[0].stores_kv) else None
        if waiting is not None and not (allow_prompts or waiting.swapped):
            waiting = None
        if waiting is not None and self._precedes(waiting, loaded, candidates) and self._reserve_all(waiting):
            return self.waiting.pop(0)
        if loaded is not None:
            self.loaded.remove(loaded)
        return loaded

    def _precedes(self, waiting: Sequence, loaded: Sequence | None, candidates: list[Sequence]) -> bool:
        """Return whether a waiting sequence goes before `loaded`, the first of the candidates that has enough blocks."""
        if loaded is None:
            return not candidates
        return loaded.num_uncomputed > 1 and waiting.rank < min(seq.rank for seq in candidates)

    def _reserve_all(self, seq: Sequence) -> bool:
        # The last token is always computed: its logits are needed.
        max_hit_blocks = (len(seq) - 1) // self.pool.block_size
        return self.reserve(seq, max_hit_blocks, len(seq), watermark=self._watermark(seq))

    def _watermark(self, seq: Sequence) -> int:
        """Return how many blocks must stay free when a sequence gets its own.

        A preempted sequence is readmitted only if each running one keeps a spare block; otherwise it thrashes.
        """
        return len(self.running) if seq.num_preemptions else 0


def _enqueue(queue: list[Sequence], seq: Sequence) -> None:
    insort(queue, seq, key=lambda queued: queued.rank)
