"""Allocation: how many blocks an engine gets, and the errors where there is no room."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.gpu import back_end
from pdserve.engine.memory.allocation import allocate, pool_size
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import SetupError
from pdserve.kernels import reference
from pdserve.kernels.gpu import memory


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
    monkeypatch.setattr(memory, "reserved_bytes", lambda device: 16 << 30)
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


class OnTheCPU(TorchFunctionMode):
    """Has tensors that are wanted on a GPU on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def on_cpu(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(on_cpu, args), **kwargs)


def test_on_a_gpu_the_pool_is_what_a_step_leaves_and_swap_space_is_pinned(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, pinned = list[str](), list[torch.Tensor]()
    config = EngineConfig(
        model=str(checkpoint("llama")), device="cuda", kernel="reference", max_num_batched_tokens=32, swap_space=0.001
    )
    loaded = replace(load(replace(config, device="cpu")), device=torch.device("cuda:0"))
    step, free = ModelRunner.step, 9 * loaded.layout.block_bytes

    def logged_step(*arguments: Any) -> Any:
        calls.append("step")
        return step(*arguments)

    def pool_bytes(device: torch.device, peak: int, utilization: float) -> int:
        calls.append(f"pool beside {peak}")
        return free - peak

    peak = 2 * loaded.layout.block_bytes
    monkeypatch.setattr(memory, "PeakMeter", lambda device: nullcontext(SimpleNamespace(peak=peak)))
    monkeypatch.setattr(back_end, "pool_bytes", pool_bytes)
    monkeypatch.setattr(back_end, "pin", pinned.append)
    monkeypatch.setattr(ModelRunner, "step", logged_step)
    with OnTheCPU():
        runner = ModelRunner(loaded, config)
    assert calls == ["step", "step", f"pool beside {peak}"], "of few sequences and of many"
    assert runner.kv.num_blocks == 7
    assert [len(one) for one in pinned] == [runner.kv.num_host_blocks] and runner.kv.num_host_blocks > 0
    assert runner.pipeline is not None and runner.graphs is None, "which the reference kernel does not allow"
