"""From logits to tokens. Token i of a request depends on (logits, parameters, seed, i) and on nothing else."""

import hashlib
from collections.abc import Sequence as Rows

import torch

from pdserve.engine.sequence import Sequence


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) drawn from (seed, position) alone: a counter-based generator, here BLAKE2b.

    The same request gives the same draws on any instance, in any batch, and after any restart.
    """
    digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits_SV: torch.Tensor, seqs: Rows[Sequence]) -> list[int]:
    """The next token of each sequence; logits_SV[i] belongs to seqs[i]."""
    _forbid_early_stops(logits_SV, seqs)
    tokens = logits_SV.argmax(dim=-1)
    rows = [i for i, seq in enumerate(seqs) if seq.sampling.temperature > 0]
    if rows:
        tokens[rows] = _draw(logits_SV[rows].float(), [seqs[i] for i in rows])
    chosen: list[int] = tokens.tolist()
    return chosen


def _forbid_early_stops(logits_SV: torch.Tensor, seqs: Rows[Sequence]) -> None:
    for i, seq in enumerate(seqs):
        if seq.num_output < seq.sampling.min_tokens and seq.stop_token_ids:
            logits_SV[i, list(seq.stop_token_ids)] = float("-inf")


def _draw(logits_SV: torch.Tensor, seqs: Rows[Sequence]) -> torch.Tensor:
    """Inverse transform sampling over the kept tokens, the likeliest first.

    The order of filters is that of vLLM and transformers: temperature, then min-p, top-k and top-p, each on the
    distribution that the temperature made.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits_SV.device, dtype=torch.float64)[:, None]

    params = [seq.sampling for seq in seqs]
    # A tiny temperature must not overflow: the row's maximum is taken off first.
    logits_SV = logits_SV.double() - logits_SV.amax(dim=-1, keepdim=True)
    probs_SV = torch.softmax(logits_SV / column([p.temperature for p in params]), dim=-1)
    probs_SV, order_SV = probs_SV.sort(dim=-1, descending=True, stable=True)
    vocab = probs_SV.shape[-1]
    ranks_V = torch.arange(vocab, device=probs_SV.device)
    kept_SV = ranks_V < column([p.top_k or vocab for p in params])
    kept_SV &= probs_SV >= column([p.min_p for p in params]) * probs_SV[:, :1]
    probs_SV = probs_SV * kept_SV
    total_S1 = probs_SV.sum(dim=-1, keepdim=True)
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    kept_SV &= before_SV < column([p.top_p for p in params]) * total_S1
    cumulative_SV = (probs_SV * kept_SV).cumsum(dim=-1)
    draws_S1 = column([uniform(seq.sampling.seed, seq.num_output) for seq in seqs]) * cumulative_SV[:, -1:]
    ranks_S1 = torch.searchsorted(cumulative_SV, draws_S1, right=True)
    # Rounding may put a draw at the very end of the last kept token.
    ranks_S1 = torch.minimum(ranks_S1, kept_SV.sum(dim=-1, keepdim=True) - 1)
    return order_SV.gather(1, ranks_S1)[:, 0]
