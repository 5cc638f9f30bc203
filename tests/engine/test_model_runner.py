"""Model runner: copies within the pool, and between the pool and host memory."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

from pdserve.config import EngineConfig
from pdserve.engine import model_runner
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.kernels.gpu import memory
from pdserve.keys import token_array
from pdserve.request import SamplingParams


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
        assert model_runner._num_blocks(loaded, config, step_bytes) == useful
        return
    with pytest.raises(SetupError, match="no room for KV") as error:
        model_runner._num_blocks(loaded, config, step_bytes)
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
    monkeypatch.setattr(memory, "free_for_pool", pool_bytes)
    monkeypatch.setattr(memory, "pin", pinned.append)
    monkeypatch.setattr(ModelRunner, "step", logged_step)
    with OnTheCPU():
        runner = ModelRunner(loaded, config)
    assert calls == ["step", "step", f"pool beside {peak}"], "of few sequences and of many"
    assert runner.num_blocks == len(runner.pool_NL2GBD) == 7
    assert [len(one) for one in pinned] == [runner.num_host_blocks] and runner.num_host_blocks > 0
    assert runner.pipeline is not None and runner.graphs is None, "which the reference kernel does not allow"


def test_the_largest_steps_take_at_least_the_memory_of_any_other(tmp_path: Path) -> None:
    """The steps by which a GPU's memory is measured, with the peaks of torch's allocations on the CPU."""
    shape = transformers.LlamaConfig(
        vocab_size=20_000, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        num_blocks=40,
        device="cpu",
        kernel="reference",
        max_num_seqs=8,
        max_num_batched_tokens=48,
    )
    runner = ModelRunner(load(config), config)
    pool = runner.pool_NL2GBD
    largest = peak_bytes(lambda: runner.run_largest_steps(config))
    assert runner.pool_NL2GBD is pool
    everything = SamplingParams(
        top_k=50, top_p=0.5, min_p=0.1, logprobs=20, prompt_logprobs=20, frequency_penalty=1, presence_penalty=1
    )
    for num_seqs, sampling in ((1, everything), (8, everything), (3, everything), (8, SamplingParams(temperature=0))):
        length = 48 // num_seqs
        seqs = [
            Sequence(str(i), token_array([1] * length), length, length, sampling, b"", 16, block_ids=[0, 1, 2])
            for i in range(num_seqs)
        ]
        assert peak_bytes(partial(runner.step, dict.fromkeys(seqs, length))) <= largest * 1.01
    greedy = Sequence("0", token_array([1] * 48), 48, 48, SamplingParams(temperature=0), b"", 16, block_ids=[0, 1, 2])
    assert peak_bytes(lambda: runner.step({greedy: 48})) < largest / 3, "what sampling takes is most of it"


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that tensors take at a time while `run` runs, beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for change in changes:
        held += change.nbytes()
        peak = max(peak, held)
    return peak
