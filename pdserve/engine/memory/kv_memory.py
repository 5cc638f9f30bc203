"""KV memory: the pool's tensor, the blocks in host memory to which it is swapped, and copies of blocks between them.

Shape legend: see kernels/batch.py; C blocks to copy, X numbers of a block.
"""

import math
import time
from typing import Any

import torch

from pdserve.engine.memory.blocks import BlockPairs
from pdserve.engine.memory.groups import Group, blocks_in
from pdserve.kernels.batch import Kernel, layer_caches
from pdserve.kernels.states import StateRows
from pdserve.keys import Layout
from pdserve.kv_spec import KVSpec
from pdserve.plugins import extension


def section_views(blocks_NX: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return each section of contiguous blocks as a strided view [N, L, 2, G, B, D]; [N, L, 1, 1, B, D] of latents."""
    parts = blocks_NX.flatten(1).split([math.prod(shape) for shape in layout.shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, layout.shapes, strict=True)]


def page_numbers(layout: Layout) -> int:
    """Return the numbers of a page: the smallest that blocks of each group fill."""
    return math.lcm(*(group.block_numbers for group in layout.groups))


def pool_groups(layout: Layout, num_pages: int) -> list[Group]:
    """Return the groups of a pool of so many pages."""
    groups, first_id = list[Group](), 0
    for group in layout.groups:
        groups.append(Group(group.window or None, page_numbers(layout) // group.block_numbers, first_id))
        first_id += num_pages * groups[-1].per_page
    return groups


def group_views(pages_NX: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return pages as the blocks of each group, [blocks, numbers of a block]."""
    if len(layout.groups) == 1:
        return [pages_NX]  # whose rows are the blocks; in a simulation, without their bytes
    numbers = [group.block_numbers for group in layout.groups]
    return [pages_NX.view(pages_NX.numel() // count, count) for count in numbers]


def _final_bytes(layout: Layout, spec: KVSpec) -> list[int]:
    if len(layout.groups) > 1:
        return []
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
        pool_NX: all pages, in the dtype of the model. Where there is one group of layers, a page is a block.
        groups: of the blocks, see `BlockPool`.
        num_blocks: how many blocks of each group there can be at once.
        views: of the pool by group, [blocks, numbers of a block].
        sections: views of these, see `section_views`.
        caches: views of the pool by layer, see `PagedBatch`.
        group_of: of each layer, its group.
        states: the memory of states; None if the model has none.
        final_bytes: of each layer, the leading bytes of a block to which no later layer writes; none if there are groups.
    """

    def __init__(
        self, pool_NX: torch.Tensor, host_NX: torch.Tensor, kernel: Kernel, layout: Layout, spec: KVSpec
    ) -> None:
        self.pool_NX = pool_NX
        self.host_NX = host_NX
        self.groups, self.host_groups = pool_groups(layout, len(pool_NX)), pool_groups(layout, len(host_NX))
        self.num_blocks = blocks_in(len(pool_NX), self.groups)
        self.views = group_views(pool_NX, layout)
        self._host_views = group_views(host_NX, layout)
        self.sections = [
            section
            for view_NX, group in zip(self.views, layout.groups, strict=True)
            for section in section_views(view_NX, group)
        ]
        caches = [layer_caches(section_NL2GBD) for section_NL2GBD in self.sections]
        self.caches = [caches[section][layer] for section, layer in spec.places]
        windows = [group.window for group in layout.groups]
        group_of_section = [windows.index(section.window) for section in layout.sections]
        self.group_of = [group_of_section[section] for section, _ in spec.places]
        self._sections_of = [
            [part for part, of in zip(self.sections, group_of_section, strict=True) if of == at]
            for at in range(len(windows))
        ]  # views of each group's blocks
        self.states: StateRows | None = None
        if spec.states:
            self.states = StateRows(self.views[-1].view(torch.float32), spec.state_offsets)
        self.final_bytes = _final_bytes(layout, spec)
        self._kernel = kernel

    @property
    def num_pages(self) -> int:
        return len(self.pool_NX)

    @property
    def num_host_blocks(self) -> int:
        """Pages in host memory."""
        return len(self.host_NX)

    def copies(self, at: int = 0) -> Any:
        """Return what copies a group's blocks of a pool on a GPU beside the steps: `Copies` of kv_transfer/staging.py."""
        return extension("gpu").copies(self.views[at], self._kernel)

    @torch.inference_mode()
    def compile_copies(self) -> None:
        """Copy a block in every way that the kernel offers, which compiles it. For an unused pool."""
        first_C = torch.zeros(1, dtype=torch.long, device=self.pool_NX.device)
        for view_NX in self.views:
            block_C = torch.empty_like(view_NX[:1])
            self._kernel.gather_blocks(view_NX, first_C, block_C)
            self._kernel.scatter_blocks(view_NX, first_C, block_C)
            self._kernel.copy_blocks(view_NX, first_C, first_C + 1)

    @torch.inference_mode()
    def clear_tail(self, block: int, used: int) -> None:
        """Zero a partial block behind its first `used` tokens, so that no other sequence's KV leaves the instance.

        A state has nothing of others.
        """
        at = self._group(block) if len(self.groups) > 1 else 0
        if self.groups[at].is_states:
            return
        for section_NL2GBD in self._sections_of[at]:
            section_NL2GBD[block - self.groups[at].first_id, ..., used:, :] = 0

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
        for at, group in enumerate(self.groups):
            if pairs := [pair for pair in batch if self._group(pair[0]) == at]:
                sources_C, targets_C = (torch.tensor(pairs, device=self.pool_NX.device) - group.first_id).T.contiguous()
                self._kernel.copy_blocks(self.views[at], sources_C, targets_C)

    def _group(self, block: int) -> int:
        """Return the group of a block."""
        return sum(block >= group.first_id for group in self.groups) - 1

    def _pair(self, block: int, host_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a block and one in host memory."""
        at = self._group(block)
        host_block -= self.host_groups[at].first_id
        return self.views[at][block - self.groups[at].first_id], self._host_views[at][host_block]

    @torch.inference_mode()
    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        """Copy blocks to host memory, then others back. Each pair is (block, host block).

        Returns:
            The seconds that the copies took.
        """
        started = time.monotonic()
        for block, host_block in swap_out:
            block_X, host_X = self._pair(block, host_block)
            host_X.copy_(block_X, non_blocking=True)
        for block, host_block in swap_in:
            block_X, host_X = self._pair(block, host_block)
            block_X.copy_(host_X, non_blocking=True)
        if self.pool_NX.is_cuda:
            torch.cuda.synchronize(self.pool_NX.device)
        return time.monotonic() - started
