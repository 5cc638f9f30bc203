"""Allocation: how many blocks an engine gets, and the errors where there is no room."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.memory.allocation import allocate, pool_size
from pdserve.errors import SetupError
from pdserve.kernels import reference


def test_pool_without_room_is_a_setup_error(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), num_blocks=1, device="cpu")
    with pytest.raises(SetupError, match="no room for KV"):
        allocate(load(config), config, reference, 0)


@pytest.mark.parametrize(("free_gib", "fits"), [(40, True), (17.2, False), (5, False)])
def test_a_gpu_without_room_for_kv_is_a_setup_error_that_names_its_memory(
    free_gib: float, fits: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fake `torch.cuda`: another process has the rest, and 16 GiB of what is gone are this one's weights."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 << 30)
    config = EngineConfig(model=str(checkpoint("llama")), device="cuda", max_num_seqs=1000)
    loaded = replace(load(replace(config, device="cpu")), device=gpu)
    step_bytes = int(17.2 * 2**30)
    if fits:
        useful = 1000 * -(-loaded.context_length // config.block_size)
        assert pool_size(loaded, config, step_bytes) == useful
        return
    with pytest.raises(SetupError, match="no room for KV") as error:
        pool_size(loaded, config, step_bytes)
    for part in ("cuda:0 has 80.0 GiB", f"{free_gib:.1f} of them free", "0.9 of them", "a step takes 17.2 GiB"):
        assert part in str(error.value)
