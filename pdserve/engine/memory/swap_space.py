"""Swap space: host memory for the KV of preempted sequences, and the decision whether to use it. Plain Python."""

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPairs, BlockPool
from pdserve.engine.memory.groups import SwappedKV
from pdserve.engine.sequence import Sequence


class SwapSpace:
    """Blocks in host memory. Decides and counts; `KVMemory` copies the bytes.

    Args:
        pool: block ids in host memory; None if there are none.

    Attributes:
        num_swaps: sequences that were swapped out.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        self.pool = pool
        self.num_swaps = 0

    def pays(self, seq: Sequence, num_blocks: int, costs: Costs) -> bool:
        """Return whether the sequence's KV of `num_blocks` fits, and is copied out and in faster than computed again."""
        if self.pool is None or not 0 < num_blocks <= self.pool.num_free:
            return False
        if seq.kv.tails and self.pool.pages_for(num_blocks) > self.pool.num_free:
            return False
        return 2 * costs.swap_seconds(num_blocks) < costs.prefill_seconds(seq.kv.num_computed)

    def swap_out(self, seq: Sequence, num_blocks: int) -> tuple[SwappedKV, BlockPairs]:
        """Reserve room for the first `num_blocks` that the sequence holds, and return the copies to make."""
        assert self.pool is not None
        kv = seq.kv
        host_blocks = self._allocate(num_blocks)
        self.num_swaps += 1
        pairs = list(zip(kv.held_blocks[:num_blocks], host_blocks, strict=False))
        tails = []
        for tail in kv.tails:
            first, held = tail.to_swap(self.pool, kv.num_computed, kv.num_dropped + num_blocks)
            tails.append((first, self._allocate(len(held), tail.at)))
            pairs += zip(held, tails[-1][1], strict=False)
        return SwappedKV(kv.num_dropped, kv.num_computed, host_blocks, tails), pairs

    def swap_in(self, seq: Sequence) -> BlockPairs:
        """Restore the KV of a sequence that has blocks again, and return the copies to make.

        Blocks that the prefix cache still had are not copied.
        """
        cached = seq.kv.num_registered
        swapped = seq.kv.restore_swapped()
        stop = -(-swapped.num_tokens // seq.kv.block_size)
        host_blocks = swapped.host_blocks[cached - swapped.first_block :]
        self._release(swapped)
        pairs = list(zip(seq.kv.block_ids[cached:stop], host_blocks, strict=False))
        for tail, (first, of_tail) in zip(seq.kv.tails, swapped.tails, strict=True):
            begin = max(cached, first)
            pairs += zip(tail.to_restore(begin, stop), of_tail[begin - first :], strict=False)
        return pairs

    def discard(self, seq: Sequence) -> None:
        """Release the room of a sequence that will not run again."""
        self._release(seq.kv.discard_swapped())

    def _release(self, swapped: SwappedKV) -> None:
        assert self.pool is not None
        self.pool.release(swapped.host_blocks)
        for _, host_blocks in swapped.tails:
            self.pool.release(host_blocks)

    def _allocate(self, num_blocks: int, at: int = 0) -> list[int]:
        """Take so many blocks in host memory, and what else is in their pages."""
        assert self.pool is not None
        return self.pool.allocate(-(-num_blocks // self.pool.groups[at].per_page), at)
