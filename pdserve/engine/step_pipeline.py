"""Step pipeline: launches a decode step before the tokens of the last one are read, so that no GPU waits for Python.

    step n        launch step n + 1 with the tokens of step n, which only the device knows; then read the tokens of step n
    step n + 1    launch step n + 2; read the tokens of step n + 1; …

vLLM calls this asynchronous scheduling. Here the scheduler decides as ever, and a launched step counts only where the
schedule turns out to be what it assumed: a row whose sequence has ended meanwhile, was preempted, or got another token is
dropped. Its KV does no harm, since it lies behind all tokens that have KV, where the next one to be computed overwrites it.
Sequences that come to decode while a step is in flight take part in the one after it.

Nothing is launched ahead of a step in which some sequence computes its prompt, or needs more than its logits to sample.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Accepted, StepOutcome, StepPlan


class Sampled(Protocol):
    """Tokens that a device samples.

    Attributes:
        undecided: rows whose token the device could not tell, and only `read` has.
    """

    undecided: list[int]

    def read(self) -> list[int]:
        """Wait for the tokens, and return them."""


class Runner(Protocol):
    """A runner of steps, as `ModelRunner`, which describes both methods."""

    def step(self, plan: StepPlan) -> StepOutcome: ...

    def launch(self, seqs: list[Sequence], last: Any, rows: SequenceABC[int]) -> Sampled: ...


@dataclass
class _LaunchedStep:
    """A step in flight.

    Attributes:
        seqs: in the order of its rows.
        positions: of the token that it computes for each of them.
        blocks: to which it writes their KV.
        fed: the tokens that it computes, once they are known; -1 where none is, since the device could not tell it.
    """

    seqs: list[Sequence]
    positions: list[int]
    blocks: list[list[int]]
    sampled: Sampled
    fed: list[int] = field(default_factory=list)

    def rows_of(self, scheduled: dict[Sequence, int]) -> dict[Sequence, int]:
        """Return the rows of the scheduled sequences whose step this is."""
        return {seq: row for row, seq in enumerate(self.seqs) if scheduled.get(seq) == 1 and self._holds(row)}

    def _holds(self, row: int) -> bool:
        seq, position = self.seqs[row], self.positions[row]
        is_next = seq.kv.num_computed == position == len(seq) - 1 and seq.output.tokens[position] == self.fed[row]
        return is_next and _blocks_at(seq, position) == self.blocks[row]


class StepPipeline:
    """Runs the steps of an engine, one of them ahead where that can be.

    Attributes:
        num_launched: steps launched ahead.
        num_dropped_rows: rows of these that no schedule asked for.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launched: _LaunchedStep | None = None
        self.num_launched = 0
        self.num_dropped_rows = 0

    def step(self, plan: StepPlan) -> StepOutcome:
        """Compute what a step plans, or some of its sequences, at least one.

        Returns:
            As `ModelRunner.step` does, of what was computed.
        """
        current, rows = self._take(plan.counts)
        if not (plan.counts and all(_decodes(seq, count) for seq, count in plan.counts.items())) or plan.drafts:
            for seq in rows:  # in flight without drafts
                plan.drafts.pop(seq, None)
            tokens = current.sampled.read() if current is not None else []
            sampled = {seq: Accepted(1, [tokens[row]]) for seq, row in rows.items()}
            rest = replace(plan, counts={seq: count for seq, count in plan.counts.items() if seq not in rows})
            computed = sampled | self._runner.step(rest)
            return {seq: computed[seq] for seq in (*plan.counts, *computed)}
        if current is None:
            current = self._launch([*plan.counts])
            rows = {seq: row for row, seq in enumerate(plan.counts)}
        joining = [seq for seq in plan.counts if seq not in rows]
        self._launched = self._launch_after(current, rows, joining)
        tokens = current.sampled.read()
        if self._launched is not None:
            known = [-1 if row in current.sampled.undecided else token for row, token in enumerate(tokens)]
            fed = [known[rows[seq]] if seq in rows else seq.output.tokens[-1] for seq in self._launched.seqs]
            self._launched.fed = fed
        return {seq: Accepted(1, [tokens[row]]) for seq, row in rows.items()}

    def _take(self, scheduled: dict[Sequence, int]) -> tuple[_LaunchedStep | None, dict[Sequence, int]]:
        """Take the step in flight, and return it with the rows that the schedule asks for; None if it asks for none."""
        launched, self._launched = self._launched, None
        rows = launched.rows_of(scheduled) if launched is not None else {}
        self.num_dropped_rows += len(launched.seqs) - len(rows) if launched is not None else 0
        return launched if rows else None, rows

    def _launch_after(
        self, current: _LaunchedStep, rows: dict[Sequence, int], joining: list[Sequence]
    ) -> _LaunchedStep | None:
        """Launch the step after the current one, unless none will follow, or some sequence has no block for its token yet."""
        ahead = [seq for seq in rows if not seq.output.awaits_last_token]
        if not (ahead or joining) or any(len(seq) // seq.kv.block_size >= len(seq.kv.block_ids) for seq in ahead):
            return None
        self.num_launched += 1
        return self._launch([*ahead, *joining], current.sampled, [rows[seq] for seq in ahead])

    def _launch(self, seqs: list[Sequence], last: Sampled | None = None, rows: SequenceABC[int] = ()) -> _LaunchedStep:
        positions = [seq.kv.num_computed + (i < len(rows)) for i, seq in enumerate(seqs)]
        blocks = [*map(_blocks_at, seqs, positions)]
        return _LaunchedStep(seqs, positions, blocks, self._runner.launch(seqs, last, rows))


def _blocks_at(seq: Sequence, position: int) -> list[int]:
    """Return the blocks of a token, of each group of layers."""
    index = position // seq.kv.block_size
    return [seq.kv.block_ids[index], *(tail.ids[index] for tail in seq.kv.tails)]


def _decodes(seq: Sequence, count: int) -> bool:
    """Return whether a step only appends a token to this sequence, and needs nothing but logits for that."""
    return count == seq.kv.num_uncomputed == 1 and not (seq.features or seq.siblings)
