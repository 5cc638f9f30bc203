"""Logits features: what changes the logits of some sequences before they are sampled, each in the rows that need it.

A sequence has the features that its request asks for, most have none, and a step calls only those that some sequence has. A
new feature is a function here and a line in `FEATURES`.

Shape legend: R rows of the sequences that have a feature, V vocabulary.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.engine.grammar import apply_grammars
from pdserve.engine.sequence import Sequence
from pdserve.errors import BadRequest
from pdserve.logits_processors import apply_processors

Rows = list[tuple[torch.Tensor, Sequence]]  # views [V] of rows of the logits, and whose they are


@dataclass(frozen=True)
class Feature:
    """One way in which logits are changed.

    Attributes:
        is_wanted: whether a sequence has it.
        apply: changes the logits of the rows of sequences that have it, in place.
    """

    is_wanted: Callable[[Sequence], bool]
    apply: Callable[[Rows], None]


def apply_features(logits_SV: torch.Tensor, seqs: list[Sequence]) -> None:
    """Change logits in place by all features of the sequences; logits_SV[i] belongs to seqs[i]."""
    rows = [(logits_SV[i], seq) for i, seq in enumerate(seqs) if not seq.needs_only_logits]
    for feature in FEATURES:
        if wanted := [(logits_V, seq) for logits_V, seq in rows if feature.is_wanted(seq)]:
            feature.apply(wanted)


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
        if logits_V.max() == float("-inf"):
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


FEATURES = (  # in the order in which they are applied
    Feature(lambda seq: seq.sampling.repetition_penalty != 1, _repeat_less),
    Feature(lambda seq: bool(seq.sampling.frequency_penalty or seq.sampling.presence_penalty), _penalize),
    Feature(lambda seq: bool(seq.sampling.logit_bias), _add_bias),
    Feature(lambda seq: bool(seq.output.processors), _process),
    Feature(lambda seq: seq.output.constraint is not None and seq.output.answer_start is not None, apply_grammars),
    Feature(lambda seq: bool(seq.sampling.allowed_token_ids), _allow_listed),
    Feature(lambda seq: seq.sampling.min_tokens > 0, _mask_early_stops),
    Feature(lambda seq: bool(seq.sampling.bad_words), _mask_bad_words),
    Feature(lambda seq: seq.sampling.reasoning is not None, _force_reasoning),
    Feature(lambda seq: bool(seq.sampling.logits_processors), _fail_without_tokens),
)
