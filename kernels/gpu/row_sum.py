"""Sums over the last dimension in Triton, in one order. torch's own depends on the number of rows.

Shape legend: R rows, N elements of a row.
"""

import torch
import triton
import triton.language as tl

from pdserve.kernels.gpu.launch import device_of

TILE = 1024  # elements


@triton.jit
def _row_sum(y, x, elements, x_row, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, elements, TILE):
        n = start + tl.arange(0, TILE)
        total += tl.load(x + row * x_row + n, mask=n < elements, other=0.0).to(tl.float32)
    tl.store(y + row, tl.sum(total, 0))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, [..., N] → [..., 1] in float32."""
    x_RN = x.reshape(-1, x.shape[-1])
    if x_RN.stride(1) != 1:
        x_RN = x_RN.contiguous()
    y_R1 = x.new_empty((len(x_RN), 1), dtype=torch.float32)
    with device_of(x):
        _row_sum[(len(x_RN),)](y_R1, x_RN, x_RN.shape[1], x_RN.stride(0), TILE=TILE, num_warps=4)
    return y_R1.view(*x.shape[:-1], 1)
