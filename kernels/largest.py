"""The largest values of rows, ordered by value and then by index, so that a row's do not depend on how many others ask for.

`torch.topk` orders equal values as its algorithm meets them, and that depends on the count: of the 16-bit logits of a large
vocabulary, one row in ten has other first tokens with a larger count. Shape legend: R rows, V vocabulary, K largest.
"""

import torch

SPARE = 16  # further values that `topk` is asked for: those that equal the last one are nearly always among them


def largest(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest values of each row and their indices, int64, both [R, K]; all V if `count` is more.

    Equal values are in the order of their indices, so the result for a smaller count is the beginning of this one. Reads from
    the device which rows have more equal values than `topk` has returned.
    """
    vocab = values_RV.shape[1]
    count = min(count, vocab)
    values_RK, ids_RK = largest_candidates(values_RV, min(count + SPARE, vocab))
    top_RK, top_ids_RK = values_RK[:, :count], ids_RK[:, :count]
    if count and ids_RK.shape[1] < vocab:
        for row in (top_RK[:, -1] == values_RK[:, -1]).nonzero()[:, 0].tolist():
            last = top_RK[row, -1]
            num_above = int((top_RK[row] > last).sum())
            equal_ids = (values_RV[row] == last).nonzero()[:, 0]
            top_ids_RK[row, num_above:] = equal_ids[: count - num_above]
    return top_RK, top_ids_RK


def largest_candidates(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `topk` does, ordered by value, then by index. Others may equal the last value."""
    values_RK, ids_RK = values_RV.topk(count, dim=-1)
    ids_RK, by_id = ids_RK.sort(dim=-1)
    values_RK, by_value = values_RK.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values_RK, ids_RK.gather(-1, by_value)
