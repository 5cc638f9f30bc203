"""Sampler: logits to tokens. Token i of a request is a function of (logits, parameters, seed, i) alone.

Shape legend: S sequences, V vocabulary, R rows to sample with the CPU kernel, A rows with logprobs, K top logprobs.
"""

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import repeat
from typing import cast

import torch

from pdserve.engine.features import BEAMS, LOGPROBS, change_logits, model_logprobs, record_candidates, token_logprobs
from pdserve.engine.grammar import has_mask
from pdserve.engine.sequence import Sequence
from pdserve.kernels import elementwise, native
from pdserve.kernels.draw import draw
from pdserve.kernels.noise import gumbel, random_bits
from pdserve.plugins import extension
from pdserve.request import SamplingParams, TokenLogprobs

GPU_ROWS = 16  # per pass on GPUs: 20 MiB in float64 for a vocabulary of 150,000
SampledRow = tuple[Sequence, int, TokenLogprobs | None]  # whose row, its token, and what is reported of that
CHUNK_LOGITS = 1 << 17  # logits per pass on CPUs: 1 MiB in float64, which stays in the cache


def rng_counter(seed: int, position: int) -> int:
    """Return the signed 64-bit state at which the noise of one token starts: a hash of (seed, position)."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel_noise(counters_S: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return Gumbel noise [S, V] float64; entry (s, v) is a function of counters_S[s] and v alone."""
    return gumbel(random_bits(counters_S, torch.arange(vocab, device=counters_S.device)))


def next_tokens(
    logits_SV: torch.Tensor, seqs: list[Sequence], ahead: list[int], drafts: Mapping[Sequence, list[int]]
) -> list[SampledRow]:
    """Return the sequence and the token of each row, with log probabilities where they are asked for. Beams get candidates.

    Args:
        logits_SV: changed in place.
        seqs, ahead: the sequence of each row, and how many tokens lie between those that it has and the next one.
        drafts: these tokens, of some sequences.
    """
    for seq in seqs:
        if seq.features:
            return _in_turns(logits_SV, seqs, ahead, drafts)
    return [*zip(seqs, SampledTokens(logits_SV, seqs, ahead).read(), repeat(None))] if seqs else []


def _in_turns(
    logits_SV: torch.Tensor, seqs: list[Sequence], ahead: list[int], drafts: Mapping[Sequence, list[int]]
) -> list[SampledRow]:
    """Sample the rows of sequences with features in turns, each behind a right draft, none behind an end or without its mask.

    So features see the very outputs that they see without drafts.
    """
    if not drafts:
        return _next_tokens_with_features(logits_SV, seqs, ahead)
    rows = [row for row, seq in enumerate(seqs) if not (ahead[row] and seq.features)]
    place = {seqs[row]: row for row in rows if seqs[row].features}
    appended = dict[Sequence, int]()
    sampled: list[SampledRow] = []
    while rows:
        between = [0 if seqs[row].features else ahead[row] for row in rows]
        turn = _next_tokens_with_features(logits_SV[rows], [seqs[row] for row in rows], between)
        sampled += turn
        rows = []
        for seq, token, _ in turn:
            count = appended.get(seq, 0)
            is_right = seq in place and drafts.get(seq, [])[count : count + 1] == [token]
            if is_right and not seq.output.fault and not seq.output.ends_with(token, seq.output.num_generated + 1):
                seq.output.append(token)
                appended[seq] = count + 1
                if has_mask(seq):  # else the step has come before the mask
                    rows.append(place[seq] + count + 1)
    for seq, count in appended.items():
        seq.output.retract(count)
    return sampled


def _next_tokens_with_features(logits_SV: torch.Tensor, seqs: list[Sequence], ahead: list[int]) -> list[SampledRow]:
    beams = [row for row, seq in enumerate(seqs) if BEAMS in seq.features]
    if beams:
        record_candidates(logits_SV[beams], [seqs[row] for row in beams])
        others = [row for row, seq in enumerate(seqs) if BEAMS not in seq.features]
        logits_SV, seqs, ahead = logits_SV[others], [seqs[row] for row in others], [ahead[row] for row in others]
    if not seqs:
        return []
    rows = [row for row, seq in enumerate(seqs) if LOGPROBS in seq.features]
    logprobs_AV = model_logprobs(logits_SV, rows) if rows else None  # before the sampler changes the logits
    tokens = sample(logits_SV, seqs, ahead)
    logprobs: list[TokenLogprobs | None] = [None] * len(seqs)
    if logprobs_AV is not None:
        reported = token_logprobs(logprobs_AV, [seqs[row] for row in rows], [tokens[row] for row in rows])
        for row, of_token in zip(rows, reported, strict=True):
            logprobs[row] = of_token
    return [*zip(seqs, tokens, logprobs, strict=True)]


def sample(logits_SV: torch.Tensor, seqs: list[Sequence], ahead: SequenceABC[int] = ()) -> list[int]:
    """Return the next token of each sequence; logits_SV[i] belongs to seqs[i]. Changes the logits in place."""
    change_logits(logits_SV, seqs)
    return SampledTokens(logits_SV, seqs, ahead).read()


class SampledTokens:
    """Tokens that a device samples, while Python goes on.

    Args:
        logits_SV: row i belongs to seqs[i]; penalties, masks and the like have been applied.
        ahead: of each sequence, how many tokens lie between those that it has and the next one; empty: none.

    Attributes:
        tokens_S: int64, on the device. -1 where the reference must decide, which `read` asks.
        undecided: the rows of these, once they are read.
    """

    def __init__(self, logits_SV: torch.Tensor, seqs: list[Sequence], ahead: SequenceABC[int] = ()) -> None:
        self._logits_SV = logits_SV
        self._params: dict[int, SamplingParams] = {}  # of the rows that are drawn
        self._counters: dict[int, int] = {}
        for row, seq in enumerate(seqs):
            if seq.sampling.temperature > 0:
                position = seq.output.num_generated + (ahead[row] if ahead else 0)
                self._params[row], self._counters[row] = seq.sampling, rng_counter(seq.sampling.seed, position)
        self.tokens_S = _argmax(logits_SV)
        self.undecided: list[int] = []
        if self._params:
            self._draw([*self._params])
        self._on_host_S, self._copied = self.tokens_S, None
        if self.tokens_S.is_cuda:
            self._on_host_S = torch.empty_like(self.tokens_S, device="cpu", pin_memory=True)
            self._on_host_S.copy_(self.tokens_S, non_blocking=True)
            self._copied = torch.cuda.current_stream(self.tokens_S.device).record_event()

    def keep_logits(self) -> None:
        """Copy the logits if `read` may need them, since the next step may overwrite them."""
        if self._params:
            self._logits_SV = self._logits_SV.clone()

    def read(self) -> list[int]:
        """Wait for the tokens, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._on_host_S.tolist()
        if not self._params:
            return tokens
        rows = self.undecided = [row for row in self._params if tokens[row] < 0]
        # A few rows at a time. On a CPU a dozen passes over them stay in the cache, which takes a quarter of the time; on a
        # GPU they take little memory.
        on_cpu = self._logits_SV.device.type == "cpu"
        chunk = max(1, CHUNK_LOGITS // self._logits_SV.shape[1]) if on_cpu else GPU_ROWS
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            params, counters = [self._params[row] for row in part], [self._counters[row] for row in part]
            drawn = _sample_gumbel(self._logits_SV[part].float(), params, counters).tolist()
            for row, token in zip(part, drawn, strict=True):
                tokens[row] = token
        return tokens

    def _draw(self, rows: list[int]) -> None:
        """Sample those of all rows that are not greedy, by the device's kernel if it has one."""
        if (draw_rows := _draw_function(self._logits_SV)) is not None:
            settings = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in (self._params[row] for row in rows)]
            counters = [self._counters[row] for row in rows]
            self.tokens_S = draw_rows(self._logits_SV, self.tokens_S, rows, counters, settings)
        else:
            self.tokens_S[rows] = -1


def _draw_function(logits_SV: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return the sampling kernel for a device, if it has one."""
    if logits_SV.device.type != "cpu":
        return cast("Callable[..., torch.Tensor]", extension("gpu").sample)
    return draw if native.is_available() else None


def _argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    if logits_SV.device.type == "cpu" and native.is_available():
        return elementwise.argmax(logits_SV)  # 5 times as fast as `max`, which is 4 times as fast as torch's argmax
    return logits_SV.max(dim=-1).indices


def _sample_gumbel(logits_SV: torch.Tensor, params: list[SamplingParams], counters: list[int]) -> torch.Tensor:
    """Sample with the Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of their softmax.

    Rounding differences between batches change a token only where the two best sums nearly tie; inverse transform sampling
    would be exposed to them at every step of the cumulative distribution.
    """
    temperatures_S1 = _column([p.temperature for p in params], logits_SV)
    # Subtracting the row's maximum first keeps a tiny temperature from overflowing.
    scaled_SV = (logits_SV.double() - logits_SV.amax(dim=-1, keepdim=True)) / temperatures_S1
    if any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params):
        scaled_SV = scaled_SV.masked_fill(~_keep_mask(scaled_SV, params), float("-inf"))
    noise_SV = gumbel_noise(torch.tensor(counters, device=logits_SV.device), scaled_SV.shape[-1])
    return (scaled_SV + noise_SV).argmax(dim=-1)


def _keep_mask(scaled_SV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return the tokens that pass min-p, top-k and top-p, in this order, as in vLLM and transformers. Bool [S, V]."""
    probs_SV, order_SV = torch.softmax(scaled_SV, dim=-1).sort(dim=-1, descending=True, stable=True)
    vocab = probs_SV.shape[-1]
    ranks_V = torch.arange(vocab, device=probs_SV.device)
    kept_SV = ranks_V < _column([p.top_k or vocab for p in params], probs_SV)
    kept_SV &= probs_SV >= _column([p.min_p for p in params], probs_SV) * probs_SV[:, :1]
    probs_SV = probs_SV * kept_SV
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    kept_SV &= before_SV < _column([p.top_p for p in params], probs_SV) * probs_SV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept_SV).scatter(1, order_SV, kept_SV)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float64)[:, None]
