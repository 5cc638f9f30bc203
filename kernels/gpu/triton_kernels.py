"""Paged attention for GPUs in Triton. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly, for tests.

One attention kernel serves decode and prefill. A program computes a tile of query rows over a range of KV. A row is a new
token × a query head of one key/value head, so that heads that share KV read it once. Decode tiles hold the rows of one token.
If there are too few decode tiles for the GPU, their KV is split over several programs (flash-decoding, Dao et al. 2023) and a
second kernel combines the partial results. Softmax is online (Milakov & Gimelshein 2018), in float32 and in powers of two.

Shape legend: see batch.py; R query heads per key/value head.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from pdserve.kernels.batch import PagedBatch

NAME = "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETER_PROCESSORS = 4  # assumed by the split in the interpreter, so that tests cover both paths
MIN_SPLIT_TOKENS = 256  # KV tokens: shorter splits do not pay for the second kernel
COPY_WORDS = 4096  # words of 8 bytes per program

LOG2E = tl.constexpr(1.4426950408889634)
MIN_SCORE = tl.constexpr(-1e30)  # initial running maximum: finite, since -inf - -inf is NaN


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
    target = cache + slot // B * stride_block + g * stride_head + slot % B * D + d
    tl.store(target, tl.load(k + t * k_token + g * k_head + d, mask=d < D), mask=d < D)
    tl.store(target + stride_half, tl.load(v + t * v_token + g * v_head + d, mask=d < D), mask=d < D)


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
    query_len = tl.load(starts + s + 1) - start
    kv_len = tl.load(kv_lens + s)
    if (query_len == 1) != DECODE:
        return
    if tile * ROWS >= query_len * R:
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
    if SPLITS > 1:
        split_length = tl.cdiv(tl.cdiv(kv_end - kv_start, SPLITS), TOKENS) * TOKENS
        kv_start = kv_start + split * split_length
        kv_end = tl.minimum(kv_start + split_length, kv_end)

    m = tl.full([ROWS], MIN_SCORE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, D_PAD], tl.float32)
    for n in range(kv_start, kv_end, TOKENS):
        kv_position = n + tl.arange(0, TOKENS)
        inside = kv_position < kv_end
        block = tl.load(tables + s * table_length + kv_position // B, mask=inside, other=0)
        k_rows = cache + block * stride_block + g * stride_head + kv_position % B * D
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

    if SPLITS > 1:
        slot = (s * tl.num_programs(1) * R + head) * SPLITS + split
        tl.store(part_m + slot, m, mask=valid)
        tl.store(part_l + slot, l, mask=valid)
        tl.store(part_o + slot[:, None] * D + d[None, :], o, mask=valid_elements)
    else:
        target = out + (start + token)[:, None] * out_token + head[:, None] * out_head + d[None, :]
        tl.store(target, (o / l[:, None]).to(out.dtype.element_ty), mask=valid_elements)


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
    slot = (s * tl.num_programs(1) + h) * SPLITS + i
    m = tl.load(part_m + slot, mask=i < SPLITS, other=MIN_SCORE)
    l = tl.load(part_l + slot, mask=i < SPLITS, other=0.0)  # noqa: E741
    valid = (i < SPLITS)[:, None] & (d < D)[None, :]
    o = tl.load(part_o + slot[:, None] * D + d[None, :], mask=valid, other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(o * weight[:, None], 0) / tl.sum(l * weight, 0)
    tl.store(out + start * out_token + h * out_head + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _copy(
    target,
    target_ids,
    source,
    source_ids,
    target_stride,
    source_stride,
    words,
    HAS_TARGET_IDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    target_row = i
    source_row = i
    if HAS_TARGET_IDS:
        target_row = tl.load(target_ids + i)
    if HAS_SOURCE_IDS:
        source_row = tl.load(source_ids + i)
    tl.store(
        target + target_row * target_stride + word,
        tl.load(source + source_row * source_stride + word, mask=word < words),
        mask=word < words,
    )


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write the K and V of each new token into its slot of one layer's cache."""
    k_TGD, v_TGD = _contiguous_rows(k_TGD), _contiguous_rows(v_TGD)
    tokens, heads, size = k_TGD.shape
    with _device_of(cache_N2GBD):
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
    """Return the attention of every new token over its own sequence, [T, H, D]."""
    q_THD = _contiguous_rows(q_THD)
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

    with _device_of(q_THD):
        max_query_len = max(batch.query_lens)
        if max_query_len > 1:
            rows = 128 if padded * q_THD.itemsize <= 256 else 64 if padded * q_THD.itemsize <= 512 else 32
            tiles = triton.cdiv(max_query_len * repeats, rows)
            tuning = {"num_warps": 8 if rows == 128 else 4, "num_stages": 2}
            launch(False, tiles, 1, [out_THD] * 3, ROWS=rows, TOKENS=64 if rows > 32 else 32, **tuning)
        decode_kv_lens = [kv for new, kv in zip(batch.query_lens, batch.kv_lens, strict=True) if new == 1]
        if decode_kv_lens:
            max_kv_len = max(decode_kv_lens) if window is None else min(window, max(decode_kv_lens))
            splits = _num_splits(len(decode_kv_lens) * kv_heads, max_kv_len, q_THD.device)
            parts = [out_THD] * 3
            if splits > 1:
                shape = (seqs, heads, splits)
                parts = [q_THD.new_empty(s, dtype=torch.float32) for s in ((*shape, size), shape, shape)]
            rows = max(16, triton.next_power_of_2(repeats))
            kv_tile = 64 if padded * q_THD.itemsize <= 512 else 32
            launch(True, 1, splits, parts, ROWS=rows, TOKENS=kv_tile, num_warps=4, num_stages=3)
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
    """Copy whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""
    _copy_words(pool_N, targets_C, pool_N, sources_C, len(sources_C))


def gather_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
    """out[i] = pool[blocks[i]], whole blocks."""
    _copy_words(out_C, None, pool_N, blocks_C, len(blocks_C))


def scatter_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""
    _copy_words(pool_N, blocks_C, values_C, None, len(blocks_C))


def _copy_words(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    count: int,
) -> None:
    """target[target_ids[i]] = source[source_ids[i]] for `count` rows; without ids, row i."""
    if not count:
        return
    assert target.dtype == source.dtype and target.shape[1:] == source.shape[1:]
    word = torch.int64 if target[0].nbytes % 8 == 0 else torch.int16 if target[0].nbytes % 2 == 0 else torch.int8
    target_words, source_words = (x.view(len(x), -1).view(word) for x in (target, source))
    words = target_words.shape[1]
    with _device_of(target):
        _copy[(count, triton.cdiv(words, COPY_WORDS))](
            target_words,
            target_ids,
            source_words,
            source_ids,
            target_words.stride(0),
            source_words.stride(0),
            words,
            HAS_TARGET_IDS=target_ids is not None,
            HAS_SOURCE_IDS=source_ids is not None,
            WORDS=COPY_WORDS,
            num_warps=8,
        )


def _num_splits(programs: int, kv_tokens: int, device: torch.device) -> int:
    """Return the number of KV splits of each decoding sequence: enough for two programs on each multiprocessor."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETER_PROCESSORS
    )
    target = min(2 * processors // programs, kv_tokens // MIN_SPLIT_TOKENS)
    return 1 << (target.bit_length() - 1) if target > 1 else 1  # a power of two: each value compiles its own kernel


def _device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _contiguous_rows(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
