"""Step rows: what is needed of a step's output, for each token that it computes. Plain Python."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.engine.sequence import Sequence


@dataclass
class StepRows:
    """Tokens of a step whose logits or hidden states are needed. Rows are positions in the flattened batch.

    Attributes:
        last: rows of the last tokens of all sequences that get a token by the step.
        sampled: these sequences, and those that share their prompt.
        sampled_from: index in `last` for each of them.
        scored: (sequence, position) of tokens of prompts whose log probabilities are due.
        before_scored: rows of the tokens before these, whose logits tell them.
        pooled: (sequence, row) of hidden states that count for embeddings.
        embedded: sequences whose embedding is complete after the step.
    """

    last: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    before_scored: list[int] = field(default_factory=list)
    pooled: list[tuple[Sequence, int]] = field(default_factory=list)
    embedded: list[Sequence] = field(default_factory=list)

    @classmethod
    def of(cls, num_scheduled_tokens: Mapping[Sequence, int]) -> "StepRows":
        """Return the rows of a step that computes a number of further tokens of each sequence."""
        rows, start = cls(), 0
        for seq, count in num_scheduled_tokens.items():
            rows._add(seq, range(start, start + count))
            start += count
        return rows

    def _add(self, seq: Sequence, rows: range) -> None:
        is_complete = len(rows) == seq.num_uncomputed
        if seq.scores_prompt:
            due = range(seq.num_computed + 1, min(seq.num_computed + len(rows) + 1, seq.num_prompt))
            self.scored += [(seq, position) for position in due]
            self.before_scored += rows[: len(due)]
        if seq.pooling is not None:
            self.pooled += [(seq, row) for row in _pooled_part(seq, rows)]
            self.embedded += [seq] if is_complete else []
        elif is_complete:
            self.sampled_from += [len(self.last)] * (1 + len(seq.siblings))
            self.sampled += [seq, *seq.siblings]
            self.last.append(rows[-1])


def _pooled_part(seq: Sequence, rows: range) -> range:
    """Return those rows of a sequence's next tokens whose hidden states count for its embedding."""
    assert seq.pooling is not None
    match seq.pooling.mode:
        case "last":
            return rows[-1:] if len(rows) == seq.num_uncomputed else rows[:0]
        case "cls":
            return rows[:1] if seq.num_computed == 0 else rows[:0]
    return rows
