"""KV memory: the pool's tensor, the blocks in host memory to which it is swapped, and copies of blocks between them.

Shape legend: see kernels/batch.py; C blocks to copy, X numbers of a block.
"""

import math
import time
from typing import Any

import torch

from pdserve.engine.memory.blocks import BlockPairs
from pdserve.kernels.batch import Kernel, layer_caches
from pdserve.keys import Layout
from pdserve.kv_spec import KVSpec
from pdserve.plugins import extension


def section_views(blocks_NX: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return each section of contiguous blocks as a strided view [N, L, 2, G, B, D]; [N, L, 1, 1, B, D] of latents."""
    parts = blocks_NX.flatten(1).split([math.prod(shape) for shape in layout.shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, layout.shapes, strict=True)]


def _final_bytes(layout: Layout, spec: KVSpec) -> list[int]:
    sizes = [math.prod(shape) * layout.itemsize for shape in layout.shapes]
    starts = [sum(sizes[:section]) + at * (sizes[section] // layout.shapes[section][0]) for section, at in spec.places]
    return [min(starts[layer + 1 :], default=layout.block_bytes) for layer in range(len(starts))]


class KVMemory:
    """The tensors of a pool. Which of its blocks are in use is the `BlockPool`'s concern.

    Args:
        host_NX: blocks in host memory, for swapping.
        kernel: its copies of blocks are used.
        layout, spec: what is in a block, and where each layer's KV is.

    Attributes:
        pool_NX: all blocks, in the dtype of the model.
        sections: views of the pool, see `section_views`.
        caches: views of the pool by layer, see `PagedBatch`.
        final_bytes: of each layer, the leading bytes of a block to which no later layer writes.
    """

    def __init__(
        self, pool_NX: torch.Tensor, host_NX: torch.Tensor, kernel: Kernel, layout: Layout, spec: KVSpec
    ) -> None:
        self.pool_NX = pool_NX
        self.host_NX = host_NX
        self.sections = section_views(pool_NX, layout)
        caches = [layer_caches(section_NL2GBD) for section_NL2GBD in self.sections]
        self.caches = [caches[section][layer] for section, layer in spec.places]
        self.final_bytes = _final_bytes(layout, spec)
        self._kernel = kernel

    @property
    def num_blocks(self) -> int:
        return len(self.pool_NX)

    @property
    def num_host_blocks(self) -> int:
        return len(self.host_NX)

    def copies(self) -> Any:
        """Return what copies blocks of a pool on a GPU beside the steps: `Copies` of kv_transfer/staging.py."""
        return extension("gpu").copies(self.pool_NX, self._kernel)

    @torch.inference_mode()
    def compile_copies(self) -> None:
        """Copy a block in every way that the kernel offers, which compiles it. For an unused pool."""
        first_C = torch.zeros(1, dtype=torch.long, device=self.pool_NX.device)
        block_C = torch.empty_like(self.pool_NX[:1])
        self._kernel.gather_blocks(self.pool_NX, first_C, block_C)
        self._kernel.scatter_blocks(self.pool_NX, first_C, block_C)
        self._kernel.copy_blocks(self.pool_NX, first_C, first_C + 1)

    @torch.inference_mode()
    def clear_tail(self, block: int, used: int) -> None:
        """Zero a partial block behind its first `used` tokens, so that no other sequence's KV leaves the instance."""
        for section_NL2GBD in self.sections:
            section_NL2GBD[block, ..., used:, :] = 0

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
            sources_C, targets_C = torch.tensor(batch, device=self.pool_NX.device).T.contiguous()
            self._kernel.copy_blocks(self.pool_NX, sources_C, targets_C)

    @torch.inference_mode()
    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        """Copy blocks to host memory, then others back. Each pair is (block, host block).

        Returns:
            The seconds that the copies took.
        """
        started = time.monotonic()
        for block, host_block in swap_out:
            self.host_NX[host_block].copy_(self.pool_NX[block], non_blocking=True)
        for block, host_block in swap_in:
            self.pool_NX[block].copy_(self.host_NX[host_block], non_blocking=True)
        if self.pool_NX.is_cuda:
            torch.cuda.synchronize(self.pool_NX.device)
        return time.monotonic() - started
