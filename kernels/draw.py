"""Tokens drawn from logits on CPUs: draw.cpp, which sorts nothing and takes few logarithms."""

from collections.abc import Sequence

import torch

from pdserve.kernels.cpu import DTYPES, library


def draw(
    logits_SV: torch.Tensor,
    largest_S: torch.Tensor,
    rows: list[int],
    counters: list[int],
    settings: Sequence[tuple[float, float, float, float]],
) -> torch.Tensor:
    """A token for each of `rows`, int64 [R], or -1: the row has others than numbers, or rounding could decide its token.

    largest_S, int64, has the first of each row's largest logits. A row's counter is where its noise begins; its settings are
    temperature, top_k, top_p and min_p.
    """
    assert largest_S.dtype == torch.long and len(rows) == len(counters) == len(settings)
    logits_SV, drawn_R = logits_SV.contiguous(), torch.empty(len(rows), dtype=torch.long)
    rows_R, counters_R = torch.tensor(rows), torch.tensor(counters)
    settings_R4 = torch.tensor(settings, dtype=torch.float64)
    library().pdserve_draw(
        DTYPES.index(logits_SV.dtype),
        drawn_R.data_ptr(),
        logits_SV.data_ptr(),
        logits_SV.shape[1],
        rows_R.data_ptr(),
        largest_S.data_ptr(),
        counters_R.data_ptr(),
        settings_R4.data_ptr(),
        len(rows),
        torch.get_num_threads(),
    )
    return drawn_R
