"""Interface of paged attention kernels, and the flattened batch that they take: plain tensors, built once per step.

Shape legend, here and in the kernels:
    T  new tokens in the batch          N  blocks in the pool
    S  sequences                        B  tokens in a block
    H  query heads                      M  blocks of the longest sequence
    G  key/value heads                  L  layers (pool), tokens of KV (reference kernel)
    D  head size                        C  blocks to copy
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class Kernel(Protocol):
    """One back end of paged attention. Implemented by the modules `reference`, `cpu` and `gpu.triton_kernels`."""

    NAME: str

    def write_kv(
        self, cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Write the K and V of each new token into its slot of one layer's cache."""

    def attend(
        self,
        q_THD: torch.Tensor,
        cache_N2GBD: torch.Tensor,
        batch: "PagedBatch",
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return the attention of every new token over its own sequence, [T, H, D]."""

    def copy_blocks(self, pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
        """Copy whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""

    def gather_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
        """out[i] = pool[blocks[i]], whole blocks."""

    def scatter_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
        """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""


@dataclass(frozen=True)
class PagedBatch:
    """A flattened batch: the new tokens of each sequence, one sequence after the other.

    Attributes:
        pool_NL2GBD: the whole pool, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        slots_T: int64, destination of each new token's KV: block id × block size + offset.
        tables_SM: int64, block ids of each sequence in order; unused entries are 0, and those outside the attention window
            of every layer are void.
        query_lens: new tokens of each sequence.
        kv_lens: tokens of each sequence that have KV after this step, the new ones included.
        kv_lens_S: the same on the device, int64.
        kernel: the back end that all layers use.
    """

    pool_NL2GBD: torch.Tensor
    slots_T: torch.Tensor
    tables_SM: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    kv_lens_S: torch.Tensor
    kernel: Kernel

    @property
    def block_size(self) -> int:
        return self.pool_NL2GBD.shape[4]

    def layer(self, index: int) -> torch.Tensor:
        """Return the cache of one layer, a strided view [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.pool_NL2GBD[:, index]

    @cached_property
    def starts(self) -> torch.Tensor:
        """Index of each sequence's first new token in the flattened batch, then T: int64 [S + 1] on the device."""
        starts = torch.zeros(len(self.query_lens) + 1, dtype=torch.long)
        torch.cumsum(torch.tensor(self.query_lens), 0, out=starts[1:])
        return starts.to(self.kv_lens_S.device)
