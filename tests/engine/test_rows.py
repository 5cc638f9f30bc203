"""In 16-bit types, the KV and the logits of a token depend on its own history only, bit for bit.

Not on the batch, the chunks of the prompt, the phase, recorded steps, or the number of threads: another instance that
computes the token anew, after a fault or for another request with the same prefix, gets the same bits.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine.cpu_fusion.prepack import prepack
from pdserve.engine.cpu_fusion.row_products import RowProducts
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "qwen3_moe"]
SLOW_ARCHITECTURES = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v2", "deepseek_v3")]
ROWS, TOKENS = 3, 60
GREEDY = SamplingParams(temperature=0)

# The (sequence, tokens to compute) pairs of each step.
Steps = list[list[tuple[int, int]]]


def prompts() -> list[list[int]]:
    drawn = random.Random(1)
    return [[drawn.randrange(256) for _ in range(TOKENS)] for _ in range(ROWS)]


def mixed_steps() -> Steps:
    """Chunks of random lengths of all sequences, among them single tokens, in random batches."""
    drawn = random.Random(2)
    left, steps = [TOKENS] * ROWS, []
    while any(left):
        step = [(i, min(left[i], drawn.choice([1, 1, 1, 2, 7, 16, 17]))) for i in range(ROWS) if drawn.random() < 0.7]
        step = [(i, count) for i, count in step if count]
        for i, count in step:
            left[i] -= count
        steps += [step] if step else []
    return steps


@torch.inference_mode()
def compute(engine: Engine, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all tokens, [ROWS, TOKENS, V], and the pool with their KV."""
    runner, blocks = engine.runner, engine.pool.blocks_for(TOKENS)
    assert isinstance(runner, ModelRunner)
    runner.kv.pool_NL2GBD.zero_()
    seqs = [
        Sequence(str(i), token_array(prompt), TOKENS, TOKENS, GREEDY, b"", runner.block_size)
        for i, prompt in enumerate(prompts())
    ]
    for i, seq in enumerate(seqs):
        seq.take_blocks(0, [], list(range(i * blocks, (i + 1) * blocks)))
    logits: list[list[torch.Tensor]] = [[] for _ in seqs]
    for step in steps:
        total = sum(count for _, count in step)
        inputs = runner.inputs({seqs[i]: count for i, count in step}, list(range(total)))
        rows_TV = runner.forward(inputs).clone()  # of decode steps recorded or replayed
        for (i, count), part_TV in zip(step, rows_TV.split([count for _, count in step]), strict=True):
            logits[i].append(part_TV)
            seqs[i].mark_computed(count)
    return torch.stack([torch.cat(parts) for parts in logits]), runner.kv.pool_NL2GBD[: ROWS * blocks].clone()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *SLOW_ARCHITECTURES])
def test_tokens_depend_on_their_own_history_only(
    architecture: str, dtype: str, checkpoint: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint(architecture, dtype=dtype)), num_blocks=16))
    logits_STV, pool = compute(engine, [[(i, TOKENS)] for i in range(ROWS)])
    others: dict[str, tuple[Steps, int]] = {
        "one prefill of all": ([[(i, TOKENS) for i in range(ROWS)]], 2),
        "token by token": ([[(i, 1)] for i in range(ROWS) for _ in range(TOKENS)], 1),
        "token by token in a batch": ([[(i, 1) for i in range(ROWS)] for _ in range(TOKENS)], 3),
        "mixed": (mixed_steps(), 2),
    }
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    for name, (steps, threads) in others.items():
        torch.set_num_threads(threads)
        again_STV, pool_again = compute(engine, steps)
        assert torch.equal(again_STV, logits_STV), name
        assert torch.equal(pool_again, pool), name
    assert engine.runner.graphs is not None and engine.runner.graphs.num_replayed > TOKENS, "recorded steps take part"


@pytest.mark.parametrize("features", [64, 2048, 5000])
@pytest.mark.parametrize("outputs", [4, 128, 1000])
def test_products_of_one_row(features: int, outputs: int, load_linear: Callable[..., Any]) -> None:
    """Kernels of one row, and of small products, round otherwise; rows of few features hide it."""
    apply = load_linear(features, outputs)
    x_RK = torch.randn(48, features, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole_RN = apply(x_RK)
    for count in (1, 2, 3, 16):
        assert all(torch.equal(apply(x_RK[i : i + count]), whole_RN[i : i + count]) for i in range(0, 48, count))


@pytest.fixture(params=["packed", "functional"])
def load_linear(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """load_linear(K, N) → a product with a random bfloat16 weight, by a prepacked layer or by `linear`."""

    def load(features: int, outputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(features, outputs, bias=False).bfloat16().requires_grad_(False)
        parent = torch.nn.Sequential(layer)
        if request.param == "packed":
            if not prepack(parent, tiled=True):
                pytest.skip("no packed kernel on this processor")
            return parent

        def apply(x_RK: torch.Tensor) -> torch.Tensor:
            with RowProducts():
                return torch.nn.functional.linear(x_RK, layer.weight)

        return apply

    return load
