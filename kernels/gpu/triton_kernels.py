"""Paged attention for GPUs in Triton. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly, for tests.

One attention kernel serves decode and prefill. A program computes a tile of query rows over a range of KV. A row is a new
token × a query head of one key/value head, so that heads that share KV read it once. Decode tiles hold the rows of one token.
If there are too few decode tiles for the GPU, their KV is split over several programs (flash-decoding, Dao et al. 2023) and a
second kernel merges the partial results. Softmax is online (Milakov & Gimelshein 2018), in float32 and in powers of two.

With `invariant`, a row has the same bits in any batch, chunk and phase:
    - Tiles and splits of KV are counted from token 0 and have fixed lengths. Decode computes splits in different programs,
      prefill one after the other; both merge them in order. What other rows of a tile see and a row does not adds zeros.
    - Both phases have one shape of tile and number of warps, hence the same tensor core instructions: the order in which
      these add up the products of a row is not documented, and may differ between shapes.
    - Multiplications and additions are not fused, since the compiler may choose differently in each variant of the kernel.

Shape legend: see batch.py; R query heads per key/value head.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from pdserve.kernels.batch import Capabilities, Kernel, PagedBatch, Scores
from pdserve.kernels.gpu.block_copies import copy_blocks as copy_blocks
from pdserve.kernels.gpu.block_copies import gather_blocks as gather_blocks
from pdserve.kernels.gpu.block_copies import scatter_blocks as scatter_blocks
from pdserve.kernels.gpu.launch import INTERPRETED, device_of, processors, shared_memory

NAME = "triton"
CAPABILITIES = Capabilities(sinks=True, is_capturable=True)  # grids follow from the lengths on the host
MIN_SPLIT_TOKENS = 256  # KV tokens: shorter splits do not pay for the second kernel
MAX_SPLIT_TOKENS = 1024  # KV tokens: one long sequence among many short ones would take as long alone
INVARIANT_SPLIT_TOKENS = 512
UNSPLIT = 1 << 30  # KV tokens: more than any sequence has
SLOT_SEQS = 64  # sequences whose splits are counted at a time
# Arguments that change from step to step. Triton would compile a kernel for a value of 1, one for multiples of 16 and one
# for all others, each when it first occurs: in the middle of a stream.
STEP_ARGUMENTS = ("tables", "starts", "kv_lens", "table_length", "split_length", "first_seq", "tiles", "splits_per_seq")

# Tiles of the attention kernel by phase, bytes of an element and padded head size: bytes of shared memory that a block of
# threads must be allowed, rows, tokens, warps, stages. The first that fits is taken; none spills registers in 16 bits.
# GPUs of compute capability 8.6, 8.9 and 12.0 allow 99 KiB, 8.0 allows 163, 9.0 allows 227.
_LEAST = 99 << 10
_TILES = {
    ("prefill", 2, 64): [(_LEAST, 128, 64, 8, 2)],
    ("prefill", 2, 128): [(_LEAST, 128, 64, 8, 2)],
    ("prefill", 2, 256): [(227 << 10, 64, 64, 8, 2), (_LEAST, 64, 32, 8, 2)],
    ("prefill", 2, 512): [(_LEAST, 32, 32, 8, 2)],
    ("prefill", 4, 64): [(_LEAST, 64, 32, 8, 2)],
    ("prefill", 4, 128): [(_LEAST, 32, 32, 8, 2)],
    ("prefill", 4, 256): [(_LEAST, 16, 16, 4, 2)],
    ("prefill", 4, 512): [(_LEAST, 16, 16, 8, 2)],
    # Rows here are the most: a tile has those of one token.
    ("decode", 2, 64): [(_LEAST, 64, 64, 4, 3)],
    ("decode", 2, 128): [(_LEAST, 32, 64, 4, 3)],
    ("decode", 2, 256): [(_LEAST, 16, 64, 4, 3)],
    ("decode", 2, 512): [(_LEAST, 16, 16, 4, 3)],
    ("decode", 4, 64): [(_LEAST, 16, 64, 4, 3)],
    ("decode", 4, 128): [(_LEAST, 16, 16, 4, 3)],
    ("decode", 4, 256): [(_LEAST, 16, 16, 4, 3)],
    ("decode", 4, 512): [(_LEAST, 16, 16, 8, 3)],
    ("invariant", 2, 64): [(_LEAST, 64, 32, 4, 2)],
    ("invariant", 2, 128): [(_LEAST, 64, 32, 8, 2)],
    ("invariant", 2, 256): [(_LEAST, 32, 16, 8, 2)],
    ("invariant", 2, 512): [(_LEAST, 32, 16, 8, 2)],
}

LOG2E = tl.constexpr(1.4426950408889634)
MIN_SCORE = tl.constexpr(-1e30)  # initial running maximum: finite, since -inf - -inf is NaN


@triton.jit(do_not_specialize=["slots"])
def _write_kv(
    cache,
    k,
    v,
    slots,
    stride_block,
    stride_half,
    stride_head,
    k_token,
    k_head,
    v_token,
    v_head,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    slot = tl.load(slots + t).to(tl.int64)
    if slot < 0:
        return
    target = cache + slot // B * stride_block + g * stride_head + slot % B * D + d
    tl.store(target, tl.load(k + t * k_token + g * k_head + d, mask=d < D), mask=d < D)
    tl.store(target + stride_half, tl.load(v + t * v_token + g * v_head + d, mask=d < D), mask=d < D)


@triton.jit
def _num_splits(kv_len, split_length, window, WINDOWED: tl.constexpr):
    """Return how many splits the last token of a sequence attends to, and the first of them."""
    first = kv_len * 0
    if WINDOWED:
        first = tl.maximum(kv_len - window, 0) // split_length
    return (kv_len - 1) // split_length - first + 1, first


@triton.jit
def _first_slot(kv_lens, s, split_length, window, WINDOWED: tl.constexpr, SEQS: tl.constexpr):
    """Return the index of a sequence's first partial result: the sequences before it have one for each of their splits."""
    slots = tl.zeros([SEQS], tl.int64)
    for start in range(0, s, SEQS):
        i = start + tl.arange(0, SEQS)
        splits, _ = _num_splits(tl.load(kv_lens + i, mask=i < s, other=1), split_length, window, WINDOWED)
        slots += tl.where(i < s, splits, 0)
    return tl.sum(slots, 0)


@triton.jit
def _merge(o, m, l, o_split, m_split, l_split):  # noqa: E741
    m_new = tl.maximum(m, m_split)
    weight, weight_split = tl.exp2(m - m_new), tl.exp2(m_split - m_new)
    o_new = o * weight[:, None] + o_split * weight_split[:, None]
    return o_new, m_new, l * weight + l_split * weight_split


@triton.jit
def _merge_sinks(o, m, l, sinks, head, SINKS: tl.constexpr):  # noqa: E741
    """Merge a token whose score is the sink of the row's head, and whose value is 0."""
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        o, m, l = _merge(o, m, l, tl.zeros_like(o), sink, tl.full(sink.shape, 1.0, tl.float32))  # noqa: E741
    return o, l


@triton.jit
def _attend_split(
    split,
    split_length,
    kv_start,
    kv_end,
    q_tile,
    position,
    k_head,
    table,
    stride_block,
    stride_half,
    scale,
    softcap,
    window,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return o, m, l of a tile of rows over one split of KV. Nothing outside of kv_start and kv_end is loaded."""
    d = tl.arange(0, D_PAD)
    m = tl.full([ROWS], MIN_SCORE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, D_PAD], tl.float32)
    begin = tl.maximum(split * split_length, kv_start // TOKENS * TOKENS)
    for n in range(begin, tl.minimum((split + 1) * split_length, kv_end), TOKENS):
        kv_position = n + tl.arange(0, TOKENS)
        inside = kv_position < kv_end
        if WINDOWED:
            inside = inside & (kv_position >= kv_start)
        block = tl.load(table + kv_position // B, mask=inside, other=0).to(tl.int64)
        k_rows = k_head + block * stride_block + kv_position % B * D
        inside_elements = inside[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_rows[:, None] + d[None, :], mask=inside_elements, other=0.0)
        v_tile = tl.load(k_rows[:, None] + stride_half + d[None, :], mask=inside_elements, other=0.0)
        if WIDEN:
            k_tile = k_tile.to(tl.float32)
            v_tile = v_tile.to(tl.float32)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap × tanh
        visible = inside[None, :] & (kv_position[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (kv_position[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        o = o * rescale[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = m_new
    return o, m, l


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS])
def _attend(
    out,
    part_o,
    part_m,
    part_l,
    q,
    cache,
    tables,
    starts,
    kv_lens,
    sinks,
    out_token,
    out_head,
    q_token,
    q_head,
    stride_block,
    stride_half,
    stride_head,
    table_length,
    scale,
    softcap,
    window,
    split_length,
    first_seq,
    tiles,
    splits_per_seq,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    SEQS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # One axis for three, as the length of the others is limited to 65535.
    tile, g = tl.program_id(0) % tiles, tl.program_id(1)
    s = first_seq + tl.program_id(0) // tiles // splits_per_seq
    split = tl.program_id(0) // tiles % splits_per_seq
    start = tl.load(starts + s).to(tl.int64)
    query_len = tl.load(starts + s + 1) - start
    kv_len = tl.load(kv_lens + s)
    if (query_len == 1) != DECODE:
        return
    if tile * ROWS >= query_len * R:
        return
    splits, first = _num_splits(kv_len, split_length, window, WINDOWED)
    if DECODE and split >= splits:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // R, g * R + row % R
    valid = row < query_len * R
    cached = kv_len - query_len
    position = cached + token
    d = tl.arange(0, D_PAD)
    valid_elements = valid[:, None] & (d < D)[None, :]
    q_tile = tl.load(
        q + (start + token)[:, None] * q_token + head[:, None] * q_head + d[None, :], mask=valid_elements, other=0.0
    )
    if WIDEN:  # tl.dot of the interpreter is wrong for bfloat16
        q_tile = q_tile.to(tl.float32)

    kv_start = cached * 0
    if WINDOWED:
        kv_start = tl.maximum(cached + tile * ROWS // R + 1 - window, 0)
    kv_end = tl.minimum(cached + (tile * ROWS + ROWS - 1) // R + 1, kv_len)
    if SPLIT and not DECODE:
        m = tl.full([ROWS], MIN_SCORE, tl.float32)
        l = tl.zeros([ROWS], tl.float32)  # noqa: E741
        o = tl.zeros([ROWS, D_PAD], tl.float32)
        for i in range(kv_start // split_length, (kv_end - 1) // split_length + 1):
            o_split, m_split, l_split = _attend_split(
                i, split_length, kv_start, kv_end, q_tile, position, cache + g * stride_head, tables + s * table_length,
                stride_block, stride_half, scale, softcap, window, CAPPED, WINDOWED, WIDEN, B, D, D_PAD, ROWS, TOKENS,
            )  # fmt: skip
            o, m, l = _merge(o, m, l, o_split, m_split, l_split)  # noqa: E741
    else:
        o, m, l = _attend_split(  # noqa: E741
            first + split, split_length, kv_start, kv_end, q_tile, position, cache + g * stride_head,
            tables + s * table_length, stride_block, stride_half, scale, softcap, window,
            CAPPED, WINDOWED, WIDEN, B, D, D_PAD, ROWS, TOKENS,
        )  # fmt: skip

    if SPLIT and DECODE:
        slot = _first_slot(kv_lens, s, split_length, window, WINDOWED, SEQS) + split
        slot = slot * tl.num_programs(1) * R + head
        tl.store(part_m + slot, m, mask=valid)
        tl.store(part_l + slot, l, mask=valid)
        tl.store(part_o + slot[:, None] * D + d[None, :], o, mask=valid_elements)
    else:
        o, l = _merge_sinks(o, m, l, sinks, head, SINKS)  # noqa: E741
        target = out + (start + token)[:, None] * out_token + head[:, None] * out_head + d[None, :]
        tl.store(target, (o / l[:, None]).to(out.dtype.element_ty), mask=valid_elements)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS])
def _combine(
    out,
    part_o,
    part_m,
    part_l,
    starts,
    kv_lens,
    sinks,
    out_token,
    out_head,
    split_length,
    window,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SEQS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    s, h = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + s).to(tl.int64)
    if tl.load(starts + s + 1) - start != 1:
        return
    splits, _ = _num_splits(tl.load(kv_lens + s), split_length, window, WINDOWED)
    slot = _first_slot(kv_lens, s, split_length, window, WINDOWED, SEQS) * tl.num_programs(1) + h + tl.arange(0, 1)
    d = tl.arange(0, D_PAD)
    o = tl.load(part_o + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    m, l = tl.load(part_m + slot), tl.load(part_l + slot)  # noqa: E741
    for _ in range(1, splits):
        slot += tl.num_programs(1)
        o_split = tl.load(part_o + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        o, m, l = _merge(o, m, l, o_split, tl.load(part_m + slot), tl.load(part_l + slot))  # noqa: E741
    o, l = _merge_sinks(o, m, l, sinks, h + tl.arange(0, 1), SINKS)  # noqa: E741
    target = out + start * out_token + h * out_head + d[None, :]
    tl.store(target, (o / l[:, None]).to(out.dtype.element_ty), mask=(d < D)[None, :])


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write the K and V of each new token into its slot of one layer's cache."""
    k_TGD, v_TGD = _contiguous_rows(k_TGD), _contiguous_rows(v_TGD)
    tokens, heads, size = k_TGD.shape
    with device_of(cache_N2GBD):
        _write_kv[(tokens, heads)](
            cache_N2GBD,
            k_TGD,
            v_TGD,
            slots_T,
            *cache_N2GBD.stride()[:3],
            *k_TGD.stride()[:2],
            *v_TGD.stride()[:2],
            B=cache_N2GBD.shape[3],
            D=size,
            D_PAD=triton.next_power_of_2(size),
            num_warps=1,
        )


def attend(
    q_THD: torch.Tensor,
    cache_N2GBD: torch.Tensor,
    batch: PagedBatch,
    scores: Scores,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """Return the attention of every new token over its own sequence, [T, H, D].

    Args:
        invariant: give a row the same bits in any batch, chunk and phase; see above.
    """
    q_THD = _contiguous_rows(q_THD)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    kv_heads = cache_N2GBD.shape[2]
    key = (NAME, scores.window, kv_heads, invariant)
    if key not in batch.plans:
        batch.plans[key] = _plan(batch, scores.window, kv_heads, invariant, q_THD.device)
    with device_of(q_THD):
        for launch in batch.plans[key]:
            _launch(out_THD, q_THD, cache_N2GBD, batch, scores, invariant, launch)
    return out_THD


class Launch(NamedTuple):
    """A launch of the attention kernel.

    Attributes:
        decode: whether for sequences with one new token, or for the others.
        seqs: among which these are.
        split_length: tokens of a split of KV.
        splits: the most that a sequence has.
        num_parts: partial results of all sequences.
    """

    decode: bool
    seqs: range
    split_length: int
    splits: int
    num_parts: int


def _launch(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    cache_N2GBD: torch.Tensor,
    batch: PagedBatch,
    scores: Scores,
    invariant: bool,
    launch: Launch,
) -> None:
    scale, window, softcap, sinks_H = scores
    heads, size = q_THD.shape[1:]
    kv_heads, block_size = cache_N2GBD.shape[2:4]
    repeats, padded, decode = heads // kv_heads, max(16, triton.next_power_of_2(size)), launch.decode
    tables_SM = batch.tables_SM.contiguous()
    is_split = launch.splits > 1
    parts = [out_THD] * 3
    if decode and is_split:
        shape = (launch.num_parts, heads)
        parts = [q_THD.new_empty(s, dtype=torch.float32) for s in ((*shape, size), shape, shape)]
    tuning = tuning_of(decode, invariant, repeats, padded, q_THD.itemsize, shared_memory(q_THD.device))
    tiles = triton.cdiv(max(batch.query_lens) * repeats if not decode else repeats, tuning["ROWS"])
    splits_per_seq = launch.splits if decode else 1  # that have programs of their own
    sinks = out_THD if sinks_H is None else sinks_H
    strides = (*out_THD.stride()[:2], *q_THD.stride()[:2], *cache_N2GBD.stride()[:3])
    steps = (launch.split_length, launch.seqs.start, tiles, splits_per_seq)
    shapes = {"D": size, "D_PAD": padded, "SEQS": SLOT_SEQS, "WINDOWED": window is not None}
    shapes["SINKS"] = sinks_H is not None
    _attend[(tiles * len(launch.seqs) * splits_per_seq, kv_heads)](
        *(out_THD, *parts, q_THD, cache_N2GBD, tables_SM, batch.starts, batch.kv_lens_S, sinks),
        *(*strides, tables_SM.shape[1]),
        *(scale, softcap or 0.0, window or 0, *steps),
        DECODE=decode,
        SPLIT=is_split,
        CAPPED=softcap is not None,
        WIDEN=INTERPRETED and q_THD.dtype == torch.bfloat16,
        R=repeats,
        B=block_size,
        **shapes,
        **tuning,
    )
    if decode and is_split:
        _combine[(len(launch.seqs), heads)](
            *(out_THD, *parts, batch.starts, batch.kv_lens_S, sinks, *strides[:2], launch.split_length, window or 0),
            **shapes,
            num_warps=1,
            enable_fp_fusion=tuning["enable_fp_fusion"],
        )


def _plan(batch: PagedBatch, window: int | None, kv_heads: int, invariant: bool, device: torch.device) -> list[Launch]:
    """Return the launches of a step.

    A launch of prefill leaves out the decoding sequences at the front: one of their programs ends at once, but as many as
    the longest prompt has tiles would start for each.
    """
    seqs = range(len(batch.query_lens))
    lengths = list(zip(batch.query_lens, batch.kv_lens, strict=True))
    decoding, others = [kv for new, kv in lengths if new == 1], [kv for new, kv in lengths if new > 1]
    plan = list[Launch]()
    if others:
        length = INVARIANT_SPLIT_TOKENS if invariant else UNSPLIT
        splits = max(_count_splits(kv, length, None) for kv in others)
        plan.append(Launch(False, seqs[batch.num_decoding :], length, splits, 0))
    if decoding:
        longest = min(window or UNSPLIT, max(decoding))
        length = INVARIANT_SPLIT_TOKENS if invariant else _split_length(len(decoding) * kv_heads, longest, device)
        splits = max(_count_splits(kv, length, window) for kv in decoding)
        num_parts = sum(_count_splits(kv, length, window) for kv in batch.kv_lens)
        plan.append(Launch(True, seqs[: seqs.stop - batch.query_lens[::-1].index(1)], length, splits, num_parts))
    return plan


def tuning_of(decode: bool, invariant: bool, repeats: int, padded: int, itemsize: int, shared: int) -> dict[str, Any]:
    """Return tile shape and compiler options.

    Args:
        repeats: query heads of a key/value head.
        padded: head size, a power of two.
        itemsize: bytes of an element.
        shared: bytes of shared memory that a block of threads may have.
    """
    phase = "decode" if decode else "prefill"
    if invariant:
        phase = "invariant" if itemsize == 2 else "prefill"  # engines are invariant in 16 bits only
    choices = _TILES[phase, itemsize, min(max(padded, 64), 512)]
    _, rows, tokens, warps, stages = next((one for one in choices if one[0] <= shared), choices[-1])
    if phase == "decode":
        rows = min(rows, max(16, triton.next_power_of_2(repeats)))
    return {
        "ROWS": rows,
        "TOKENS": tokens,
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": not invariant,  # for invariance, both phases have one shape, which only the model decides
    }


def _split_length(programs: int, kv_tokens: int, device: torch.device) -> int:
    """Return the KV tokens of a split of decoding sequences: such that each multiprocessor has two programs, or more."""
    splits = min(2 * processors(device) // programs, kv_tokens // MIN_SPLIT_TOKENS)
    splits = max(splits, triton.cdiv(kv_tokens, MAX_SPLIT_TOKENS))
    return triton.cdiv(kv_tokens, splits * 64) * 64 if splits > 1 else UNSPLIT  # whole tiles


def _count_splits(kv_len: int, split_length: int, window: int | None) -> int:
    """Return the most splits that the kernel's `_num_splits` counts for a sequence of up to `kv_len` tokens.

    Graphs plan for limits of lengths. Behind a window, a shorter sequence may reach over the end of one split more.
    """
    splits = (kv_len - 1) // split_length
    return 1 + (splits if window is None else min(splits, (window + split_length - 2) // split_length))


def _contiguous_rows(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


INVARIANT = cast(
    Kernel,
    SimpleNamespace(
        NAME="triton-invariant",
        CAPABILITIES=replace(CAPABILITIES, exact_rows="functions"),
        write_kv=write_kv,
        attend=partial(attend, invariant=True),
        copy_blocks=copy_blocks,
        gather_blocks=gather_blocks,
        scatter_blocks=scatter_blocks,
    ),
)
