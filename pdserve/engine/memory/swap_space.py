"""Swap space: host memory for the KV of preempted sequences, and the decision whether to use it. Plain Python."""

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPairs, BlockPool, SwappedKV
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
        return 2 * costs.swap_seconds(num_blocks) < costs.prefill_seconds(seq.kv.num_computed)

    def swap_out(self, seq: Sequence, num_blocks: int) -> tuple[SwappedKV, BlockPairs]:
        """Reserve room for the first `num_blocks` that the sequence holds, and return the copies to make."""
        assert self.pool is not None
        swapped = SwappedKV(seq.kv.num_dropped, seq.kv.num_computed, self.pool.allocate(num_blocks))
        self.num_swaps += 1
        return swapped, list(zip(seq.kv.held_blocks[:num_blocks], swapped.host_blocks, strict=True))

    def swap_in(self, seq: Sequence) -> BlockPairs:
        """Restore the KV of a sequence that has blocks again, and return the copies to make.

        Blocks that the prefix cache still had are not copied.
        """
        cached = seq.kv.num_registered
        swapped = seq.kv.restore_swapped()
        host_blocks = swapped.host_blocks[cached - swapped.first_block :]
        self._release(swapped)
        return list(zip(seq.kv.block_ids[cached : cached + len(host_blocks)], host_blocks, strict=True))

    def discard(self, seq: Sequence) -> None:
        """Release the room of a sequence that will not run again."""
        self._release(seq.kv.discard_swapped())

    def _release(self, swapped: SwappedKV) -> None:
        assert self.pool is not None
        self.pool.release(swapped.host_blocks)
