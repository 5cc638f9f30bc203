"""Engine whose steps only take virtual time, and sample what a script says: what speculation gains there is counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.config import EngineConfig
from pdserve.costs import Costs, Work
from pdserve.engine.engine import Engine
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.keys import Layout
from pdserve.request import Request, SamplingParams

LAYOUT = Layout(
    model_fingerprint="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="uint8", itemsize=1
)
Answers = Mapping[str, list[int]]  # by request id


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def take(self, seconds: float) -> None:
        self.seconds += seconds


class _Scripted(PacedRunner):
    answers: Answers

    def step(self, plan: StepPlan) -> StepOutcome:
        super().step(plan)
        rows = plan.rows()
        sampled = zip(rows.sampled, rows.ahead, strict=True)
        return plan.outcome(
            (seq, self.answers[seq.request_id][seq.output.num_generated + at], None) for seq, at in sampled
        )


@dataclass
class Played:
    """Time, tokens and drafts of some answers.

    Attributes:
        seconds: virtual ones.
        tokens: of each step, of all sequences.
        drafts: (tokens drafted, tokens accepted) of each draft.
    """

    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)


def make_engine(costs: Costs, answers: Answers, clock: Clock) -> Engine:
    """Return an engine without a drafter; its steps take what the costs say."""

    def seconds(work: Work) -> float:
        decoding = sum(count == 1 for count, _ in work)
        prompts = sum(count for count, _ in work if count > 1)
        return costs.step_seconds(decoding, 0) + costs.prefill[1] * prompts

    settings: dict[str, Any] = {"num_blocks": 4000, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    config = EngineConfig(model="model", speculate="off", **settings)
    runner = _Scripted(config, LAYOUT, 8000, seconds, lambda blocks: 0.0, clock.take, block_bytes=1)
    runner.answers = answers
    engine = Engine(config, runner=runner)
    engine.scheduler.costs = costs
    return engine


def play(engine: Engine, clock: Clock, prompts: Answers, answers: Answers, batch: int) -> Played:
    """Run all requests, `batch` at a time."""
    played, names = Played(), [*answers]
    for first in range(0, len(names), batch):
        for name in names[first : first + batch]:
            sampling = SamplingParams(temperature=0, max_tokens=len(answers[name]), ignore_eos=True)
            engine.add(engine.new_sequence(name, Request(prompt=prompts[name], sampling=sampling)))
        for seq in finished(engine, played):
            assert [*seq.output.generated] == answers[seq.request_id]
    played.seconds = clock()
    return played


def finished(engine: Engine, played: Played) -> Iterator[Sequence]:
    """Run all requests that an engine has, and note what each step computes. Yields each sequence that has ended."""
    while engine.has_work:
        result = engine.step()
        played.tokens.append(result.num_tokens)
        played.drafts += result.drafted
        for seq in result.sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
                yield seq
