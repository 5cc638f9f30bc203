"""Checkpoint: a loaded model and its properties."""

from dataclasses import dataclass

import torch

from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.keys import Layout
from pdserve.kv_spec import KVSpec
from pdserve.pooling import Pooling


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and its properties.

    Attributes:
        model: the transformers module, in eval mode, on its device.
        layout: layout of one KV block, which is the namespace of its keys.
        spec: what the model's KV is.
        context_length: number of positions that the model supports with the same tokens in any batch.
        eos_token_ids: tokens that end generation.
        message_ends: further tokens that chat templates write behind messages.
        group: the other ranks of the instance, if there are any; the model is then one rank's slice.
        pooling: how embeddings are made; None: not at all.
        hidden_size: numbers of a hidden state.
    """

    model: torch.nn.Module
    layout: Layout
    spec: KVSpec
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    group: RankGroup | None = None
    pooling: Pooling | None = None
    hidden_size: int = 0
    message_ends: frozenset[int] = frozenset()

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the pool's numbers."""
        dtype = getattr(torch, self.layout.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
