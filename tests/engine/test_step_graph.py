"""A decode step played from its tape gives the logits of the model, to the last bit, or the model is asked."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import step_graph
from pdserve.engine.engine import Engine
from pdserve.engine.step_graph import PATIENCE, StepGraphs
from pdserve.kernels import cpu
from pdserve.kernels.batch import PagedBatch
from pdserve.request import SamplingParams

if not cpu.can_build():
    pytest.skip("no C++ kernels", allow_module_level=True)


def decoded(engine: Engine, counts: list[int]) -> list[torch.Tensor]:
    """The logits of all steps, of sequences that end one after the other."""
    logits: list[torch.Tensor] = []
    forward = engine.runner.forward

    def kept(*args: Any) -> torch.Tensor:
        logits.append(forward(*args).clone())
        return logits[-1]

    setattr(engine.runner, "forward", kept)  # noqa: B010 - mypy takes no assignment to a method
    seqs = [
        engine.new_sequence(
            str(i), list(range(7 + 5 * i)), SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        )
        for i, count in enumerate(counts)
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.finish_reason() is not None:
                engine.remove(seq)
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe"])
def test_engines_with_and_without_tapes_have_the_same_logits(
    architecture: str, dtype: str, checkpoint: Callable[..., Path]
) -> None:
    def engine() -> Engine:
        return Engine(EngineConfig(model=str(checkpoint(architecture)), dtype=dtype, kernel="cpu", num_blocks=40))

    counts = [3 * PATIENCE, 6 * PATIENCE, 9 * PATIENCE]
    plain, taped = engine(), engine()
    assert plain.runner.graphs is not None and taped.runner.graphs is not None
    plain.runner.graphs = None
    for expected, logits in zip(decoded(plain, counts), decoded(taped, counts), strict=True):
        assert torch.equal(expected, logits)
    assert taped.runner.graphs.verified == {1, 2, 3}
    assert taped.runner.graphs.num_replayed > 4 * PATIENCE, "all but the first few of each size"


@pytest.fixture
def batch() -> PagedBatch:
    zeros = torch.zeros(1, dtype=torch.long)
    return PagedBatch(torch.zeros(1, 1, 2, 1, 16, 8), zeros, zeros[None], [1], [1], zeros + 1, cpu)


class Model:
    """Counts its calls; `compute` says what it does with ids and positions."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.compute = compute
        self.calls = 0

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        self.calls += 1
        return self.compute(ids, positions)


def run(model: Model, graphs: StepGraphs, batch: PagedBatch, steps: int = 40) -> int:
    """Steps over rising positions, each compared with the model; how many of them the model itself was asked."""
    model.calls = 0
    for step in range(steps):
        ids, positions = torch.tensor([[step % 7]]), torch.tensor([[step]])
        assert torch.equal(graphs.logits(ids, positions, batch), model.compute(ids, positions)), step
    return model.calls


WEIGHT = torch.randn(7, 5)


def plain(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = WEIGHT[ids[0]] + positions[0, :, None]
    best, places = rows.topk(3)
    total = torch.zeros(1, 5).scatter_add_(1, places, best.exp_())
    halves = torch.empty_like(total).copy_(total).split(2, dim=1)
    return torch.cat([half.cos() for half in halves], dim=1)


def branching(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) if positions.max() < 20 else -plain(ids, positions)


def reading(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * positions.max().item()


def selecting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(9)[torch.arange(9) > ids[0, 0]].sum()[None, None]


def listing(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * (1 + int(positions.tolist()[0][0]) // 20)


def converting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * (1 + int(positions.numpy()[0, 0]) // 20)


@pytest.mark.parametrize(
    ("compute", "asked"),
    [
        (plain, PATIENCE + 1),
        (branching, PATIENCE + 1 + 20),
        (reading, 40),
        (selecting, 36),  # the others select another number
        (listing, 40),
        (converting, 40),
    ],
)
def test_what_python_is_told_of_values_decides(compute: Any, asked: int, batch: PagedBatch) -> None:
    model = Model(compute)
    graphs = StepGraphs(model, most_blocks=4)
    assert run(model, graphs, batch) == asked
    assert graphs.num_replayed == 40 - asked


def test_a_model_that_changes_is_found_out(batch: PagedBatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda ids, positions: plain(ids, positions) * min(model.calls, PATIENCE + 1))
    graphs = StepGraphs(model, most_blocks=4)
    with caplog.at_level(logging.WARNING):
        assert run(model, graphs, batch) == 40
    assert sum("other logits" in record.message for record in caplog.records) == 1


def test_tapes_keep_to_their_memory(batch: PagedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda ids, positions: (ids * WEIGHT[0, 0] + positions)[0][:, None])
    graphs = StepGraphs(model, most_blocks=4)

    def step(size: int) -> None:
        zeros = torch.zeros(size, dtype=torch.long)
        rows = PagedBatch(batch.pool_NL2GBD, zeros, zeros[:, None], [1] * size, [1] * size, zeros + 1, cpu)
        ids, positions = torch.arange(size)[None], torch.full((1, size), 3)
        assert torch.equal(graphs.logits(ids, positions, rows), model.compute(ids, positions))

    for size in (8, 9, 10):
        for _ in range(PATIENCE + 2):
            step(size)
    assert graphs.verified == {8, 9, 10}
    monkeypatch.setattr(step_graph, "MOST_BYTES", graphs.nbytes)
    step(8)
    for _ in range(PATIENCE + 2):
        step(11)
    assert graphs.verified == {8, 11}, "those used last"
    assert graphs.nbytes <= step_graph.MOST_BYTES
