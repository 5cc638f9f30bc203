"""Token sampling on GPUs: the Gumbel-max trick in float32, and without sorting the vocabulary.

Top-k, top-p and min-p need the largest logits in order: `topk` finds some candidates, and only these are sorted, and their
noise computed, as the reference does it (engine/sampler.py), in float64. Without these settings every token is a candidate;
then noise and sums are in float32, and a token counts only if it wins by more than their error.

Shape legend: S rows of logits, V vocabulary, R rows to sample, K candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.kernels.largest import largest_candidates
from pdserve.kernels.noise import fast_gumbel, gumbel, random_bits

CANDIDATES = 1024
MARGIN = 1e-4  # of sums of logits and noise in float32 that decide: ten times their error
SHARE_MARGIN = 2e-6  # of shares of probability that are sums over the vocabulary, in float32 until they are summed
EXACT_MARGIN = 1e-9  # of what is in float64 here and in the reference, which may add up in another order


def draw(
    logits_SV: torch.Tensor,
    argmax_S: torch.Tensor,
    rows: list[int],
    counters: list[int],
    settings: Sequence[tuple[float, float, float, float]],
) -> torch.Tensor:
    """Sample one token for each of `rows` as `kernels/draw.py` does, on the device, of which nothing is read: no wait.

    A token is exactly that of the torch reference, or -1 where the reference must decide: rounding could change the token,
    or the candidates do not cover what the settings keep.
    """
    device = logits_SV.device
    columns = np.empty((6, len(rows)), dtype=np.int64)
    columns[0], columns[1] = rows, counters
    columns[2:] = np.ascontiguousarray(np.array(settings, dtype=np.float64).T).view(np.int64)
    staging = torch.from_numpy(columns)
    packed = (staging.pin_memory() if device.type == "cuda" else staging).to(device, non_blocking=True)
    rows_R, counters_R = packed[0], packed[1]
    temperature, top_k, top_p, min_p = packed[2:].view(torch.float64)
    plain = [not (k or p < 1 or m > 0) for _, k, p, m in settings]
    drawn_R = argmax_S[:0]
    if any(plain):
        best_R, margin_R, ids_R = _largest_sums(logits_SV, argmax_S, rows_R, counters_R, temperature.float())
        drawn_R = torch.where((margin_R > MARGIN) & best_R.isfinite(), ids_R, -1)
    if not all(plain):
        logits_RV = logits_SV.index_select(0, rows_R)
        filtered_R = _draw_filtered(logits_RV, counters_R, temperature, top_k, top_p, min_p)
        is_plain_R = ~((top_k > 0) | (top_p < 1) | (min_p > 0))
        drawn_R = torch.where(is_plain_R, drawn_R, filtered_R) if any(plain) else filtered_R
    return drawn_R if rows == [*range(len(argmax_S))] else argmax_S.index_copy(0, rows_R, drawn_R)


def _largest_sums(
    logits_SV: torch.Tensor,
    argmax_S: torch.Tensor,
    rows_R: torch.Tensor,
    counters_R: torch.Tensor,
    temperature_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `gumbel.largest_sums` does, in torch where that has no GPU."""
    if logits_SV.is_cuda:
        from pdserve.kernels.gpu.gumbel import largest_sums

        return largest_sums(logits_SV, argmax_S, rows_R, counters_R, temperature_R)
    logits_RV = logits_SV.index_select(0, rows_R).float()
    scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R[:, None]
    scaled_RV += fast_gumbel(random_bits(counters_R, torch.arange(logits_RV.shape[1], device=logits_RV.device)))
    best = scaled_RV.topk(min(2, scaled_RV.shape[1]), -1)
    return best.values[:, 0], best.values[:, 0] - best.values[:, -1], best.indices[:, 0]


def _draw_filtered(
    logits_RV: torch.Tensor,
    counters_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    vocab = logits_RV.shape[1]
    count = min(CANDIDATES, vocab)
    values_RK, ids_RK = largest_candidates(logits_RV, count)
    maximum_R1, temperature_R1 = values_RK[:, :1].double(), temperature_R[:, None]
    scaled_RK = (values_RK.double() - maximum_R1) / temperature_R1
    weights_RK = scaled_RK.exp()

    ranks_K = torch.arange(count, device=logits_RV.device)
    limit_R1 = torch.where(top_k_R > 0, top_k_R, float(vocab))[:, None]
    kept_RK = (ranks_K < limit_R1) & (weights_RK >= min_p_R[:, None])
    near_RK = (weights_RK - min_p_R[:, None]).abs() < EXACT_MARGIN * min_p_R[:, None]  # rounding may decide
    # Different logits may have equal probabilities, which the reference orders by id.
    steps_RK = -scaled_RK.diff(dim=-1)
    near_RK[:, 1:] |= (steps_RK > 0) & (steps_RK < EXACT_MARGIN)
    weights_RK = weights_RK * kept_RK
    within_R1 = weights_RK.sum(-1, keepdim=True)
    # What top-k and min-p keep beyond the candidates: nothing if they end among them, else all that passes min-p.
    scaled_RV = (logits_RV.float() - values_RK[:, :1].float()) / temperature_R1.float()
    weights_RV = scaled_RV.exp()
    passing_R1 = (weights_RV * (weights_RV >= min_p_R[:, None].float())).sum(-1, keepdim=True, dtype=torch.float64)
    ends_R1 = (limit_R1 <= count) | ~kept_RK[:, -1:] | (count == vocab)
    total_R1 = torch.where(ends_R1, within_R1, passing_R1)
    threshold_R1 = top_p_R[:, None] * total_R1
    before_RK = weights_RK.cumsum(-1) - weights_RK
    margin_R1 = total_R1 * torch.where(ends_R1, EXACT_MARGIN, SHARE_MARGIN)
    near_RK |= kept_RK & (top_p_R[:, None] < 1) & ((before_RK - threshold_R1).abs() < margin_R1)
    kept_RK &= before_RK < threshold_R1
    is_cut_R1 = ends_R1 | ~kept_RK[:, -1:]  # no token beyond the candidates is kept
    is_cut_R1 &= (limit_R1 <= count) | (limit_R1 >= vocab)
    # Tokens beyond the candidates that equal the last kept one would compete for its place.
    last_R1 = values_RK.gather(-1, (kept_RK.sum(-1, keepdim=True) - 1).clamp(min=0))
    is_cut_R1 &= (last_R1 != values_RK[:, -1:]) | (count == vocab)

    noisy_RK = torch.where(kept_RK, scaled_RK + gumbel(random_bits(counters_R, ids_RK)), float("-inf"))
    drawn_R = ids_RK.gather(-1, noisy_RK.argmax(-1, keepdim=True))[:, 0]
    sure_R = is_cut_R1[:, 0] & kept_RK[:, 0] & ~near_RK.any(-1) & maximum_R1[:, 0].isfinite()
    return torch.where(sure_R, drawn_R, -1)
