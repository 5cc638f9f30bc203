"""Step pipeline: the tokens are those of steps one after the other, and each step is launched before the last one is read."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine import sampler
from pdserve.engine.engine import Engine
from pdserve.engine.features import features_of
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.errors import SetupError
from pdserve.keys import token_array
from pdserve.request import Request, SamplingParams

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
BLOCK = 4
ROOMY: dict[str, Any] = {"num_blocks": 400}
TIGHT: dict[str, Any] = {"num_blocks": 24, "max_model_len": 200}
TIGHTER = TIGHT | {"num_blocks": 16}  # for a model with windows, which needs fewer


class Launched:
    """Tokens of a step of `RecordingRunner`: 1, 2, 3 … by the number of the step."""

    def __init__(self, number: int, count: int, log: list[str]) -> None:
        self.number, self._count, self._log = number, count, log
        self.undecided: list[int] = []

    def read(self) -> list[int]:
        self._log.append(f"read {self.number}")
        return [self.number] * self._count


class RecordingRunner:
    """Writes down what it is asked, as `launch 2: b, a after 1` for the second step, in which `a` computes its last token."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.launched: list[Launched] = []
        self.on_layer: Callable[[int], None] | None = None  # of the newest step

    def step(self, plan: StepPlan) -> StepOutcome:
        self.on_layer = plan.on_layer
        work = ", ".join(f"{seq.request_id} {count}" for seq, count in plan.counts.items())
        self.log.append(f"step: {work}")
        return plan.outcome([(seq, 99, None) for seq in plan.rows().sampled])

    def launch(self, seqs: list[Sequence], last: Any, rows: SequenceABC[int]) -> Launched:
        names = [seq.request_id + (f" after {last.number}" if i < len(rows) else "") for i, seq in enumerate(seqs)]
        self.launched.append(Launched(len(self.launched) + 1, len(seqs), self.log))
        self.log.append(f"launch {len(self.launched)}: {', '.join(names)}")
        return self.launched[-1]


def decoding(name: str, max_tokens: int = 9, **settings: Any) -> Sequence:
    """Return a sequence that is about to compute its third token, and has blocks for six more."""
    sampling = SamplingParams(max_tokens=max_tokens, **settings)
    tokens, blocks, features = token_array([7, 7, 0]), block_table([5, 6]), features_of(sampling, 2)
    return Sequence.new(name, tokens, 2, 2, sampling, b"", BLOCK, block_ids=blocks, num_computed=2, features=features)


def run_step(pipeline: StepPipeline, *seqs: Sequence) -> dict[str, int]:
    """Run a step as the engine does, and return the new tokens."""
    outcome = pipeline.step(StepPlan({seq: seq.kv.num_uncomputed for seq in seqs}))
    for seq, accepted in outcome.items():
        seq.kv.mark_computed(accepted.computed)
        seq.output.extend(accepted.tokens)
    return {seq.request_id: token for seq, accepted in outcome.items() for token in accepted.tokens}


def test_each_step_is_launched_before_the_last_one_is_read() -> None:
    runner = RecordingRunner()
    pipeline, a, b = StepPipeline(runner), decoding("a", 4), decoding("b", 3)
    assert [run_step(pipeline, a, b), run_step(pipeline, a, b), run_step(pipeline, a)] == [
        {"a": 1, "b": 1},
        {"a": 2, "b": 2},
        {"a": 3},
    ]
    assert runner.log == [
        "launch 1: a, b",
        *("launch 2: a after 1, b after 1", "read 1"),
        *("launch 3: a after 2", "read 2"),  # b has three tokens then, as many as it may
        "read 3",
    ]
    assert (pipeline.num_launched, pipeline.num_dropped_rows) == (2, 0)


def test_sequences_join_the_step_after_the_one_in_flight() -> None:
    runner = RecordingRunner()
    pipeline, a, b = StepPipeline(runner), decoding("a"), decoding("b")
    run_step(pipeline, a)
    assert run_step(pipeline, a, b) == {"a": 2}
    assert run_step(pipeline, a, b) == {"a": 3, "b": 3}
    assert runner.log[3:5] == ["launch 3: a after 2, b", "read 2"] and pipeline.num_dropped_rows == 0


@pytest.mark.parametrize(
    "other", [{"repetition_penalty": 2.0}, {"logprobs": 1}, {"bad_words": ((3,),)}, {"min_tokens": 1}], ids=str
)
def test_beside_prompts_and_other_sampling_nothing_is_launched(other: dict[str, Any]) -> None:
    runner = RecordingRunner()
    pipeline, a, b = StepPipeline(runner), decoding("a"), decoding("b", **other)
    run_step(pipeline, a)
    assert run_step(pipeline, a, b) == {"a": 2, "b": 99}
    prompt = Sequence.new(
        "prompt", token_array([1] * 5), 5, 5, SamplingParams(), b"", BLOCK, block_ids=block_table([1, 2])
    )
    assert run_step(pipeline, a, prompt) == {"a": 99, "prompt": 99}
    assert runner.log[2:] == ["read 1", "read 2", "step: b 1", "step: a 1, prompt 5"]
    assert (pipeline.num_launched, pipeline.num_dropped_rows) == (1, 0)


def test_a_step_beside_the_one_in_flight_tells_of_its_layers() -> None:
    """So its blocks are stored while it is computed."""
    runner, layers = RecordingRunner(), list[int]()
    pipeline, a = StepPipeline(runner), decoding("a")
    run_step(pipeline, a)
    prompt = Sequence.new(
        "prompt", token_array([1] * 5), 5, 5, SamplingParams(), b"", BLOCK, block_ids=block_table([1, 2])
    )
    pipeline.step(StepPlan({a: 1, prompt: 5}, on_layer=layers.append))
    assert runner.log[-1] == "step: prompt 5" and runner.on_layer == layers.append


@pytest.mark.parametrize(
    "change",
    [
        lambda seq: seq.kv.block_ids.__setitem__(0, 9),
        lambda seq: seq.output.tokens.__setitem__(3, 3),
        lambda seq: (seq.output.tokens.append(1), seq.kv.mark_computed(1)),
        lambda seq: seq.output.tokens.append(1),
    ],
    ids=["its KV was moved", "another token", "computed meanwhile", "more to compute"],
)
def test_a_row_that_is_not_what_was_assumed_is_dropped(change: Callable[[Sequence], object]) -> None:
    runner = RecordingRunner()
    pipeline, a, b = StepPipeline(runner), decoding("a"), decoding("b")
    run_step(pipeline, a, b)
    change(b)
    pipeline.step(StepPlan({a: 1, b: 1}))
    assert pipeline.num_dropped_rows == 1
    assert runner.log[3:] in (["launch 3: a after 2, b", "read 2"], ["read 2", "step: b 1"])
    pipeline.step(StepPlan())
    assert pipeline.num_dropped_rows == (3 if len(runner.launched) > 2 else 1), "those of a step that nothing asks for"


def test_a_step_that_was_launched_without_a_token_is_dropped() -> None:
    """The device could not sample the token, so that it was not there for the step that should compute it."""
    runner = RecordingRunner()
    pipeline, a, b = StepPipeline(runner), decoding("a"), decoding("b")
    run_step(pipeline, a, b)
    runner.launched[1].undecided = [0]
    assert run_step(pipeline, a, b) == {"a": 2, "b": 2}
    assert run_step(pipeline, a, b) == {"b": 3}
    assert runner.log[-2:] == ["launch 4: b after 3, a", "read 3"] and pipeline.num_dropped_rows == 1


def test_nothing_is_launched_without_a_block_for_it() -> None:
    runner = RecordingRunner()
    pipeline, a = StepPipeline(runner), decoding("a")
    a.kv.block_ids.pop()
    assert [run_step(pipeline, a), run_step(pipeline, a)] == [{"a": 1}, {"a": 2}]
    assert runner.log == ["launch 1: a", "launch 2: a after 1", "read 1", "read 2"]


def run(
    engine: Engine, prompts: list[list[int]], sampling: SequenceABC[SamplingParams], every: int = 3
) -> list[list[int]]:
    """Return the outputs of requests of which one arrives every few steps."""
    seqs = [
        engine.new_sequence(str(i), Request(prompt=p, sampling=s))
        for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
    arriving = seqs[:]
    for step in range(10_000):
        if arriving and step % every == 0:
            engine.add(arriving.pop(0))
        result = engine.step()
        for seq in result.sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
        engine.pool.check_integrity()
        if not arriving and not engine.has_work:
            break
    assert engine.pool.num_held == 0
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


def pipelined_engine(path: Path, **settings: Any) -> tuple[Engine, StepPipeline]:
    engine = Engine(EngineConfig(model=str(path), async_scheduling="on", **settings))
    assert engine.runner.pipeline is not None
    return engine, engine.runner.pipeline


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", ROOMY),
        ("llama", TIGHT),
        ("gemma2", TIGHTER),
        pytest.param("gemma2", ROOMY, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ROOMY, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", TIGHT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_generate(
    architecture: str,
    settings: dict[str, Any],
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
) -> None:
    """With recorded steps, with prompts that join, and in a small pool with preemptions."""
    path = checkpoint(architecture)
    prompts = [p for p in prompts if 30 < len(p) <= 100]
    engine, pipeline = pipelined_engine(path, max_num_batched_tokens=64, **settings)
    sampling = [SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)] * len(prompts)
    for _ in range(2):
        assert run(engine, prompts, sampling, every=6) == generate(path, prompts, 32)
    assert pipeline.num_launched > 20
    assert (engine.scheduler.num_preemptions > 0) == (engine.pool.num_blocks < 100)


@pytest.mark.parametrize("kernel", ["own", "reference"])
def test_sampling_is_that_of_steps_one_by_one(
    kernel: str, checkpoint: Callable[..., Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each token is left to the reference, so that every launched step is in vain."""
    if kernel == "reference":
        monkeypatch.setattr(sampler, "_draw_function", lambda logits_SV: None)
    path = checkpoint("llama")
    prompts = prompts[:8]
    sampling = [
        SamplingParams(
            max_tokens=24,
            temperature=0.0 if i == 3 else 1.0,
            top_k=5 * (i % 2),
            seed=i,
            stop_token_ids=tuple(range(0, 250, 9)),
            presence_penalty=2.0 * (i == 5),
        )
        for i in range(len(prompts))
    ]
    engine, pipeline = pipelined_engine(path, num_blocks=400)
    expected = run(Engine(EngineConfig(model=str(path), num_blocks=400)), prompts, sampling)
    assert run(engine, prompts, sampling) == expected
    assert len({len(output) for output in expected}) > 2, "some end by a stop token"
    assert pipeline.num_launched > 5
    assert pipeline.num_dropped_rows > 5 or kernel == "own"


def test_only_one_device_launches_ahead(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    assert Engine(EngineConfig(model=str(path), num_blocks=8)).runner.pipeline is None, "auto, on a CPU"
    with pytest.raises(
        SetupError, match="--async-scheduling on is not supported with --tensor-parallel-size; use auto or off"
    ):
        ModelRunner(
            Engine(EngineConfig(model=str(path), num_blocks=8)).checkpoint,
            EngineConfig(model=str(path), num_blocks=8, tensor_parallel_size=2, async_scheduling="on"),
        )
