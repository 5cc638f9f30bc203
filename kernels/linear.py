"""Linear layers in bfloat16 on Intel AMX (linear.cpp), over weights that are packed once.

Shape legend: K input features, N output features.
"""

from functools import cache

import torch

from pdserve.kernels import memory, native
from pdserve.kernels.elementwise import ACTIVATIONS

_TILE_K, _UNIT_N = 32, 32  # K and N are padded with zeros to multiples of these


@cache
def is_available() -> bool:
    """Return whether compiler, processor and operating system all support AMX. native.py logs if only the processor does."""
    return native.is_available() and bool(native.library().pdserve_amx())


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return a copy of a bfloat16 weight in the order of linear.cpp, in huge pages where the system has them."""
    out_features, in_features = weight_NK.shape
    weight_NK = torch.nn.functional.pad(weight_NK, (0, -in_features % _TILE_K, 0, -out_features % _UNIT_N))
    pairs = weight_NK.contiguous().view(torch.int32).unflatten(0, (-1, 16)).transpose(1, 2)  # [N / 16, K / 2, 16]
    packed = torch.empty(pairs.shape, dtype=torch.int32)
    memory.huge_pages(packed)
    return packed.copy_(pairs).view(torch.bfloat16).flatten()


def linear(x: torch.Tensor, packed: torch.Tensor, out_features: int, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Return x · weightᵀ + bias, [..., K] → [..., N] in bfloat16, summed in float32 and rounded once."""
    assert bias_N is None or (bias_N.shape == (out_features,) and bias_N.dtype == x.dtype and bias_N.is_contiguous())
    return _linear(x, packed, out_features, bias_N, None, 0)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out_features: int, activation: str) -> torch.Tensor:
    """Return activation(x · gateᵀ) · (x · upᵀ), [..., K] → [..., N] in bfloat16; both weights are packed.

    Equals `linear` of each and `elementwise.gate` bit for bit, but intermediate results stay in the processor's caches.
    """
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
    x = torch.nn.functional.pad(x, (0, padding)) if (padding := -x.shape[-1] % _TILE_K) else x.contiguous()
    in_features = x.shape[-1]
    assert len(packed) == in_features * (out_features + -out_features % _UNIT_N)
    native.functions().pdserve_linear(
        y.data_ptr(),
        x.data_ptr(),
        packed.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        x.numel() // in_features,
        in_features,
        out_features,
        torch.get_num_threads(),
        None if up is None else up.data_ptr(),
        activation,
    )
    return y
