"""Fused element-wise operations of a decoder on CPUs (elementwise.cpp), each in one pass instead of torch's many.

Shape legend: see batch.py; R rotated elements of a head (rotary), rows (argmax); N elements of a row.
"""

import torch

from pdserve.kernels.native import DTYPES, addresses, functions

ACTIVATIONS = ("silu", "gelu_tanh")  # the index is the constant in the C++ sources


def rms_norm(x: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm (Zhang and Sennrich 2019) over the last dimension: weight · x / √(mean(x²) + eps), [..., N].

    As in the Llama norm of transformers, the quotient is computed in float32 and rounded to the dtype before it is
    multiplied with the weight.
    """
    assert x.dtype == weight_N.dtype and x.shape[-1:] == weight_N.shape
    x, weight_N = x.contiguous(), weight_N.contiguous()
    y, size = torch.empty_like(x), len(weight_N)
    sizes = x.numel() // size, size, eps, torch.get_num_threads()
    functions().pdserve_rms_norm(DTYPES.index(x.dtype), *addresses(y, x, weight_N), *sizes)
    return y


def rotary(
    q_1THD: torch.Tensor, k_1TGD: torch.Tensor, cos_1TR: torch.Tensor, sin_1TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotary embeddings (Su et al. 2021) of q and k, as new tensors [1, T, H, D] and [1, T, G, D].

    The first R of each head's D elements become x · cos + (-x2, x1) · sin, with x1 and x2 the two halves of those R, as in
    the Llama model of transformers. cos and sin have the dtype of q and k, or float32. Products are rounded to the dtype of
    cos and sin, the sum to that of q and k.
    """
    _, tokens, heads, size = q_1THD.shape
    kv_heads, rotated = k_1TGD.shape[2], cos_1TR.shape[2]
    assert k_1TGD.shape == (1, tokens, kv_heads, size) and cos_1TR.shape == sin_1TR.shape == (1, tokens, rotated)
    assert k_1TGD.dtype == q_1THD.dtype and cos_1TR.dtype == sin_1TR.dtype in (q_1THD.dtype, torch.float32)
    q_1THD = q_1THD if q_1THD.stride(3) == 1 else q_1THD.contiguous()
    k_1TGD = k_1TGD if k_1TGD.stride(3) == 1 else k_1TGD.contiguous()
    cos_1TR, sin_1TR = cos_1TR.contiguous(), sin_1TR.contiguous()
    q_out, k_out = torch.empty(q_1THD.shape, dtype=q_1THD.dtype), torch.empty(k_1TGD.shape, dtype=k_1TGD.dtype)
    functions().pdserve_rotary(
        *(DTYPES.index(q_1THD.dtype), DTYPES.index(cos_1TR.dtype)),
        *(*addresses(q_out, q_1THD), *q_1THD.stride()[1:3], heads),
        *(*addresses(k_out, k_1TGD), *k_1TGD.stride()[1:3], kv_heads),
        *(*addresses(cos_1TR, sin_1TR), tokens, size, rotated, torch.get_num_threads()),
    )
    return q_out, k_out


def gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Overwrite `gate` with activation(gate) · up.

    Both are contiguous, of one shape and one 16-bit dtype, to which the activation is rounded before the product.
    """
    assert gate.dtype == up.dtype != torch.float32 and gate.shape == up.shape
    assert gate.is_contiguous() and up.is_contiguous()
    kinds = DTYPES.index(gate.dtype), ACTIVATIONS.index(activation)
    functions().pdserve_gate(*kinds, *addresses(gate, up), gate.numel(), torch.get_num_threads())


def argmax(x_RN: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's maximum, int64 [R]. NaN is ignored; a row of NaN gives 0."""
    x_RN = x_RN.contiguous()
    indices_R = torch.empty(len(x_RN), dtype=torch.long)
    pointers = addresses(indices_R, x_RN)
    functions().pdserve_argmax(DTYPES.index(x_RN.dtype), *pointers, *x_RN.shape, torch.get_num_threads())
    return indices_R
