"""What a paged attention kernel is, and what it needs to know about one flattened batch: plain tensors, made once per step.

Shape legend, here and in the kernels: T new tokens in the batch, S sequences, H query heads, G key/value heads, D head
size, N blocks in the pool, B tokens in a block, M blocks of the longest sequence.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class Kernel(Protocol):
    """One back end. Modules implement it: `reference`, `cpu`, `gpu.triton_kernels`."""

    NAME: str

    def write_kv(
        self, cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Puts the K and V of each new token into its slot of one layer's cache."""

    def attend(
        self,
        q_THD: torch.Tensor,
        cache_N2GBD: torch.Tensor,
        batch: "PagedBatch",
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of every new token over its own sequence, [T, H, D]."""

    def copy_blocks(self, pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
        """Whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""

    def gather_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
        """out[i] = pool[blocks[i]], whole blocks."""

    def scatter_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
        """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""


@dataclass(frozen=True)
class PagedBatch:
    """Sequences lie one after the other in the flattened batch, each with its new tokens.

    Attributes:
        pool_NL2GBD: the whole pool, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        slots_T: int64, where the KV of each new token goes: block id × block size + offset.
        tables_SM: int64, block ids of each sequence in order; unused entries are 0, and those behind the window of every
            layer mean nothing.
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
        """The cache of one layer, a strided view [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.pool_NL2GBD[:, index]

    @cached_property
    def starts(self) -> torch.Tensor:
        """int64 [S + 1] on the device: the first new token of each sequence in the flattened batch, then T."""
        starts = torch.zeros(len(self.query_lens) + 1, dtype=torch.long)
        torch.cumsum(torch.tensor(self.query_lens), 0, out=starts[1:])
        return starts.to(self.kv_lens_S.device)
