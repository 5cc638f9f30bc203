"""Reference kernel: paged attention in plain torch. Every other kernel must equal it.

Decoding sequences (one new token each) are computed together: one gather of their blocks per layer, padded to the longest.
Prefilling sequences are computed one by one, in slices of query rows, which bounds the size of the scores.
Shape legend: see batch.py; here L is the number of KV tokens.
"""

import torch
import torch.nn.functional as F

from pdserve.kernels.batch import Capabilities, PagedBatch, Scores

NAME = "reference"
CAPABILITIES = Capabilities(latent=True, sinks=True, byte_kv=True)
SCALE_BYTES, LARGEST = 2, 127.0  # of a row of KV in 8 bits: a scale in float16, and the largest integer
MAX_SCORES = 1 << 24  # elements of a score matrix over all heads: 64 MiB in float32


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write the K and V of each new token into its slot of one layer's cache."""
    if cache_N2GBD.dtype == torch.int8:
        k_TGD, v_TGD = quantize(k_TGD), quantize(v_TGD)
    block_size = cache_N2GBD.shape[3]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    cache_N2GBD[blocks_T, 0, :, offsets_T] = k_TGD
    cache_N2GBD[blocks_T, 1, :, offsets_T] = v_TGD


def quantize(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of KV in 8 bits, [..., D] → [..., D + 2] int8: integers, and the scale of the largest one in float16."""
    most = rows.abs().amax(-1, keepdim=True).float()
    scales = (most / LARGEST).clamp_max(torch.finfo(torch.float16).max).half()
    divisors = scales.float().masked_fill(scales == 0, torch.inf)
    integers = (rows.float() / divisors).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([integers, scales.view(torch.int8)], -1)


def dequantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of rows by `quantize`, [..., D + 2] → [..., D]."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float16)
    return (rows[..., :-SCALE_BYTES].float() * scales.float()).to(dtype)


def attend(q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, scores: Scores) -> torch.Tensor:
    """Return the attention of every new token over its own sequence, [T, H, D]."""
    out_THD = torch.empty_like(q_THD)
    starts = _starts(batch.query_lens)
    decoding = [s for s, length in enumerate(batch.query_lens) if length == 1]
    if decoding:
        rows = torch.tensor([starts[s] for s in decoding], device=q_THD.device)
        out_THD[rows] = _attend_decoding(q_THD[rows], cache_N2GBD, batch, decoding, scores)
    for s, length in enumerate(batch.query_lens):
        if length > 1:
            span = slice(starts[s], starts[s] + length)
            out_THD[span] = _attend_sequence(q_THD[span], cache_N2GBD, batch, s, scores)
    return out_THD


def copy_blocks(pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
    """Copy whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""
    pool_N[targets_C] = pool_N[sources_C]


def gather_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
    """out[i] = pool[blocks[i]], whole blocks."""
    torch.index_select(pool_N, 0, blocks_C, out=out_C)


def scatter_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""
    pool_N[blocks_C] = values_C


def _starts(lengths: list[int]) -> list[int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


def _gather(
    cache_N2GBD: torch.Tensor, tables_SM: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of whole sequences in order, each [S, G, M·B, D]."""
    kv_SM2GBD = cache_N2GBD[tables_SM]
    if kv_SM2GBD.dtype == torch.int8:
        kv_SM2GBD = dequantize(kv_SM2GBD, dtype)
    seqs, blocks, _, heads, block_size, size = kv_SM2GBD.shape
    kv_2SGLD = kv_SM2GBD.permute(2, 0, 3, 1, 4, 5).reshape(2, seqs, heads, blocks * block_size, size)
    return kv_2SGLD[0], kv_2SGLD[1]


def _attend_decoding(
    q_SHD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, rows: list[int], scores: Scores
) -> torch.Tensor:
    max_blocks = -(-max(batch.kv_lens[s] for s in rows) // batch.block_size)
    k_SGLD, v_SGLD = _gather(cache_N2GBD, batch.tables_SM[rows, :max_blocks], q_SHD.dtype)
    lengths_S1 = batch.kv_lens_S[rows][:, None]
    positions_L = torch.arange(k_SGLD.shape[2], device=q_SHD.device)
    visible_SL = positions_L < lengths_S1
    if scores.window is not None:
        visible_SL &= positions_L >= lengths_S1 - scores.window
    # Masked entries may be KV of other sequences or uninitialised, and NaN survives both - inf and × 0: zero them.
    masked_SGLD = ~visible_SL[:, None, :, None]
    k_SGLD, v_SGLD = k_SGLD.masked_fill(masked_SGLD, 0), v_SGLD.masked_fill(masked_SGLD, 0)
    return _softmax_attention(q_SHD[:, :, None], k_SGLD, v_SGLD, visible_SL[:, None, None], scores)[:, :, 0]


def _attend_sequence(
    q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, s: int, scores: Scores
) -> torch.Tensor:
    kv_len, window = batch.kv_lens[s], scores.window
    k_1GLD, v_1GLD = _gather(cache_N2GBD, batch.tables_SM[s, None, : -(-kv_len // batch.block_size)], q_THD.dtype)
    tokens, heads, _ = q_THD.shape
    skipped = 0 if window is None else max(0, kv_len - tokens + 1 - window)  # outside of every new token's window
    k_1GLD, v_1GLD = k_1GLD[:, :, skipped:kv_len], v_1GLD[:, :, skipped:kv_len]
    kv_len -= skipped
    # The causal flag takes half the work of an explicit mask.
    if kv_len == tokens and scores.is_plain and (window is None or window >= tokens):
        q_1HTD = q_THD.transpose(0, 1)[None]
        out_1HTD = F.scaled_dot_product_attention(
            q_1HTD, k_1GLD, v_1GLD, is_causal=True, scale=scores.scale, enable_gqa=True
        )
        return out_1HTD[0].transpose(0, 1)
    rows = max(1, MAX_SCORES // (heads * kv_len))
    first = kv_len - tokens  # position of the first new token
    slices = []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        visible_TL = _causal_mask(first + start, first + stop, kv_len, window, q_THD.device)
        q_1HTD = q_THD[start:stop].transpose(0, 1)[None]
        slices.append(_softmax_attention(q_1HTD, k_1GLD, v_1GLD, visible_TL, scores)[0].transpose(0, 1))
    return torch.cat(slices)


def _causal_mask(start: int, stop: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    q_T1 = torch.arange(start, stop, device=device)[:, None]
    k_L = torch.arange(kv_len, device=device)
    visible_TL = k_L <= q_T1
    if window is not None:
        visible_TL &= k_L > q_T1 - window
    return visible_TL


def _softmax_attention(
    q_SHTD: torch.Tensor, k_SGLD: torch.Tensor, v_SGLD: torch.Tensor, visible: torch.Tensor, scores: Scores
) -> torch.Tensor:
    scale, _, softcap, sinks_H = scores
    if scores.is_plain:
        return F.scaled_dot_product_attention(q_SHTD, k_SGLD, v_SGLD, attn_mask=visible, scale=scale, enable_gqa=True)
    repeats = q_SHTD.shape[1] // k_SGLD.shape[1]
    k_SHLD, v_SHLD = (x.float().repeat_interleave(repeats, 1) for x in (k_SGLD, v_SGLD))
    scores_SHTL = (q_SHTD.float() @ k_SHLD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores_SHTL = softcap * torch.tanh(scores_SHTL / softcap)
    scores_SHTL = scores_SHTL.masked_fill(~visible, float("-inf"))
    if sinks_H is not None:
        sinks_SHT1 = sinks_H[None, :, None, None].expand(*scores_SHTL.shape[:3], 1)
        scores_SHTL = torch.cat([scores_SHTL, sinks_SHT1], dim=-1)
    weights_SHTL = torch.softmax(scores_SHTL, dim=-1)[..., : k_SHLD.shape[2]]
    return (weights_SHTL @ v_SHLD).to(q_SHTD.dtype)
