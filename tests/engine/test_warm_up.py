"""Warm-up: enough probes to fit the cost model, and no trace in the pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.costs import CostMeter, Costs
from pdserve.engine.engine import Engine
from pdserve.engine.warm_up import MIN_PROBES, warm_up


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


def test_probes_calibrate_the_cost_model(checkpoint: Callable[..., Path]) -> None:
    torch.set_num_threads(1)
    engine, meter = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=64)), CostMeter()
    for work, seconds in warm_up(engine):
        meter.calibrate_step(work, seconds)
    costs = meter.costs(0.0)
    assert costs.prefill != Costs().prefill and costs.decode != Costs().decode
    assert 0 < costs.step_seconds(1, 16) < 1 and 0 < costs.prefill_seconds(128) < 5
    assert costs.prefill_seconds(1000) > costs.prefill_seconds(16)
