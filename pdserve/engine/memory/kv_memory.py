"""KV memory: the pool's tensor, the blocks in host memory to which it is swapped, and copies of blocks between them.

Shape legend: see kernels/batch.py; C blocks to copy.
"""

import time

import torch

from pdserve.engine.memory.block_pool import BlockPairs
from pdserve.kernels.batch import Kernel
from pdserve.kernels.gpu.copies import PoolCopies


class KVMemory:
    """The tensors of a pool. Which of its blocks are in use is the `BlockPool`'s concern.

    Args:
        host_NL2GBD: blocks in host memory, for swapping.
        kernel: its copies of blocks are used.
    """

    def __init__(self, pool_NL2GBD: torch.Tensor, host_NL2GBD: torch.Tensor, kernel: Kernel) -> None:
        self.pool_NL2GBD = pool_NL2GBD
        self.host_NL2GBD = host_NL2GBD
        self._kernel = kernel

    @property
    def num_blocks(self) -> int:
        return len(self.pool_NL2GBD)

    @property
    def num_host_blocks(self) -> int:
        return len(self.host_NL2GBD)

    def copies(self) -> PoolCopies:
        """Return what copies blocks between the pool and host memory, beside the steps."""
        return PoolCopies(self.pool_NL2GBD, self._kernel)

    @torch.inference_mode()
    def compile_copies(self) -> None:
        """Copy a block in every way that the kernel offers, which compiles it. For an unused pool."""
        first_C = torch.zeros(1, dtype=torch.long, device=self.pool_NL2GBD.device)
        block_C = torch.empty_like(self.pool_NL2GBD[:1])
        self._kernel.gather_blocks(self.pool_NL2GBD, first_C, block_C)
        self._kernel.scatter_blocks(self.pool_NL2GBD, first_C, block_C)
        self._kernel.copy_blocks(self.pool_NL2GBD, first_C, first_C + 1)

    @torch.inference_mode()
    def clear_tail(self, block: int, used: int) -> None:
        """Zero a partial block behind its first `used` tokens, so that no other sequence's KV leaves the instance."""
        self.pool_NL2GBD[block, ..., used:, :] = 0

    @torch.inference_mode()
    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy whole blocks within the pool, as if one (source, target) pair after the other."""
        batch: BlockPairs = []
        for source, target in pairs:
            if any(target in pair for pair in batch) or any(source == written for _, written in batch):
                self._copy_batch(batch)
                batch = []
            batch.append((source, target))
        self._copy_batch(batch)

    def _copy_batch(self, batch: BlockPairs) -> None:
        if batch:
            sources_C, targets_C = torch.tensor(batch, device=self.pool_NL2GBD.device).T.contiguous()
            self._kernel.copy_blocks(self.pool_NL2GBD, sources_C, targets_C)

    @torch.inference_mode()
    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        """Copy blocks to host memory, then others back. Each pair is (block, host block).

        Returns:
            The seconds that the copies took.
        """
        started = time.monotonic()
        for block, host_block in swap_out:
            self.host_NL2GBD[host_block].copy_(self.pool_NL2GBD[block], non_blocking=True)
        for block, host_block in swap_in:
            self.pool_NL2GBD[block].copy_(self.host_NL2GBD[host_block], non_blocking=True)
        if self.pool_NL2GBD.is_cuda:
            torch.cuda.synchronize(self.pool_NL2GBD.device)
        return time.monotonic() - started
