"""Linear layers for GPUs in Triton whose rows do not depend on how many there are, as those of cuBLAS do.

cuBLAS chooses tiles, and whether to split the sum, by the number of rows. Here the shape of a tile depends on the weight
alone, and a program adds up all products of its tile in one order (He et al., "Defeating nondeterminism in LLM inference",
2025). Programs are persistent: each computes tiles in turn, in the grouped order of Triton's tutorial, which reuses the
second-level cache. With TRITON_INTERPRET=1 the kernel runs on CPU tensors.

Shape legend: R rows, K input features, N output features.
"""

import torch
import triton
import triton.language as tl

from pdserve.kernels.gpu.launch import INTERPRETED, device_of, processors

TILE_ROWS, TILE_K = 64, 64
MIN_TILE_N, MAX_TILE_N = 32, 128
MIN_TILES = 64  # of one row of tiles, as far as MIN_TILE_N permits: so many programs read the weight in decode


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for any number of rows
def _linear(
    y,
    x,
    weight,
    bias,
    rows,
    features,
    outputs,
    x_row,
    weight_row,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles, output_tiles = tl.cdiv(rows, TILE_ROWS), tl.cdiv(outputs, TILE_N)
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = tile // (GROUP * output_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * output_tiles)
        r = ((first + within % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
        n = (within // height * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        total = tl.zeros([TILE_ROWS, TILE_N], tl.float32)
        for start in range(0, features, TILE_K):
            k = start + tl.arange(0, TILE_K)
            inside = (k < features)[None, :]
            x_tile = tl.load(x + r[:, None] * x_row + k[None, :], mask=(r < rows)[:, None] & inside, other=0.0)
            w_tile = tl.load(
                weight + n[:, None] * weight_row + k[None, :], mask=(n < outputs)[:, None] & inside, other=0.0
            )
            if WIDEN:  # tl.dot of the interpreter is wrong for bfloat16
                x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
            total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        valid = (r < rows)[:, None] & (n < outputs)[None, :]
        tl.store(y + r[:, None] * outputs + n[None, :], total.to(y.dtype.element_ty), mask=valid)


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias, [..., K] → [..., N], summed in float32 and rounded once."""
    outputs, features = weight_NK.shape
    x_RK = x.reshape(-1, features)
    x_RK, weight_NK = (z if z.stride(1) == 1 else z.contiguous() for z in (x_RK, weight_NK))
    y_RN = x.new_empty((len(x_RK), outputs))
    tile_n = max(MIN_TILE_N, min(MAX_TILE_N, triton.next_power_of_2(outputs // MIN_TILES)))
    tiles = triton.cdiv(len(x_RK), TILE_ROWS) * triton.cdiv(outputs, tile_n)
    with device_of(x):
        _linear[(min(tiles, 2 * processors(x.device)),)](
            y_RN,
            x_RK,
            weight_NK,
            bias_N,
            len(x_RK),
            features,
            outputs,
            x_RK.stride(0),
            weight_NK.stride(0),
            HAS_BIAS=bias_N is not None,
            WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
            TILE_ROWS=TILE_ROWS,
            TILE_N=tile_n,
            TILE_K=TILE_K,
            GROUP=8,
            num_warps=4,
            num_stages=3,
        )
    return y_RN.view(*x.shape[:-1], outputs)
