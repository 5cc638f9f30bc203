"""Step memory: the steps by which a GPU's memory is measured take at least as much as any other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.features import features_of
from pdserve.engine.gpu.step_memory import run_largest_steps
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.scheduling.budget import StepBudget
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.request import SamplingParams


def test_the_largest_steps_take_at_least_the_memory_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    pool = runner.kv.pool_NX
    largest = peak_bytes(lambda: run_largest_steps(runner, config))
    assert runner.kv.pool_NX is pool
    everything = SamplingParams(
        top_k=50, top_p=0.5, min_p=0.1, logprobs=20, prompt_logprobs=20, frequency_penalty=1, presence_penalty=1
    )
    for num_seqs, sampling in ((1, everything), (8, everything), (3, everything), (8, SamplingParams(temperature=0))):
        length = 48 // num_seqs
        seqs = [
            Sequence.new(
                str(i),
                token_array([1] * length),
                length,
                length,
                sampling,
                b"",
                16,
                block_ids=block_table([0, 1, 2]),
                features=features_of(sampling, length),
            )
            for i in range(num_seqs)
        ]
        assert peak_bytes(partial(runner.step, StepPlan(dict.fromkeys(seqs, length)))) <= largest * 1.01
    greedy = Sequence.new(
        "0", token_array([1] * 48), 48, 48, SamplingParams(temperature=0), b"", 16, block_ids=block_table([0, 1, 2])
    )
    assert peak_bytes(lambda: runner.step(StepPlan({greedy: 48}))) < largest / 3, "what sampling takes is most of it"
    monkeypatch.setattr(StepBudget, "scored_tokens", 8)
    fewer = peak_bytes(lambda: run_largest_steps(runner, config))
    assert fewer < largest * 0.7, "a step scores no more tokens than its budget"


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
