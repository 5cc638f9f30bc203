"""Step: what the model computes in one run, and what comes of it. Plain Python.

    Scheduler ─► StepPlan ─► runner ─► StepOutcome ─► sequences, roles

A plan may have drafts, tokens that a drafter expects to follow. The step computes them too, and samples behind each: those
that the model samples itself are accepted, with the token behind the last of them. The output is what it is without drafts.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Set
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pdserve.engine.sequence import Feature, Sequence
from pdserve.request import Tenant, TokenLogprobs


class Accepted(msgspec.Struct, gc=False):
    """Outcome of a step for one sequence.

    Attributes:
        computed: number of further tokens that have KV now, accepted drafts included.
        tokens: that follow it. None while its prompt is not complete; several if drafts were accepted, of which all but
            the last have KV.
        logprobs: of these tokens, if the request asks for them.
        finish_reason: why the last of them ends the sequence; None if it does not.
        num_drafts: how many the step had of it. All of `tokens` but the last are such, then.
        num_predicted: the same, if they are of the answer that the client has predicted; else 0.
    """

    computed: int = 0
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    num_drafts: int = 0
    num_predicted: int = 0

    def cut_at_end(self, seq: Sequence) -> None:
        """Drop the tokens behind one that ends the sequence, which has none of them yet."""
        for count, token in enumerate(self.tokens[:-1], 1):
            if seq.output.ends_with(token, seq.output.num_generated + count):
                self.computed -= len(self.tokens) - count
                del self.tokens[count:], self.logprobs[count:]
                return  # another such token may be among those dropped


StepOutcome = dict[Sequence, Accepted]  # what was computed of a plan, and the sequences that share its prompts


@dataclass
class StepPlan:
    """Work of one step: the tokens that the model computes, by sequence, in batch order.

    Attributes:
        counts: of each sequence, the number of further tokens, the first one without KV first.
        drafts: tokens that are computed behind those of some sequences. Such a sequence only decodes.
        predicted: sequences whose drafts are of the answer that the client has predicted.
        limited: tenants that have more work than their share of the step has room for.
        on_layer: see `PagedBatch`.
    """

    counts: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    on_layer: Callable[[int], None] | None = None
    predicted: set[Sequence] = field(default_factory=set)
    limited: Set[Tenant] = frozenset()

    def num_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence the step computes."""
        return self.counts[seq] + len(self.drafts.get(seq, ()))

    def takes_drafts(self, seq: Sequence) -> bool:
        """Return whether drafts may be added to a sequence. They would take time that its tenant does not have."""
        return seq.takes_drafts and seq.tenant not in self.limited

    def work(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return (tokens to compute, tokens before them) of each row: drafts are rows of their own, as if each decoded."""
        first = seq.kv.num_computed
        if seq not in self.drafts:
            return [(self.counts[seq], first)]
        return [(1, first + ahead) for ahead in range(len(self.drafts[seq]) + 1)]

    def by_row(self, counts: Mapping[Sequence, int]) -> list[int]:
        """Return a count for each row of `work`, of all sequences: those given at the first row of a sequence, else 0."""
        return [
            counts.get(seq, 0) if not ahead else 0
            for seq in self.counts
            for ahead in range(len(self.drafts.get(seq, ())) + 1)
        ]

    def rows(self) -> "StepRows":
        """Return which rows of the step's output are needed."""
        rows, start = StepRows(), 0
        for seq, count in self.counts.items():
            drafts = len(self.drafts.get(seq, ()))
            rows.add(seq, range(start, start + count), drafts)
            start += count + drafts
        return rows

    def outcome(self, sampled: Iterable[tuple[Sequence, int, TokenLogprobs | None]]) -> StepOutcome:
        """Return what comes of the step.

        Args:
            sampled: sequence and token of each row that was sampled, in the order of `StepRows.sampled`, with its log
                probabilities if they are asked for.
        """
        outcome = dict(zip(self.counts, map(Accepted, self.counts.values()), strict=True))
        for seq, token, of_token in sampled:
            accepted = outcome.get(seq)
            if accepted is None:
                accepted = outcome[seq] = Accepted()  # it shares the prompt of another
            elif accepted.tokens:
                if self.drafts[seq][len(accepted.tokens) - 1] != accepted.tokens[-1]:
                    continue
                accepted.computed += 1
            accepted.tokens.append(token)
            if of_token is not None:
                accepted.logprobs.append(of_token)
        return outcome


class Drafter(Protocol):
    """Proposes tokens that the model may be about to sample.

    Attributes:
        rest: how many of the next steps it need not be asked about.
        followed: the sequences of whose end it is told.
        counters: of `pdserve.counters`, by series.
        seconds: of the last proposal, which the cost model of steps leaves out.
    """

    rest: int = 0
    followed: Container[Sequence] = ()
    counters: Mapping[str, float] = {}
    seconds: float = 0.0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, SequenceABC[int]]:
        """Return the tokens that may follow some sequences of a plan that take drafts (`StepPlan.takes_drafts`)."""

    def end(self, seq: Sequence) -> None:
        """Learn that a followed sequence is over here, finished or not."""
        return None


@dataclass
class StepRows:
    """Tokens of a step whose logits or hidden states are needed. Rows are positions in the flattened batch.

    Attributes:
        last: rows of the last tokens of all sequences that get a token by the step, and of their drafts.
        sampled: the sequence of each of these rows, and those that share its prompt.
        sampled_from: index in `last` for each of `sampled`.
        ahead: number of drafts before each of `sampled`.
        read: rows whose logits features read, of some sequences.
        hidden: rows whose hidden states they read.
        completed: those that have all they need after the step, in place of an output.
    """

    last: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    read: list[tuple[Feature, Sequence, range]] = field(default_factory=list)
    hidden: list[tuple[Feature, Sequence, range]] = field(default_factory=list)
    completed: list[tuple[Feature, Sequence]] = field(default_factory=list)

    def add(self, seq: Sequence, rows: range, num_drafts: int) -> None:
        """Add what is needed of a sequence's next tokens, in `rows`, and of the drafts behind them."""
        is_complete, has_output = len(rows) == seq.kv.num_uncomputed, True
        for feature in seq.features:
            if part := feature.logits_rows(seq, len(rows)):
                self.read.append((feature, seq, rows[part.start : part.stop]))
            if part := feature.hidden_rows(seq, len(rows)):
                self.hidden.append((feature, seq, rows[part.start : part.stop]))
            if not feature.has_output:
                has_output = False
                self.completed += [(feature, seq)] if is_complete else []
        if is_complete and has_output:
            for ahead in range(num_drafts + 1):
                self.sampled_from += [len(self.last)] * (1 + len(seq.siblings))
                self.sampled += [seq, *seq.siblings]
                self.ahead += [ahead] * (1 + len(seq.siblings))
                self.last.append(rows[-1] + ahead)


@dataclass
class SchedulerOutput:
    """Work of the next step.

    Attributes:
        plan: what the model computes.
        block_copies: (source, target) blocks to copy first, in order: a sequence is about to write to a shared block.
        preempted: sequences that lost their blocks.
        paused: sequences that lost their slots to another tenant, and keep their blocks.
        resumed: preempted sequences that have blocks again and whose KV may be in the store. They are in no queue until
            their owner adds them again.
        swap_out, swap_in: (block, host block) pairs to copy, before and after `block_copies`. Never both in one step.
        storing_paused: whether sequences whose KV is stored as it is computed were left out.
        late: sequences that wait for the masks of their grammars.
        left_out: sequences that the step must not have, for either reason.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    storing_paused: bool = False
    late: set[Sequence] = field(default_factory=set)
    left_out: set[Sequence] = field(default_factory=set)
