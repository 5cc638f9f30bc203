"""Linear layers in bfloat16 on the matrix instructions of Intel's processors: linear.cpp. Weights are packed for it once."""

from functools import cache

import torch

from pdserve.kernels import cpu
from pdserve.kernels.elementwise import ACTIVATIONS

_TILE_K, _UNIT_N = 32, 32  # the sides are filled up with zeros to multiples of these


@cache
def available() -> bool:
    """The compiler, the processor and the system all have them. Where they should and do not, cpu.py tells."""
    return cpu.can_build() and bool(cpu.library().pdserve_amx())


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """A copy of a bfloat16 weight in the order of linear.cpp, in large pages where the system has them."""
    high, wide = weight_NK.shape
    weight_NK = torch.nn.functional.pad(weight_NK, (0, -wide % _TILE_K, 0, -high % _UNIT_N))
    pairs = weight_NK.contiguous().view(torch.int32).unflatten(0, (-1, 16)).transpose(1, 2)  # [N / 16, K / 2, 16]
    packed = torch.empty(pairs.shape, dtype=torch.int32)
    cpu.huge_pages(packed)
    return packed.copy_(pairs).view(torch.bfloat16).flatten()


def linear(x: torch.Tensor, packed: torch.Tensor, out_features: int, bias_N: torch.Tensor | None) -> torch.Tensor:
    """[..., K] → [..., N], bfloat16: x · weightᵀ + bias, summed in float32 and rounded once."""
    assert bias_N is None or (bias_N.shape == (out_features,) and bias_N.dtype == x.dtype and bias_N.is_contiguous())
    return _linear(x, packed, out_features, bias_N, None, 0)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out_features: int, activation: str) -> torch.Tensor:
    """[..., K] → [..., N], bfloat16: activation(x · gateᵀ) · (x · upᵀ), both packed. The same as `linear` of each and
    `elementwise.gate`, to the last bit, but that nothing of it leaves the processor's caches in between."""
    assert up.dtype == x.dtype and up.shape == gate.shape
    return _linear(x, gate, out_features, None, up, ACTIVATIONS.index(activation))


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    out_features: int,
    bias_N: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: int,
) -> torch.Tensor:
    assert x.dtype == packed.dtype == torch.bfloat16
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype)
    x = torch.nn.functional.pad(x, (0, missing)) if (missing := -x.shape[-1] % _TILE_K) else x.contiguous()
    wide = x.shape[-1]
    assert len(packed) == wide * (out_features + -out_features % _UNIT_N)
    cpu.functions().pdserve_linear(
        y.data_ptr(),
        x.data_ptr(),
        packed.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        x.numel() // wide,
        wide,
        out_features,
        torch.get_num_threads(),
        None if up is None else up.data_ptr(),
        activation,
    )
    return y
