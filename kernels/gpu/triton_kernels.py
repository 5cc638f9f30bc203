"""Paged attention for GPUs in Triton; with TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly, for tests.

One attention kernel serves decode and prefill: a program takes a tile of query rows (new token × query head of one
key/value head, so that heads that share KV read it once) over a run of KV. Decode tiles hold the rows of one token, and
their KV is split over several programs when there are too few of them for the GPU (flash-decoding, Dao et al. 2023); a
second kernel adds the parts up. Softmax is online (Milakov & Gimelshein 2018), in float32 and in powers of two.
Shape legend: see batch.py.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from pdserve.kernels.batch import PagedBatch

NAME = "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU_PROCESSORS = 4  # what the interpreter is split for, so that tests reach both ways
SHORTEST_SPLIT = 256  # KV tokens: less is not worth the second kernel
COPY_WORDS = 4096  # of 8 bytes, per program

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # the maximum before any score: finite, so that no -inf is subtracted from -inf


@triton.jit
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
    t, g = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    slot = tl.load(slots + t)
    to = cache + slot // B * stride_block + g * stride_head + slot % B * D + d
    tl.store(to, tl.load(k + t * k_token + g * k_head + d, mask=d < D), mask=d < D)
    tl.store(to + stride_half, tl.load(v + t * v_token + g * v_head + d, mask=d < D), mask=d < D)


@triton.jit
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
    DECODE: tl.constexpr,
    SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile, g = tl.program_id(0), tl.program_id(1)
    s, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    start = tl.load(starts + s)
    news = tl.load(starts + s + 1) - start
    kv_len = tl.load(kv_lens + s)
    if (news == 1) != DECODE:
        return
    if tile * ROWS >= news * R:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // R, g * R + row % R
    live = row < news * R
    cached = kv_len - news
    position = cached + token
    d = tl.arange(0, D_PAD)
    whole = live[:, None] & (d < D)[None, :]
    q_tile = tl.load(
        q + (start + token)[:, None] * q_token + head[:, None] * q_head + d[None, :], mask=whole, other=0.0
    )
    if WIDEN:  # tl.dot of the interpreter turns bfloat16 into garbage
        q_tile = q_tile.to(tl.float32)

    first = cached * 0
    if WINDOWED:
        first = tl.maximum(cached + tile * ROWS // R + 1 - window, 0)
    end = tl.minimum(cached + (tile * ROWS + ROWS - 1) // R + 1, kv_len)
    if SPLITS > 1:
        length = tl.cdiv(tl.cdiv(end - first, SPLITS), TOKENS) * TOKENS
        first = first + split * length
        end = tl.minimum(first + length, end)

    m = tl.full([ROWS], NEVER, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, D_PAD], tl.float32)
    for n in range(first, end, TOKENS):
        at = n + tl.arange(0, TOKENS)
        inside = at < end
        block = tl.load(tables + s * table_length + at // B, mask=inside, other=0)
        k_rows = cache + block * stride_block + g * stride_head + at % B * D
        there = inside[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_rows[:, None] + d[None, :], mask=there, other=0.0)
        v_tile = tl.load(k_rows[:, None] + stride_half + d[None, :], mask=there, other=0.0)
        if WIDEN:
            k_tile = k_tile.to(tl.float32)
            v_tile = v_tile.to(tl.float32)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap × tanh
        seen = inside[None, :] & (at[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        o = o * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = top

    if SPLITS > 1:
        place = (s * tl.num_programs(1) * R + head) * SPLITS + split
        tl.store(part_m + place, m, mask=live)
        tl.store(part_l + place, l, mask=live)
        tl.store(part_o + place[:, None] * D + d[None, :], o, mask=whole)
    else:
        to = out + (start + token)[:, None] * out_token + head[:, None] * out_head + d[None, :]
        tl.store(to, (o / l[:, None]).to(out.dtype.element_ty), mask=whole)


@triton.jit
def _combine(
    out,
    part_o,
    part_m,
    part_l,
    starts,
    out_token,
    out_head,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    s, h = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + s)
    if tl.load(starts + s + 1) - start != 1:
        return
    i, d = tl.arange(0, SPLITS_PAD), tl.arange(0, D_PAD)
    place = (s * tl.num_programs(1) + h) * SPLITS + i
    m = tl.load(part_m + place, mask=i < SPLITS, other=NEVER)
    l = tl.load(part_l + place, mask=i < SPLITS, other=0.0)  # noqa: E741
    there = (i < SPLITS)[:, None] & (d < D)[None, :]
    o = tl.load(part_o + place[:, None] * D + d[None, :], mask=there, other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(o * weight[:, None], 0) / tl.sum(l * weight, 0)
    tl.store(out + start * out_token + h * out_head + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _copy(
    to,
    targets,
    source,
    sources,
    to_stride,
    source_stride,
    words,
    TARGETS: tl.constexpr,
    SOURCES: tl.constexpr,
    WORDS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    there = i
    here = i
    if TARGETS:
        there = tl.load(targets + i)
    if SOURCES:
        here = tl.load(sources + i)
    tl.store(to + there * to_stride + at, tl.load(source + here * source_stride + at, mask=at < words), mask=at < words)


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Puts the K and V of each new token into its slot of one layer's cache."""
    k_TGD, v_TGD = _rows(k_TGD), _rows(v_TGD)
    tokens, heads, size = k_TGD.shape
    with _on(cache_N2GBD):
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
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of every new token over its own sequence, [T, H, D]."""
    q_THD = _rows(q_THD)
    tokens, heads, size = q_THD.shape
    kv_heads, block_size = cache_N2GBD.shape[2:4]
    seqs, repeats, padded = len(batch.query_lens), heads // kv_heads, max(16, triton.next_power_of_2(size))
    out_THD = q_THD.new_empty((tokens, heads, size))
    tables_SM = batch.tables_SM.contiguous()

    def launch(decode: bool, tiles: int, splits: int, parts: list[torch.Tensor], **tuning: int) -> None:
        _attend[(tiles, kv_heads, seqs * splits)](
            out_THD,
            *parts,
            q_THD,
            cache_N2GBD,
            tables_SM,
            batch.starts,
            batch.kv_lens_S,
            *out_THD.stride()[:2],
            *q_THD.stride()[:2],
            *cache_N2GBD.stride()[:3],
            tables_SM.shape[1],
            scale,
            softcap or 0.0,
            window or 0,
            DECODE=decode,
            SPLITS=splits,
            CAPPED=softcap is not None,
            WINDOWED=window is not None,
            WIDEN=INTERPRETED and q_THD.dtype == torch.bfloat16,
            R=repeats,
            B=block_size,
            D=size,
            D_PAD=padded,
            **tuning,
        )

    with _on(q_THD):
        longest = max(batch.query_lens)
        if longest > 1:
            rows = 128 if padded * q_THD.itemsize <= 256 else 64 if padded * q_THD.itemsize <= 512 else 32
            tiles = triton.cdiv(longest * repeats, rows)
            tuning = {"num_warps": 8 if rows == 128 else 4, "num_stages": 2}
            launch(False, tiles, 1, [out_THD] * 3, ROWS=rows, TOKENS=64 if rows > 32 else 32, **tuning)
        decoding = [kv for new, kv in zip(batch.query_lens, batch.kv_lens, strict=True) if new == 1]
        if decoding:
            seen = max(decoding) if window is None else min(window, max(decoding))
            splits = _splits(len(decoding) * kv_heads, seen, q_THD.device)
            parts = [out_THD] * 3
            if splits > 1:
                shape = (seqs, heads, splits)
                parts = [q_THD.new_empty(s, dtype=torch.float32) for s in ((*shape, size), shape, shape)]
            rows = max(16, triton.next_power_of_2(repeats))
            tokens_at_once = 64 if padded * q_THD.itemsize <= 512 else 32
            launch(True, 1, splits, parts, ROWS=rows, TOKENS=tokens_at_once, num_warps=4, num_stages=3)
            if splits > 1:
                _combine[(seqs, heads)](
                    out_THD,
                    *parts,
                    batch.starts,
                    *out_THD.stride()[:2],
                    SPLITS=splits,
                    SPLITS_PAD=triton.next_power_of_2(splits),
                    D=size,
                    D_PAD=padded,
                    num_warps=4,
                )
    return out_THD


def copy_blocks(pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
    """Whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""
    _copy_words(pool_N, targets_C, pool_N, sources_C, len(sources_C))


def gather_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
    """out[i] = pool[blocks[i]], whole blocks."""
    _copy_words(out_C, None, pool_N, blocks_C, len(blocks_C))


def scatter_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""
    _copy_words(pool_N, blocks_C, values_C, None, len(blocks_C))


def _copy_words(
    to: torch.Tensor, targets: torch.Tensor | None, source: torch.Tensor, sources: torch.Tensor | None, count: int
) -> None:
    if not count:
        return
    assert to.dtype == source.dtype and to.shape[1:] == source.shape[1:]
    word = torch.int64 if to[0].nbytes % 8 == 0 else torch.int16 if to[0].nbytes % 2 == 0 else torch.int8
    to_words, source_words = (x.view(len(x), -1).view(word) for x in (to, source))
    words = to_words.shape[1]
    with _on(to):
        _copy[(count, triton.cdiv(words, COPY_WORDS))](
            to_words,
            targets,
            source_words,
            sources,
            to_words.stride(0),
            source_words.stride(0),
            words,
            TARGETS=targets is not None,
            SOURCES=sources is not None,
            WORDS=COPY_WORDS,
            num_warps=8,
        )


def _splits(programs: int, tokens: int, device: torch.device) -> int:
    """Parts that the KV of each decoding sequence is cut into: enough programs for two on each multiprocessor."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_PROCESSORS
    )
    wanted = min(2 * processors // programs, tokens // SHORTEST_SPLIT)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1  # few values: each compiles a kernel of its own


def _on(x: torch.Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _rows(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
