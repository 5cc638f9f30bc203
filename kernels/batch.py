"""What a paged attention kernel needs to know about one flattened batch. Plain tensors, made once per step.

Shape legend, here and in the kernels: T new tokens in the batch, S sequences, H query heads, G key/value heads, D head
size, N blocks in the pool, B tokens in a block, M blocks of the longest sequence.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedBatch:
    """Sequences lie one after the other in the flattened batch, each with its new tokens.

    Attributes:
        pool_NL2GBD: the whole pool, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        slots_T: int64, where the KV of each new token goes: block id × block size + offset.
        tables_SM: int64, block ids of each sequence in order; unused entries are 0.
        query_lens: new tokens of each sequence.
        kv_lens: tokens of each sequence that have KV after this step, the new ones included.
        kv_lens_S: the same on the device, int64.
    """

    pool_NL2GBD: torch.Tensor
    slots_T: torch.Tensor
    tables_SM: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    kv_lens_S: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.pool_NL2GBD.shape[4]

    def layer(self, index: int) -> torch.Tensor:
        """The cache of one layer, a strided view [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.pool_NL2GBD[:, index]
