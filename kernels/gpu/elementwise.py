"""Fused element-wise operations of a decoder on GPUs in Triton: each is one launch and one pass, instead of torch's many.

They round where the Llama model of transformers does, in its dtypes. A row never depends on another one. With
TRITON_INTERPRET=1 the kernels run on CPU tensors. Shape legend: see batch.py; R rotated elements of a head, N elements of a
row.
"""

import torch
import triton
import triton.language as tl

from pdserve.kernels.elementwise import ACTIVATIONS
from pdserve.kernels.gpu.launch import device_of

HEADS = 8  # of a program of `rotate_and_write`
GATE_TILE = 1024  # elements


@triton.jit
def _rms_norm(y, total, x, residual, weight, elements, eps, x_row, ADD: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE)
    inside = n < elements
    value = tl.load(x + row * x_row + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * elements + n, mask=inside, other=0.0).to(tl.float32)
        value = value.to(y.dtype.element_ty)
        tl.store(total + row * elements + n, value, mask=inside)
        value = value.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / elements + eps)
    normal = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * elements + n, (normal * gain).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, [..., N], as `kernels/elementwise.py` does on CPUs."""
    return _norm(x, None, weight_N, eps)[1]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + residual, and its RMS norm, both [..., N]."""
    return _norm(x, residual.contiguous(), weight_N, eps)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dtype == weight_N.dtype and x.shape[-1:] == weight_N.shape
    elements = len(weight_N)
    x_RN = x.reshape(-1, elements)
    if x_RN.stride(1) != 1:
        x_RN = x_RN.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    tile = triton.next_power_of_2(elements)
    with device_of(x):
        _rms_norm[(len(x_RN),)](
            y,
            total,
            x_RN,
            total if residual is None else residual,
            weight_N,
            elements,
            eps,
            x_RN.stride(0),
            ADD=residual is not None,
            TILE=tile,
            num_warps=max(1, min(16, tile // 256)),
        )
    return total, y


@triton.jit
def _gate(gate, up, elements, GELU: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < elements
    x = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        activated = 0.5 * x * (2 - 2 / (tl.exp(2 * inner) + 1))  # 1 + tanh
    else:
        activated = x / (1 + tl.exp(-x))
    activated = activated.to(gate.dtype.element_ty).to(tl.float32)
    product = activated * tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + i, product.to(gate.dtype.element_ty), mask=inside)


def gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Overwrite `gate` with activation(gate) · up; both are contiguous, of one shape and dtype."""
    assert gate.dtype == up.dtype and gate.shape == up.shape and gate.is_contiguous() and up.is_contiguous()
    with device_of(gate):
        _gate[(triton.cdiv(gate.numel(), GATE_TILE),)](
            gate, up, gate.numel(), GELU=activation == ACTIVATIONS[1], TILE=GATE_TILE, num_warps=4
        )


@triton.jit(do_not_specialize=["slots"])
def _rotate_and_write(
    out,
    cache,
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    slots,
    eps,
    heads,
    kv_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    stride_block,
    stride_half,
    stride_head,
    NORM: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    R: tl.constexpr,
    R_HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(heads, HEADS)
    is_query = part < q_parts
    h = tl.where(is_query, part, part - q_parts) * HEADS + tl.arange(0, HEADS)
    valid = h < tl.where(is_query, heads, kv_heads)
    slot = tl.load(slots + t).to(tl.int64)
    kv_target = cache + slot // B * stride_block + h[:, None] * stride_head + slot % B * D
    source = tl.where(is_query, q + t * q_token, k + t * k_token) + h[:, None] * tl.where(is_query, q_head, k_head)
    target = tl.where(is_query, out + (t * heads + h[:, None]) * D, kv_target)
    stored = valid & (is_query | (slot >= 0))
    weight = tl.where(is_query, q_weight, k_weight)

    r = tl.arange(0, R_HALF_PAD)
    half = r < R // 2
    mask = valid[:, None] & half[None, :]
    first = tl.load(source + r[None, :], mask=mask, other=0.0)
    second = tl.load(source + R // 2 + r[None, :], mask=mask, other=0.0)
    d = tl.arange(0, D_PAD)
    rest = (d >= R) & (d < D)
    if NORM:
        whole = tl.load(source + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        scale = (1 / tl.sqrt(tl.sum(whole * whole, 1) / D + eps))[:, None]
        first = _scaled(first, scale, tl.load(weight + r, mask=half, other=0.0))
        second = _scaled(second, scale, tl.load(weight + R // 2 + r, mask=half, other=0.0))
    c1, c2 = tl.load(cos + t * R + r, mask=half, other=0.0), tl.load(cos + t * R + R // 2 + r, mask=half, other=0.0)
    s1, s2 = tl.load(sin + t * R + r, mask=half, other=0.0), tl.load(sin + t * R + R // 2 + r, mask=half, other=0.0)
    turned_first = _rounded_product(first, c1).to(tl.float32) - _rounded_product(second, s1).to(tl.float32)
    turned_second = _rounded_product(second, c2).to(tl.float32) + _rounded_product(first, s2).to(tl.float32)
    keep = stored[:, None] & half[None, :]
    tl.store(target + r[None, :], turned_first.to(out.dtype.element_ty), mask=keep)
    tl.store(target + R // 2 + r[None, :], turned_second.to(out.dtype.element_ty), mask=keep)
    if R < D:
        tail = tl.load(source + d[None, :], mask=valid[:, None] & rest[None, :], other=0.0)
        if NORM:
            tail = _scaled(tail, scale, tl.load(weight + d, mask=rest, other=0.0))
        tl.store(target + d[None, :], tail, mask=stored[:, None] & rest[None, :])
    if part >= q_parts:
        v_mask = stored[:, None] & (d < D)[None, :]
        value = tl.load(v + t * v_token + h[:, None] * v_head + d[None, :], mask=v_mask, other=0.0)
        tl.store(kv_target + stride_half + d[None, :], value, mask=v_mask)


@triton.jit
def _scaled(x, scale, weight):
    normal = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    return (normal * weight.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def _rounded_product(x, table):
    return (x.to(tl.float32) * table.to(tl.float32)[None, :]).to(table.dtype)


def rotate_and_write(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cache_N2GBD: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k, write k and v into one layer's cache, and return q, [T, H, D].

    Rotary embeddings (Su et al. 2021) as `kernels/elementwise.py` computes them on CPUs; a slot of -1 is not written.

    Args:
        norms: the weights [D] of the RMS norms of each head of q and of k before it is rotated, and their eps.
    """
    tokens, heads, size = q_THD.shape
    kv_heads, rotated = k_TGD.shape[1], cos_TR.shape[1]
    assert cos_TR.shape == sin_TR.shape == (tokens, rotated) and cache_N2GBD.dtype == q_THD.dtype
    q_THD, k_TGD, v_TGD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty((tokens, heads, size), dtype=q_THD.dtype, device=q_THD.device)
    q_weight, k_weight, eps = norms or (out_THD, out_THD, 0.0)
    with device_of(q_THD):
        _rotate_and_write[(tokens, triton.cdiv(heads, HEADS) + triton.cdiv(kv_heads, HEADS))](
            out_THD,
            cache_N2GBD,
            q_THD,
            k_TGD,
            v_TGD,
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            q_weight,
            k_weight,
            slots_T,
            eps,
            heads,
            kv_heads,
            *q_THD.stride()[:2],
            *k_TGD.stride()[:2],
            *v_TGD.stride()[:2],
            *cache_N2GBD.stride()[:3],
            NORM=norms is not None,
            B=cache_N2GBD.shape[3],
            D=size,
            D_PAD=triton.next_power_of_2(size),
            R=rotated,
            R_HALF_PAD=triton.next_power_of_2(rotated // 2),
            HEADS=HEADS,
            num_warps=2,
            enable_fp_fusion=False,  # fused, products would not be rounded before they are added
        )
    return out_THD
