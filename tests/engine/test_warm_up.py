"""Warm-up: enough probes to fit the cost model, and no trace in the pool."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.costs import CostMeter
from pdserve.engine import warm_up as module
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from pdserve.engine.warm_up import MIN_PROBES, compile_kernels, warm_up


@pytest.fixture(autouse=True)
def all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an instance: other tests have few."""
    monkeypatch.setitem(module.EXTRA_PROBES_S, "cpu", 0.3)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 64},
        {"num_blocks": 2},
        {"num_blocks": 2, "block_size": 2},
        {"num_blocks": 2, "block_size": 1},
        {"num_blocks": 64, "max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"num_blocks": 64, "max_model_len": 1000, "max_num_seqs": 500},
    ],
)
def test_probes_fit_into_any_pool(settings: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), **settings))
    probes = list(warm_up(engine))
    assert len(probes) >= MIN_PROBES
    for work, seconds in probes:
        assert seconds > 0 and 1 <= len(work) <= engine.scheduler.max_num_seqs
        assert sum(count for count, _ in work) <= engine.scheduler.max_num_batched_tokens
        assert all(count >= 1 and before >= 0 and count + before <= engine.max_model_len for count, before in work)
    engine.pool.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks and not engine.has_work


def test_kernels_of_sampling_are_compiled_too(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first request with a temperature would wait for a compiler, and all streams beside it."""
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=64))
    step, temperatures = engine.runner.step, set[float]()

    def seen(plan: StepPlan) -> object:
        temperatures.update(seq.sampling.temperature for seq in plan.counts)
        return step(plan)

    monkeypatch.setattr(engine.runner, "step", seen)
    compile_kernels(engine)
    assert temperatures == {0, 1}


def test_probes_calibrate_the_cost_model(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a simulated clock that advances 10 ms per step and 1 ms per token."""
    now = 0.0
    engine, meter = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=64)), CostMeter()
    step = engine.runner.step

    def timed(plan: StepPlan) -> object:
        nonlocal now
        now += 0.01 + 0.001 * sum(plan.counts.values())
        return step(plan)

    monkeypatch.setattr(engine.runner, "step", timed)
    monkeypatch.setattr(engine.runner, "clock", lambda: now)
    for work, seconds in warm_up(engine):
        meter.calibrate_step(work, seconds)
    costs = meter.costs(0.0)
    for tokens in (16, 128, 1000):
        assert costs.prefill_seconds(tokens) == pytest.approx(0.01 + 0.001 * tokens, rel=0.02)
    for batch in (1, 8):
        assert costs.step_seconds(batch, 16 * batch) == pytest.approx(0.01 + 0.001 * batch, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_gpus_all_kernels_are_compiled_before_a_step_is_measured(
    device: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=64))
    step, calls = engine.runner.step, list[str]()

    def recorded(plan: StepPlan) -> object:
        calls.append("step")
        return step(plan)

    monkeypatch.setattr(engine.runner, "step", recorded)
    monkeypatch.setattr(engine, "checkpoint", SimpleNamespace(device=torch.device(device)))
    monkeypatch.setattr(module, "compile_kernels", lambda engine: calls.append("compile"))
    probes = list(warm_up(engine))
    assert calls == ["compile"] * (device == "cuda") + ["step"] * 2 * len(probes)
