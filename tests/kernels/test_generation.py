"""Engine on each kernel: greedy float32 output equals transformers' generate, token for token."""

from collections.abc import Callable

import pytest

from pdserve.engine.engine import Engine


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma4"])  # plain, window, soft cap, groups
def test_cpu_equals_generate(
    architecture: str, equals_generate: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    settings = {"num_blocks": 400, "max_num_batched_tokens": 256, "kernel": "cpu"}
    engine = equals_generate(architecture, prompts, 16, **settings)
    assert engine.runner.kernel.NAME == "cpu"


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])  # triton: gpu/triton_cases.py
def test_equals_generate_while_preempting(
    kernel: str, swap_space: float, equals_generate_while_preempting: Callable[..., None], prompts: list[list[int]]
) -> None:
    short = [prompt for prompt in prompts if 30 < len(prompt) <= 100][:5]
    settings = {"kernel": kernel, "num_blocks": 10, "max_num_batched_tokens": 64}
    equals_generate_while_preempting(short, 16, swap_space, **settings)
