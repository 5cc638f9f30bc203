"""Weights of 4 or 8 bits, packed for products that unpack them as they go (low_bit.h).

A weight is (code - zero) · scale, rounded to the dtype of the scale and then to that of the product, as by `dequantize`. So a
row's result has the bits of the same product with the dequantized weight. (Processors' instructions for bfloat16 take numbers
below 2**-126 as 0: here also what rounding would lift to that.) Shape legend: see linear.py; G groups along K.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from pdserve.kernels import linear, memory, native

BITS = (4, 8)


@dataclass
class Codes:
    """A quantized weight, as formats have it.

    Attributes:
        codes: [N, K], or [B, N, K], uint8, below 2**bits; or float8_e4m3fn of 8 bits, without zeros.
        scales: [N, G] in float32, bfloat16 or float16; K / G codes in order share one.
        zeros: [N, G] uint8; None: the middle code, 8 or 128.
        transposed: the weight that they stand for is [K, N], or [B, K, N], in the model.
        order: [K], the input to which each code along K belongs; None: they are in order. Not with B.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    transposed: bool = False
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.bits in BITS and self.scales.dtype in native.DTYPES
        assert self.codes.dtype == torch.uint8 or (self.is_float and self.bits == 8 and self.zeros is None)
        assert self.codes.shape[-1] % self.scales.shape[-1] == 0 and self.codes.shape[:-1] == self.scales.shape[:-1]
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @property
    def is_float(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def group(self) -> int:
        """Number of codes that share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-1]

    def pack(self, dtype: torch.dtype, *, transposed: bool = False) -> "LowBitWeight":
        """See `pack`. Raises ValueError if the weight is not transposed as the codes say."""
        if transposed != self.transposed:
            raise ValueError(f"the codes are of a weight that is {'' if self.transposed else 'not '}transposed")
        return pack(self, dtype, transposed=transposed)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K], its inputs in their order."""
        middle = 0 if self.is_float else 1 << (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros.float().repeat_interleave(self.group, -1)
        scales = self.scales.float().repeat_interleave(self.group, -1)
        weight = ((self.codes.float() - zeros) * scales).to(self.scales.dtype).to(dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]


class LowBitWeight(linear.PackedWeight):
    """A weight [N, K] or [B, N, K] of 4 or 8 bits that takes the place of a tensor as `PackedWeight` does.

    Attributes:
        data: words of codes, scales and zeros, each [...] or [B, ...].
        bits: of a code; -8: floats.
        dtype: of the rows that it multiplies.
        order: see `Codes`. Sums are in the order of the codes.
        is_exact: no weight needs rounding to bfloat16.
    """

    def __init__(
        self,
        data: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        shape: tuple[int, ...],
        is_transposed: bool,
        *,
        bits: int,
        group: int,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        is_exact: bool = False,
    ) -> None:
        super().__init__(data[0], shape, is_transposed)
        self.order, self.is_exact = order, is_exact
        self.scales, self.zeros, self.bits, self.group, self.dtype = data[1], data[2], bits, group, dtype

    def tensors(self) -> list[torch.Tensor]:
        return [part for part in (self.data, self.scales, self.zeros) if part is not None]

    def item(self, index: int) -> "LowBitWeight":
        data = (self.data[index], self.scales[index], None if self.zeros is None else self.zeros[index])
        options: Any = {"bits": self.bits, "group": self.group, "dtype": self.dtype, "is_exact": self.is_exact}
        return LowBitWeight(data, self.shape[1:], self.is_transposed, **options)

    def multiply(self, y: torch.Tensor, x: torch.Tensor, bias_N: torch.Tensor | None, rows: int, batch: int) -> None:
        *operands, bias = native.addresses(y, x, self.data, self.scales, self.zeros, bias_N)
        weight = self.bits, native.DTYPES.index(self.scales.dtype), self.group, bias
        arguments = *operands, *weight, rows, x.shape[-1], y.shape[-1], batch, torch.get_num_threads()
        if x.dtype == torch.bfloat16 and linear.has_amx():
            native.functions().pdserve_linear_low_bits(*arguments, self.is_exact)
        else:
            native.functions().pdserve_low_bits(native.DTYPES.index(x.dtype), *arguments)


@torch.inference_mode()
def pack(weight: Codes, dtype: torch.dtype, *, transposed: bool = False) -> LowBitWeight:
    """Return a copy of a weight in the order of the kernels, in huge pages where there are any.

    Args:
        dtype: of the rows that it is to multiply, in 16 bits.
        transposed: it takes the place of a weight [K, N] or [B, K, N]. Its codes are [N, K] all the same.

    Raises:
        ValueError: a group is neither a multiple of 32 nor all of K.
    """
    *batch, out_features, in_features = weight.codes.shape
    if weight.group % linear.TILE_K and weight.group != in_features:
        raise ValueError(f"groups of {weight.group} codes are not multiples of {linear.TILE_K}, nor whole columns")
    more_k, more_n = -in_features % linear.TILE_K, -out_features % linear.UNIT_N
    codes = F.pad(weight.codes.view(torch.uint8), (0, more_k, 0, more_n))
    padded_k, per = in_features + more_k, 32 // weight.bits
    group = weight.group if weight.group % linear.TILE_K == 0 else padded_k
    if linear.multiplies_pairs(dtype):
        # [runs, half, column, block, PER, parity] → words [runs, block, half, column, parity]
        split = codes.reshape(*batch, -1, 2, 8, padded_k // (2 * per), per, 2).movedim(-3, -5).movedim(-1, -2)
    else:  # [runs, column, K / PER, PER] → words [runs, K / PER, column]
        split = codes.reshape(*batch, -1, 16, padded_k // per, per).movedim(-2, -3)
    words = torch.zeros(split.shape[:-1], dtype=torch.int32)
    for position in range(per):
        words |= split[..., position].to(torch.int32) << (weight.bits * position)
    packed = torch.empty((*batch, words.numel() // max(1, math.prod(batch))), dtype=torch.int32)
    memory.huge_pages(packed)
    packed.copy_(words.reshape(packed.shape))
    scales, zeros = (_by_run(part, more_n) if part is not None else None for part in (weight.scales, weight.zeros))
    assert scales is not None
    features = (in_features, out_features) if transposed else (out_features, in_features)
    options: Any = {
        "bits": -weight.bits if weight.is_float else weight.bits,
        "group": group,
        "dtype": dtype,
        "order": weight.order,
        "is_exact": _is_exact(weight),
    }
    return LowBitWeight((packed, scales, zeros), (*batch, *features), transposed, **options)


def quantize(weight: torch.Tensor, bits: int, group: int, *, transposed: bool = False) -> Codes:
    """Round a weight [N, K] or [B, N, K] to codes around the middle one, each group by its largest absolute value.

    Scales have so few leading bits that products with codes are exact in the weight's dtype, and need no rounding.

    Args:
        group: codes that share a scale; all of a column if K is no multiple.
        transposed: the weight is [K, N] or [B, K, N].
    """
    weight = weight.mT if transposed else weight
    in_features = weight.shape[-1]
    groups = in_features // group if in_features % group == 0 else 1
    middle = 1 << (bits - 1)
    split = weight.float().unflatten(-1, (groups, in_features // groups))
    scales = (split.abs().amax(-1) / (middle - 0.5)).clamp_min(torch.finfo(torch.float16).tiny)
    mantissas, exponents = torch.frexp(scales)
    steps = (
        2.0 ** (2 - bits) / torch.finfo(weight.dtype).eps
    )  # the product's leading bits less those of codes but the first
    scales = torch.ldexp((mantissas * steps).ceil() / steps, exponents).to(weight.dtype)
    codes = (split / scales.float()[..., None]).round().clamp(-middle, middle - 1) + middle
    return Codes(codes.to(torch.uint8).flatten(-2), scales, None, bits, transposed)


def _is_exact(weight: Codes) -> bool:
    """Return whether products of codes and scales have at most the 8 leading bits of bfloat16."""
    bits_of_code = 4 if weight.is_float else weight.bits - (weight.zeros is None)
    mantissas, _ = torch.frexp(weight.scales.float())
    return not (mantissas * 2 ** max(1, 8 - bits_of_code)).frac().any()


def _by_run(part: torch.Tensor, more_n: int) -> torch.Tensor:
    """[..., N, G] → [..., N / 16, G, 16], N padded"""
    by_run: torch.Tensor = F.pad(part, (0, 0, 0, more_n)).unflatten(-2, (-1, 16))
    return by_run.mT.contiguous()
