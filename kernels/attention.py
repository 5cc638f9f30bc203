"""The one entry point of paged attention: writes new K and V into the pool and attends over cached plus new tokens."""

from dataclasses import dataclass

import torch

from pdserve.kernels import reference
from pdserve.kernels.batch import PagedBatch


@dataclass(frozen=True)
class AttentionOptions:
    """Per-layer settings.

    Attributes:
        scale: multiplies q·k.
        window: a token sees itself and the window - 1 tokens before it; None sees all.
        softcap: scores become softcap · tanh(score / softcap); None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


def paged_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' KV, [T, H, D] in the dtype of the query."""
    cache_N2GBD = batch.layer(layer)
    reference.write_kv(cache_N2GBD, k_TGD, v_TGD, batch.slots_T)
    return reference.attend(q_THD, cache_N2GBD, batch, options.scale, options.window, options.softcap)
