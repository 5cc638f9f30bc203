"""CPU kernel of paged attention (paged.cpp, amx_kernel.h). Shape legend: see batch.py."""

import torch

from pdserve.kernels.batch import Capabilities, PagedBatch, Scores
from pdserve.kernels.native import DTYPES, AttentionArguments, addresses, functions, instructions

NAME = "cpu"
CAPABILITIES = Capabilities(
    latent=True,
    sinks=True,
    byte_kv=True,
    states=True,
    records_steps=True,
    exact_rows="products",
    instructions=instructions,
)


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write the K and V of each new token into its slot of one layer's cache."""
    rounds = cache_N2GBD.dtype == torch.int8
    assert k_TGD.dtype == v_TGD.dtype and (rounds or cache_N2GBD.dtype == k_TGD.dtype)
    k_TGD, v_TGD, slots_T = _contiguous_rows(k_TGD), _contiguous_rows(v_TGD), slots_T.contiguous()
    of_cache, item = cache_N2GBD.itemsize, k_TGD.itemsize
    functions().pdserve_write_kv(
        *(*addresses(cache_N2GBD), *(of_cache * stride for stride in _strides(cache_N2GBD))),
        *(*addresses(k_TGD), item * k_TGD.stride(0), item * k_TGD.stride(1)),
        *(*addresses(v_TGD), item * v_TGD.stride(0), item * v_TGD.stride(1)),
        *(*addresses(slots_T), *k_TGD.shape[:2], cache_N2GBD.shape[3], of_cache * cache_N2GBD.shape[4]),
        *(torch.get_num_threads(), rounds, DTYPES.index(k_TGD.dtype)),
    )


def attend(
    q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, scores: Scores, use_amx: bool = True
) -> torch.Tensor:
    """Return the attention of every new token over its own sequence, [T, H, D].

    Args:
        use_amx: allow AMX in bfloat16, where available.
    """
    in_bytes, (scale, window, softcap, sinks_H) = cache_N2GBD.dtype == torch.int8, scores
    assert (in_bytes or q_THD.dtype == cache_N2GBD.dtype) and (sinks_H is None or sinks_H.dtype == torch.float32)
    assert len(batch.starts) > len(batch.query_lens), "as many starts as sequences, and the end"
    q_THD = _contiguous_rows(q_THD)
    _, heads, size = q_THD.shape
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    tables_SM = batch.tables_SM.contiguous()
    arguments = AttentionArguments(
        *addresses(out_THD, q_THD, cache_N2GBD, tables_SM, batch.starts, batch.kv_lens_S, sinks_H),
        *(*out_THD.stride()[:2], *q_THD.stride()[:2], *_strides(cache_N2GBD)),
        S=len(batch.query_lens),
        H=heads,
        G=cache_N2GBD.shape[2],
        D=size,
        B=cache_N2GBD.shape[3],
        M=tables_SM.shape[1],
        scale=scale,
        softcap=softcap or 0.0,
        window=window or 0,
        threads=torch.get_num_threads(),
        dtype=DTYPES.index(q_THD.dtype),
        use_amx=use_amx,
        byte_kv=in_bytes,
    )
    functions().pdserve_attend(arguments)
    return out_THD


def copy_blocks(pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
    """Copy whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""
    _copy(pool_N, targets_C, pool_N, sources_C, len(sources_C))


def gather_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
    """out[i] = pool[blocks[i]], whole blocks."""
    _copy(out_C, None, pool_N, blocks_C, len(blocks_C))


def scatter_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""
    _copy(pool_N, blocks_C, values_C, None, len(blocks_C))


def _copy(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    count: int,
) -> None:
    """target[target_ids[i]] = source[source_ids[i]] for `count` rows; without ids, row i."""
    assert target.dtype == source.dtype and target.shape[1:] == source.shape[1:]
    assert all(x[:0].is_contiguous() and x[0].is_contiguous() for x in (target, source))
    target_ids, source_ids = (None if ids is None else ids.contiguous() for ids in (target_ids, source_ids))
    target_at, target_ids_at, source_at, source_ids_at = addresses(target, target_ids, source, source_ids)
    functions().pdserve_copy_blocks(
        *(target_at, target.itemsize * target.stride(0), target_ids_at),
        *(source_at, source.itemsize * source.stride(0), source_ids_at),
        *(count, target[0].nbytes, torch.get_num_threads()),
    )


def _contiguous_rows(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def _strides(cache_N2GBD: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of blocks, of K and V, and of heads; the tokens of a block are contiguous."""
    block, half, head, token, element = cache_N2GBD.stride()
    assert (token, element) == (cache_N2GBD.shape[4], 1)
    return block, half, head
