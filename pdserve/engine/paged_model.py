"""Adapter that puts paged attention into any transformers decoder that uses the attention interface.

The batch travels as a keyword argument (`paged=`) of the forward, through the model's layers, to `attention_forward`.
Shape legend: see kernels/batch.py.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from pdserve.engine.kv_probe import KVProbe, UnsupportedAttention
from pdserve.kernels.batch import PagedBatch, Scores
from pdserve.kernels.reference import SCALE_BYTES

if TYPE_CHECKING:
    from pdserve.engine.gpu.fused_attention import Deferred

NAME = "pdserve_paged"


def register() -> None:
    """Register `attn_implementation=NAME` with transformers. Idempotent.

    Without a mask function, transformers builds no mask: the kernel derives causality and windows from the batch. With one,
    it would first look for packed sequences in the positions, whose result it reads: a wait for the GPU in every step.
    """
    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: torch.nn.Module,
    q_1HTD: torch.Tensor,
    k_1GTD: torch.Tensor,
    v_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: "PagedBatch | KVProbe",
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    deferred: "Deferred | None" = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [1, T, H, D] and no weights. The signature is the one that transformers calls.

    `s_aux` are a layer's attention sinks in float32 (attention_sinks.py).
    Of latent attention, K and V are both the latent rows (latent_attention.py).
    With `deferred`, q and k are not yet normalised and rotated (`gpu/fused_attention.py`). Where the batch has one
    token and T is larger, the other rows are the same token again (`ModelRunner.compute_logits`).

    Raises:
        UnsupportedAttention: masks of the model's own, or KV that does not fit the pool.
    """
    if attention_mask is not None:
        raise UnsupportedAttention("layers that select the tokens to which they attend")
    if k_1GTD.shape != v_1GTD.shape:
        raise UnsupportedAttention("layers whose key and value heads differ in number or size")
    layer, absorbed = module.layer_idx, getattr(module, "absorbed", None)
    assert isinstance(layer, int)
    if absorbed is not None:
        q_1HTD = absorbed.queries(q_1HTD)
    if isinstance(paged, KVProbe):
        y_1THD = paged.attend(layer, q_1HTD, k_1GTD, v_1GTD, sliding_window)
        return y_1THD if absorbed is None else absorbed.values(y_1THD), None
    scale_bytes = SCALE_BYTES if paged.caches[layer].dtype == torch.int8 else 0
    if (k_1GTD.shape[1], k_1GTD.shape[3] + scale_bytes) != paged.caches[layer].shape[2::2]:
        raise UnsupportedAttention(f"the keys of layer {layer} have another shape than its model's KVSpec says")
    scale = scaling if scaling is not None else q_1HTD.shape[-1] ** -0.5
    cache_N2GBD, on_layer, num_tokens = paged.caches[layer], paged.on_layer, len(paged.slots_T)
    if paged.tails:
        paged = paged.of_layer(layer)
    q_THD = q_1HTD[0, :, :num_tokens].transpose(0, 1)
    k_TGD, v_TGD = k_1GTD[0, :, :num_tokens].transpose(0, 1), v_1GTD[0, :, :num_tokens].transpose(0, 1)
    if deferred is not None:
        q_THD = deferred.rotate_and_write(q_THD, k_TGD, v_TGD, cache_N2GBD, paged.slots_T)
    else:
        paged.kernel.write_kv(cache_N2GBD, k_TGD, v_TGD, paged.slots_T)
        if on_layer is not None:
            on_layer(layer)
    y_THD = paged.kernel.attend(q_THD, cache_N2GBD, paged, Scores(scale, sliding_window, softcap, s_aux))
    y_1THD = y_THD.expand(q_1HTD.shape[2], -1, -1)[None]
    return y_1THD if absorbed is None else absorbed.values(y_1THD), None
