"""Features: what only some requests need of a step, from penalties to embeddings.

A sequence carries the features of its request, most carry none, and a step calls only those that some sequence has. A new
feature is a subclass of `Feature` and a line in `features_of`; if it only changes logits, a function and a line in `SHARED`.

Shape legend: S sequences, R rows of a feature, A rows with log probabilities, K of them per row, V vocabulary, H hidden size,
C classes.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from pdserve.engine.grammar import apply_grammars
from pdserve.engine.sequence import Feature, Sequence
from pdserve.errors import BadRequest
from pdserve.kernels.largest import largest
from pdserve.keys import Tokens
from pdserve.logits_processors import apply_processors
from pdserve.pooling import Pooling
from pdserve.request import SamplingParams, TokenLogprobs

SCORED_ROWS = 256  # logits of prompts that are scored at a time: log_softmax in float32 takes several copies of them
_PLAIN = SamplingParams()

Rows = list[tuple[torch.Tensor, Sequence]]  # views [V] of rows of the logits, and whose they are


@dataclass(frozen=True, eq=False)
class SharedFeature(Feature):
    """A feature without state, which is the same object for all sequences that have it.

    Attributes:
        fields: of `SamplingParams`; a request has the feature if it sets one of them.
        change: changes the logits of the rows of sequences that have it, in place; None if it changes none.
    """

    fields: tuple[str, ...]
    change: Callable[[Rows], None] | None = None
    takes_drafts: bool = True


Kind = TypeVar("Kind", bound=Feature)


def find(kind: type[Kind], seq: Sequence) -> Kind | None:
    """Return the feature of a kind that a sequence has; None if it has none."""
    return next((feature for feature in seq.features if isinstance(feature, kind)), None)


class PromptScores(Feature):
    """Log probabilities of the prompt's tokens but the first, each under the logits of the token before.

    Attributes:
        scores: by position. Choices of one prompt share them.
    """

    def __init__(self, num_top: int, num_prompt: int) -> None:
        self.scores: dict[int, TokenLogprobs] = {}
        self._num_top = num_top
        self._num_prompt = num_prompt

    @property
    def reads_logits(self) -> bool:
        return len(self.scores) < self._num_prompt - 1

    reads_prompt = reads_logits

    def logits_rows(self, seq: Sequence, count: int) -> range:
        return range(min(count, self._num_prompt - 1 - seq.kv.num_computed) if self.reads_logits else 0)

    def take_logits(self, seq: Sequence, logits_RV: torch.Tensor) -> None:
        for start in range(0, len(logits_RV), SCORED_ROWS):
            part = logits_RV[start : start + SCORED_ROWS]
            self._score(part, seq.output.tokens, seq.kv.num_computed + start + 1)

    def _score(self, logits_RV: torch.Tensor, tokens: Tokens, first: int) -> None:
        """Record the log probability of each token of a prompt from position `first` on, under the logits before it."""
        logprobs_RV = logits_RV.float().log_softmax(dim=-1)
        ids_R1 = torch.tensor(tokens[first : first + len(logits_RV)].tolist(), device=logits_RV.device)[:, None]
        chosen_R1 = logprobs_RV.gather(1, ids_R1)
        ranks_R = (logprobs_RV > chosen_R1).sum(dim=-1) + 1
        values_RK, ids_RK = largest(logprobs_RV, self._num_top)
        rows = zip(chosen_R1[:, 0].tolist(), ranks_R.tolist(), ids_RK.tolist(), values_RK.tolist(), strict=True)
        for position, (logprob, rank, ids, values) in enumerate(rows, first):
            self.scores[position] = TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)), rank)


class Embedding(Feature):
    """The embedding of a text, or the classes' probabilities of a classifier, in place of an output.

    Attributes:
        vector: float32 numbers, once the tokens are computed.
    """

    has_output = False

    def __init__(self, pooling: Pooling) -> None:
        self.vector = b""
        self._pooling = pooling
        self._pooled_H: torch.Tensor | None = None  # sum of the hidden states that count, so far

    @property
    def reads_prompt(self) -> bool:
        return self._pooling.mode != "last"

    def hidden_rows(self, seq: Sequence, count: int) -> range:
        match self._pooling.mode:
            case "last":
                return range(count - 1 if count == seq.kv.num_uncomputed else count, count)
            case "cls":
                return range(1 if seq.kv.num_computed == 0 else 0)
        return range(count)

    def take_hidden(self, seq: Sequence, hidden_RH: torch.Tensor) -> None:
        for hidden_H in hidden_RH:
            self._pooled_H = hidden_H if self._pooled_H is None else self._pooled_H + hidden_H

    def complete(self, seq: Sequence, head: torch.nn.Module) -> None:
        assert self._pooled_H is not None
        vector_H = self._pooled_H / (len(seq) if self._pooling.mode == "mean" else 1)
        if self._pooling.normalize:
            vector_H = torch.nn.functional.normalize(vector_H, dim=0)
        if self._pooling.num_classes:
            weight = next(head.parameters())
            logits_C = head(vector_H[None].to(weight.device, weight.dtype))[0].float().cpu()
            vector_H = logits_C.softmax(dim=0) if len(logits_C) > 1 else logits_C.sigmoid()
        self.vector, self._pooled_H = vector_H.numpy().astype("<f4").tobytes(), None

    def restart(self) -> None:
        self._pooled_H = None


def features_of(
    sampling: SamplingParams, num_prompt: int, pooling: Pooling | None = None, *, is_continued: bool = False
) -> tuple[Feature, ...]:
    """Return the features of a new sequence.

    Args:
        pooling: how its embedding is made, if that is what the request asks for.
        is_continued: another instance has computed the prompt, and reported what the request asks to know of it.
    """
    features: list[Feature] = []
    for feature in SHARED:
        for name in feature.fields:
            if getattr(sampling, name) != getattr(_PLAIN, name):
                features.append(feature)
                break
    if sampling.prompt_logprobs is not None and not is_continued:
        features.append(PromptScores(sampling.prompt_logprobs, num_prompt))
    if pooling is not None:
        features.append(Embedding(pooling))
    return tuple(features)


def change_logits(logits_SV: torch.Tensor, seqs: list[Sequence]) -> None:
    """Change logits in place by all features of the sequences; logits_SV[i] belongs to seqs[i]."""
    for feature in SHARED:
        rows = [(logits_SV[i], seq) for i, seq in enumerate(seqs) if feature in seq.features]
        if rows and feature.change is not None:
            feature.change(rows)


def model_logprobs(logits_SV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the model's log-probabilities [A, V] float32 of the given rows."""
    return logits_SV[rows].float().log_softmax(dim=-1)


def token_logprobs(logprobs_AV: torch.Tensor, seqs: list[Sequence], tokens: list[int]) -> list[TokenLogprobs]:
    """Return the log probabilities of new tokens; row i belongs to seqs[i] and tokens[i]."""
    num_top = [seq.sampling.logprobs or 0 for seq in seqs]
    chosen_A = logprobs_AV.gather(1, torch.tensor(tokens, device=logprobs_AV.device)[:, None])[:, 0]
    values_AK, ids_AK = largest(logprobs_AV, max(num_top))
    rows = zip(chosen_A.tolist(), ids_AK.tolist(), values_AK.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for count, (logprob, ids, values) in zip(num_top, rows, strict=True)
    ]


def record_candidates(logits_SV: torch.Tensor, seqs: list[Sequence]) -> None:
    """Set the candidates of beams. Penalties and masks change log probabilities here, not logits, as in transformers."""
    logprobs_SV = logits_SV.float().log_softmax(dim=-1)
    reported_SV = logprobs_SV.clone() if any(seq.sampling.logprobs is not None for seq in seqs) else logprobs_SV
    change_logits(logprobs_SV, seqs)
    groups = [seq.group for seq in seqs if seq.group is not None]
    for seq, group in zip(seqs, groups, strict=True):
        if seq.output.failure is not None:
            group.root.output.fail(seq.output.failure)  # its role looks there only
    counts = [group.search.num_candidates for group in groups]
    values_SK, ids_SK = largest(logprobs_SV, max(counts))
    rows = zip(seqs, groups, counts, ids_SK.tolist(), values_SK.tolist(), strict=True)
    for row, (seq, group, count, ids, values) in enumerate(rows):
        if seq.sampling.logprobs is None:
            group.record_candidates(seq, [*zip(ids[:count], values[:count], strict=True)])
            continue
        values_1K, ids_1K = largest(reported_SV[row : row + 1], seq.sampling.logprobs)
        top = tuple(zip(ids_1K[0].tolist(), values_1K[0].tolist(), strict=True))
        reports = [TokenLogprobs(logprob, top) for logprob in reported_SV[row, ids[:count]].tolist()]
        group.record_candidates(seq, [*zip(ids[:count], values[:count], reports, strict=True)])


def _repeat_less(rows: Rows) -> None:
    """Apply repetition penalties."""
    for logits_V, seq in rows:
        # Repeated tokens get the same value each time. Building the index from a list takes ten times as long.
        seen_ids = torch.frombuffer(array("q", seq.output.tokens), dtype=torch.long).to(logits_V.device)
        logits = logits_V[seen_ids]
        factor = seq.sampling.repetition_penalty
        logits_V[seen_ids] = torch.where(logits > 0, logits / factor, logits * factor)


def _penalize(rows: Rows) -> None:
    """Apply frequency and presence penalties."""
    for logits_V, seq in rows:
        if counts := Counter(seq.output.generated):
            frequency, presence = seq.sampling.frequency_penalty, seq.sampling.presence_penalty
            penalties = [frequency * count + presence for count in counts.values()]
            logits_V[list(counts)] -= torch.tensor(penalties, dtype=logits_V.dtype, device=logits_V.device)


def _add_bias(rows: Rows) -> None:
    for logits_V, seq in rows:
        bias = seq.sampling.logit_bias
        logits_V[list(bias)] += torch.tensor(list(bias.values()), dtype=logits_V.dtype, device=logits_V.device)


def _process(rows: Rows) -> None:
    """Call plug-ins."""
    for logits_V, seq in rows:
        prompt, output = seq.output.tokens[: seq.output.num_prompt], seq.output.generated
        if error := apply_processors(seq.output.processors, prompt, output, logits_V):
            seq.output.fail(error)


def _mask_by_grammar(rows: Rows) -> None:
    if inside := [(logits_V, seq) for logits_V, seq in rows if seq.output.answer_start is not None]:
        apply_grammars(inside)


def _allow_listed(rows: Rows) -> None:
    for logits_V, seq in rows:
        ids = list(seq.sampling.allowed_token_ids)
        allowed = logits_V[ids]
        logits_V.fill_(float("-inf"))
        logits_V[ids] = allowed


def _mask_early_stops(rows: Rows) -> None:
    for logits_V, seq in rows:
        if seq.output.num_generated < seq.sampling.min_tokens and seq.output.stop_token_ids:
            _mask(logits_V, list(seq.output.stop_token_ids))


def _mask_bad_words(rows: Rows) -> None:
    for logits_V, seq in rows:
        output = seq.output.generated.tolist()
        ends = {word[-1] for word in seq.sampling.bad_words if output[len(output) - len(word) + 1 :] == list(word[:-1])}
        if ends:
            _mask(logits_V, sorted(ends))


def _force_reasoning(rows: Rows) -> None:
    """Force tokens that begin or close reasoning, and keep an output from ending before the part with a grammar."""
    for logits_V, seq in rows:
        token = seq.output.forced_token
        if token is not None:
            logits_V.fill_(float("-inf"))
            logits_V[token] = 0
        elif seq.output.constraint is not None and seq.output.answer_start is None and seq.output.stop_token_ids:
            _mask(logits_V, list(seq.output.stop_token_ids))


def _fail_without_tokens(rows: Rows) -> None:
    """End the requests whose logits processors have excluded all tokens, or all that their grammar allows."""
    for logits_V, seq in rows:
        has_others = seq.group is not None and seq is not seq.group.root  # beams, which may go on without this one
        if logits_V.max() == float("-inf") and not has_others:
            message = "the logits processors leave no token" + (
                " that the grammar allows" if seq.output.constraint else ""
            )
            seq.output.fail(BadRequest(message, kind="invalid_logits_processor", param="logits_processors"))


def _mask(logits_V: torch.Tensor, ids: list[int]) -> None:
    """Exclude tokens, unless no other one would be left."""
    before = logits_V[ids]
    logits_V[ids] = float("-inf")
    if logits_V.max() == float("-inf"):
        logits_V[ids] = before


LOGPROBS, BEAMS = (
    SharedFeature(("logprobs",)),
    SharedFeature(("beam_width",), takes_drafts=False),
)  # see `sampler.next_tokens`
SHARED = (  # in the order in which they change logits
    SharedFeature(("repetition_penalty",), _repeat_less),
    SharedFeature(("frequency_penalty", "presence_penalty"), _penalize),
    SharedFeature(("logit_bias",), _add_bias),
    SharedFeature(("logits_processors",), _process),
    SharedFeature(("grammar",), _mask_by_grammar),
    SharedFeature(("allowed_token_ids",), _allow_listed),
    SharedFeature(("min_tokens",), _mask_early_stops),
    SharedFeature(("bad_words",), _mask_bad_words),
    SharedFeature(("reasoning",), _force_reasoning),
    SharedFeature(("logits_processors",), _fail_without_tokens),
    LOGPROBS,
    BEAMS,
)
