"""Token sampling on CPUs (draw.cpp): the Gumbel-max trick without sorting, and with few logarithms.

Shape legend: S rows of logits, V vocabulary, R rows to sample.
"""

from collections.abc import Sequence

import torch

from pdserve.kernels.native import DTYPES, addresses, library


def draw(
    logits_SV: torch.Tensor,
    argmax_S: torch.Tensor,
    rows: list[int],
    counters: list[int],
    settings: Sequence[tuple[float, float, float, float]],
) -> torch.Tensor:
    """Sample one token for each of `rows`, and return the tokens of all rows, int64 [S]: those of the others are `argmax_S`.

    A token is exactly that of the torch reference (engine/sampler.py), or -1 where the reference must decide: the row has
    values that are not finite numbers, or rounding could change its token.

    Args:
        argmax_S: int64, first index of the largest logit of each row.
        counters: state of the noise generator at the start of each of `rows`.
        settings: temperature, top_k, top_p and min_p of each of `rows`.
    """
    assert argmax_S.dtype == torch.long and len(rows) == len(counters) == len(settings)
    logits_SV, drawn_R = logits_SV.contiguous(), torch.empty(len(rows), dtype=torch.long)
    rows_R, counters_R = torch.tensor(rows), torch.tensor(counters)
    settings_R4 = torch.tensor(settings, dtype=torch.float64)
    library().pdserve_draw(
        *(DTYPES.index(logits_SV.dtype), *addresses(drawn_R, logits_SV), logits_SV.shape[1]),
        *addresses(rows_R, argmax_S, counters_R, settings_R4),
        *(len(rows), torch.get_num_threads()),
    )
    return argmax_S.index_copy(0, rows_R, drawn_R)
