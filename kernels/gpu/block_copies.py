"""Copies of whole KV blocks on a GPU, in Triton: within the pool, out of it and into it."""

import torch
import triton
import triton.language as tl

from pdserve.kernels.gpu.launch import device_of

COPY_WORDS = 4096  # words of 8 bytes per program


@triton.jit(do_not_specialize=["target_ids", "source_ids"])
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
    with device_of(target):
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
