"""Model runner: copies within the pool, and between the pool and host memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import SetupError


@pytest.fixture
def runner(checkpoint: Callable[..., Path]) -> ModelRunner:
    config = EngineConfig(model=str(checkpoint("llama")), num_blocks=6, swap_space=0.001, device="cpu")
    runner = ModelRunner(load(config), config)
    runner.pool_NL2GBD.copy_(torch.arange(6.0).view(6, 1, 1, 1, 1, 1).expand_as(runner.pool_NL2GBD))
    return runner


def values(runner: ModelRunner) -> list[float]:
    """Return the value that fills each block."""
    first = runner.pool_NL2GBD.flatten(1)[:, 0]
    assert torch.equal(runner.pool_NL2GBD, first.view(6, 1, 1, 1, 1, 1).expand_as(runner.pool_NL2GBD))
    return first.tolist()


def test_block_copies_take_effect_in_order(runner: ModelRunner) -> None:
    runner.copy_blocks([(0, 1), (1, 2), (5, 0), (3, 4), (2, 3)])
    assert values(runner) == [5, 0, 0, 0, 3, 5]


def test_swapped_blocks_come_back(runner: ModelRunner) -> None:
    assert runner.swap([], []) == 0
    assert runner.swap([(4, 0), (2, 1)], []) > 0
    runner.pool_NL2GBD.zero_()
    runner.swap([], [(1, 0), (0, 1)])
    assert values(runner) == [2, 4, 0, 0, 0, 0]


def test_clear_tail_zeroes_only_the_unused_slots(runner: ModelRunner) -> None:
    runner.clear_tail(3, 10)
    assert (runner.pool_NL2GBD[3, ..., :10, :] == 3).all() and (runner.pool_NL2GBD[3, ..., 10:, :] == 0).all()
    assert (runner.pool_NL2GBD[4] == 4).all()


def test_pool_without_room_is_a_setup_error(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), num_blocks=1, device="cpu")
    with pytest.raises(SetupError, match="no room for KV"):
        ModelRunner(load(config), config)
