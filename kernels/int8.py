"""Weights of 8 bits that multiply rows rounded to 8 bits (W8A8), with exact sums.

A row is rounded by its largest absolute value, which becomes 127. A result is the sum of the products of integers, times the
scale of the weight's row, times that of the row, in float32, rounded once. Shape legend: see linear.py.
"""

import torch
from torch.nn import functional as F

from pdserve.kernels import linear, memory, native
from pdserve.kernels.low_bit import Codes


class Int8Weight(linear.PackedWeight):
    """A weight [N, K] of 8 bits that takes the place of a tensor as `PackedWeight` does.

    Attributes:
        dtype: of the rows that it multiplies.
    """

    def __init__(
        self, data: torch.Tensor, scales_N: torch.Tensor, sums_N: torch.Tensor, shape: tuple[int, ...]
    ) -> None:
        super().__init__(data, shape, False)
        self.scales_N, self.sums_N = scales_N, sums_N

    def tensors(self) -> list[torch.Tensor]:
        return [self.data, self.scales_N, self.sums_N]

    def multiply(self, y: torch.Tensor, x: torch.Tensor, bias_N: torch.Tensor | None, rows: int, batch: int) -> None:
        assert batch == 1
        operands = native.addresses(y, x, *self.tensors(), bias_N)
        sizes = rows, x.shape[-1], y.shape[-1], torch.get_num_threads()
        native.functions().pdserve_bytes(native.DTYPES.index(x.dtype), *operands, *sizes)


@torch.inference_mode()
def pack(weight: Codes, dtype: torch.dtype) -> Int8Weight:
    """Return a copy of a weight in the order of the kernel.

    Args:
        dtype: of the rows that it is to multiply, in 16 bits.

    Raises:
        ValueError: the weight has zeros, or more than one scale for each of its N rows.
    """
    if weight.zeros is not None or weight.scales.shape[-1] != 1 or weight.bits != 8 or weight.codes.dim() != 2:
        raise ValueError("rows in 8 bits multiply symmetric weights of 8 bits with one scale for each output only")
    out_features, in_features = weight.codes.shape
    integers = (weight.codes.to(torch.int16) - 128).to(torch.int8)
    padded = F.pad(integers, (0, -in_features % linear.TILE_K, 0, -out_features % linear.UNIT_N))
    packed = torch.empty_like(padded).flatten()
    memory.huge_pages(packed)
    runs, halves = len(padded) // 16, padded.shape[1] // 2  # in 16 bits
    native.library().pdserve_pack(packed.data_ptr(), padded.data_ptr(), runs, halves, True, torch.get_num_threads())
    sums_N = integers.sum(1, dtype=torch.int32)
    result = Int8Weight(packed, weight.scales[:, 0].float(), sums_N, (out_features, in_features))
    result.dtype = dtype
    return result
