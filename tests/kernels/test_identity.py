"""The engine on each kernel: greedy float32 output equals transformers' generate, token for token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.request import SamplingParams

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    seqs = [engine.new_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.finish_reason():
                engine.remove(seq)
    return [seq.tokens[seq.num_prompt :] for seq in seqs]


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])  # plain, window, window and soft cap
def test_cpu_equals_generate(
    architecture: str, checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    path = checkpoint(architecture)
    expected = generate(path, prompts, GREEDY.max_tokens)
    engine = Engine(EngineConfig(model=str(path), num_blocks=400, max_num_batched_tokens=256, kernel="cpu"))
    assert engine.runner.kernel.NAME == "cpu"
    assert run(engine, prompts) == expected
    assert run(engine, prompts) == expected, "with a warm prefix cache"


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])  # triton: triton_cases.py
def test_equals_generate_while_preempting(
    kernel: str, swap_space: float, checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    """Recomputing and swapping, cold and warm."""
    path, short = checkpoint("llama"), [prompt for prompt in prompts if 30 < len(prompt) <= 100][:5]
    settings: dict[str, Any] = {"num_blocks": 10, "max_num_batched_tokens": 64, "swap_space": swap_space}
    engine = Engine(EngineConfig(model=str(path), kernel=kernel, **settings))
    engine.scheduler.costs = Costs(prefill=(1, 1, 0), swap=(0, 0))  # who can be swapped is
    expected = generate(path, short, GREEDY.max_tokens)
    for _ in range(2):
        before, swapped = engine.scheduler.num_preemptions, engine.scheduler.num_swaps
        assert run(engine, short) == expected
        assert engine.scheduler.num_preemptions > before
        assert (engine.scheduler.num_swaps > swapped) == (swap_space > 0)
