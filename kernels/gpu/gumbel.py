"""Sampling from all tokens in one pass over the logits, in Triton: hash, Gumbel noise, and the two largest sums.

With TRITON_INTERPRET=1 the kernel runs on CPU tensors. Shape legend: S rows of logits, V vocabulary, R rows to sample, P
parts of the vocabulary.
"""

import torch
import triton
import triton.language as tl

from pdserve.kernels import noise
from pdserve.kernels.gpu.launch import device_of

TILE = 1024  # tokens at a time
PART = 8 * TILE  # tokens of a program
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(noise.GOLDEN), tl.constexpr(noise.MIX_1), tl.constexpr(noise.MIX_2)
_BITS = tl.constexpr(1 << 53)


@triton.jit
def _shift_right(bits, BY: tl.constexpr):
    return (bits >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def _random_bits(counter, ids):
    z = counter + (ids + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return _shift_right(z ^ _shift_right(z, 31), 11)


@triton.jit
def _gumbel(bits):
    """Return noise to 1e-5. Near 1, -log u = 2 artanh((1 - u) / (1 + u)): the GPU's logarithm is of no use there."""
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / _BITS)
    distance = (bits - _BITS).to(tl.float32) * (-1.0 / _BITS)
    s = distance / (2 - distance)
    ss = s * s
    series = ss * (1 / 7 + ss * (1 / 9 + ss * (1 / 11 + ss * (1 / 13))))
    near_one = 2 * s * (1 + ss * (1 / 3 + ss * (1 / 5 + series)))
    return -tl.log(tl.where(uniform < 0.5, -tl.log(uniform), near_one))


@triton.jit(do_not_specialize=["rows", "counters", "argmax", "stride"])
def _largest_sums(
    sums, ids, logits, argmax, rows, counters, temperatures, vocab, stride, TILE: tl.constexpr, PART: tl.constexpr
):
    r, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + r).to(tl.int64)
    counter, temperature = tl.load(counters + r), tl.load(temperatures + r)
    row_logits = logits + row * stride
    maximum = tl.load(row_logits + tl.load(argmax + row)).to(tl.float32)
    best = tl.full([TILE], float("-inf"), tl.float32)
    second = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int64)
    for start in range(part * PART, (part + 1) * PART, TILE):
        token = start + tl.arange(0, TILE).to(tl.int64)
        logit = tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        total = (logit - maximum) / temperature + _gumbel(_random_bits(counter, token))
        second = tl.maximum(second, tl.minimum(best, total))
        best_id = tl.where(total > best, token, best_id)
        best = tl.maximum(best, total)
    largest, at = tl.max(best, 0, return_indices=True)
    lane = tl.arange(0, TILE)
    target = r * tl.num_programs(1) + part
    tl.store(ids + target, tl.sum(tl.where(lane == at, best_id, 0), 0))
    tl.store(sums + target * 2, largest)
    tl.store(sums + target * 2 + 1, tl.max(tl.where(lane == at, second, tl.maximum(best, second)), 0))


def largest_sums(
    logits_SV: torch.Tensor,
    argmax_S: torch.Tensor,
    rows_R: torch.Tensor,
    counters_R: torch.Tensor,
    temperatures_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest sums of logit / temperature and noise, their margins and tokens, float32, float32 and int64 [R].

    A margin is the distance to the next one. The noise is that of `fast_gumbel` in kernels/noise.py, and the largest logit
    of each row is subtracted first.

    Args:
        argmax_S: of the logits.
        counters_R: states of the random numbers, int64.
        temperatures_R: float32.
    """
    vocab, count = logits_SV.shape[1], len(rows_R)
    assert logits_SV.stride(1) == 1
    parts = triton.cdiv(vocab, PART)
    sums_RP2 = torch.empty((count, parts, 2), dtype=torch.float32, device=logits_SV.device)
    ids_RP = torch.empty((count, parts), dtype=torch.int64, device=logits_SV.device)
    with device_of(logits_SV):
        _largest_sums[(count, parts)](
            sums_RP2, ids_RP, logits_SV, argmax_S, rows_R, counters_R, temperatures_R, vocab, logits_SV.stride(0),
            TILE=TILE, PART=PART, num_warps=4,
        )  # fmt: skip
    best = sums_RP2.view(count, -1).topk(2, -1)
    tokens_R = ids_RP.gather(1, best.indices[:, :1] // 2)[:, 0]
    return best.values[:, 0], best.values[:, 0] - best.values[:, 1], tokens_R
