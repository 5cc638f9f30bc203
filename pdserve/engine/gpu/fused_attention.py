"""Norms of heads, rotary embeddings and the write of KV in one launch, for 16-bit types on GPUs.

A model's attention calls the function `apply_rotary_pos_emb` of its module, and may normalise each head before. Both are
deferred until the paged attention is called (`paged_model.py`): the copy of the attention's forward gets a rotary function
that changes nothing, the norms become identities, and what they need travels as a keyword argument, `deferred`. A model is
changed only if a trial of the kernel gives the same results as its own functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

import torch

from pdserve.engine.cpu_fusion.fused_layers import ROTARY, FusedNorm, Rotary, with_rotary
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES, nearly_equal
from pdserve.kernels.gpu import elementwise

_TEST_TOKENS, _TEST_HEADS, _TEST_KV_HEADS, _TEST_BLOCK = 5, 6, 2, 4
Norms = tuple[torch.Tensor, torch.Tensor, float]  # weights [D] of q's and of k's norm, eps


@dataclass(frozen=True)
class Deferred:
    """Norms and rotation that q and k still need. cos and sin are [1, T, R]."""

    norms: Norms | None
    cos_1TR: torch.Tensor
    sin_1TR: torch.Tensor

    def rotate_and_write(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        cache_N2GBD: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Normalise and rotate q and k, write k and v into one layer's cache, and return q."""
        cos_TR, sin_TR = self.cos_1TR[0, : len(slots_T)], self.sin_1TR[0, : len(slots_T)]
        return elementwise.rotate_and_write(q_THD, k_TGD, v_TGD, cos_TR, sin_TR, self.norms, cache_N2GBD, slots_T)


@torch.inference_mode()
def fuse_attention(model: torch.nn.Module) -> int:
    """Defer in place the norms and rotary embeddings of a model's attention modules where the kernel equals them.

    Returns:
        The number of attention modules changed.
    """
    parameter = next(model.parameters())
    if parameter.dtype not in FUSED_DTYPES:
        return 0
    equal: dict[Rotary, bool] = {}
    count = 0
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
            continue
        original = forward.__globals__.get(ROTARY)
        if original is None or not isinstance(getattr(module, "layer_idx", None), int):
            continue
        if original not in equal:
            equal[original] = _equals_kernel(original, parameter)
        norms = _norms(module)
        if not equal[original] or norms is False:
            continue
        _defer(module, forward, norms)
        count += 1
    return count


def _norms(module: torch.nn.Module) -> "Norms | Literal[False] | None":
    """Return the norms of each head, None if there are none, or False if the kernel does not compute what there is."""
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if q_norm is None and k_norm is None:
        return None
    size = getattr(module, "head_dim", None)
    if not isinstance(q_norm, FusedNorm) or not isinstance(k_norm, FusedNorm) or q_norm.eps != k_norm.eps:
        return False
    if q_norm.weight.shape != (size,) or k_norm.weight.shape != (size,):
        return False
    return q_norm.weight, k_norm.weight, q_norm.eps


def _defer(module: torch.nn.Module, forward: FunctionType, norms: Norms | None) -> None:
    def unchanged(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    inner = with_rotary(forward, unchanged)

    def deferring(self: torch.nn.Module, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        deferred = Deferred(norms, *position_embeddings)
        return inner(self, *args, position_embeddings=position_embeddings, deferred=deferred, **kwargs)

    module.forward = MethodType(deferring, module)
    if norms is not None:
        module.q_norm, module.k_norm = torch.nn.Identity(), torch.nn.Identity()


def _equals_kernel(original: Callable[..., Any], like: torch.Tensor) -> bool:
    """Return whether the kernel is within one unit in the last place of `original`, and writes what it should."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(like)

    slots_T = torch.tensor([9, 3, 0, 6, 14], device=like.device)
    for size in (64, 20):
        q, k, v = (normal(1, heads, _TEST_TOKENS, size) for heads in (_TEST_HEADS, _TEST_KV_HEADS, _TEST_KV_HEADS))
        cos, sin = normal(1, _TEST_TOKENS, size), normal(1, _TEST_TOKENS, size)
        try:
            expected_q, expected_k = original(q, k, cos, sin)
        except Exception:  # noqa: BLE001 - a function with another signature may raise anything
            return False
        cache = normal(4, 2, _TEST_KV_HEADS, _TEST_BLOCK, size)
        q_THD, k_TGD, v_TGD, q_expected, k_expected = (x[0].transpose(0, 1) for x in (q, k, v, expected_q, expected_k))
        got = Deferred(None, cos, sin).rotate_and_write(q_THD, k_TGD, v_TGD, cache, slots_T)
        written = cache[slots_T // _TEST_BLOCK, :, :, slots_T % _TEST_BLOCK]  # [T, 2, G, D]
        if not nearly_equal(got, q_expected) or not nearly_equal(written[:, 0], k_expected):
            return False
        if not torch.equal(written[:, 1], v_TGD):
            return False
    return True
