"""In 16-bit types, the KV and the logits of a token depend on its own history only, bit for bit.

Not on the batch, the chunks of the prompt, the phase, recorded steps, or the number of threads: another instance that
computes the token anew, after a fault or for another request with the same prefix, gets the same bits.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from pdserve.config import EngineConfig
from pdserve.engine import numerics
from pdserve.engine.cpu_fusion.linear_method import prepack
from pdserve.engine.cpu_fusion.row_products import RowProducts
from pdserve.engine.engine import Engine
from pdserve.engine.memory.groups import Table, Tails
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.kernels import native
from pdserve.keys import token_array
from pdserve.request import SamplingParams

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "qwen3_moe", "gpt_oss"]
ARCHITECTURES += ["gpt2", "llama4", "lfm2", "qwen3_next", "bamba", "falcon_h1"]
SLOW_ARCHITECTURES = ("deepseek_v2", "deepseek_v3", "gemma4")
CASES = [  # of llama in both types, of each other architecture in one
    pytest.param(
        name, dtype, marks=[pytest.mark.slow] * (name in SLOW_ARCHITECTURES or (i % 2 == j and name != "llama"))
    )
    for i, name in enumerate((*ARCHITECTURES, *SLOW_ARCHITECTURES))
    for j, dtype in enumerate(("bfloat16", "float16"))
]
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
    """Return the logits of all tokens, [ROWS, TOKENS, V], and their KV."""
    runner, blocks = engine.runner, engine.pool.blocks_for(TOKENS)
    assert isinstance(runner, ModelRunner)
    runner.kv.pool_NX.zero_()
    seqs = [
        Sequence.new(str(i), token_array(prompt), TOKENS, TOKENS, GREEDY, b"", runner.block_size)
        for i, prompt in enumerate(prompts())
    ]
    held = [
        engine.pool.allocate(-(-blocks * ROWS // group.per_page), at) for at, group in enumerate(engine.pool.groups)
    ]
    for i, seq in enumerate(seqs):
        first, *others = (of_group[i * blocks : (i + 1) * blocks] for of_group in held)
        seq.kv.take_blocks(0, [], first)
        seq.kv.tails = Tails(Table(at, block_table(ids), 0) for at, ids in enumerate(others, 1))
    logits: list[list[torch.Tensor]] = [[] for _ in seqs]
    for step in steps:
        total = sum(count for _, count in step)
        inputs = runner.inputs(StepPlan({seqs[i]: count for i, count in step}), list(range(total)))
        rows_TV = runner.forward(inputs).clone()  # of decode steps recorded or replayed
        for (i, count), part_TV in zip(step, rows_TV.split([count for _, count in step]), strict=True):
            logits[i].append(part_TV)
            seqs[i].kv.mark_computed(count)
    written = []
    for group, view_NX, of_group in zip(engine.pool.groups, runner.kv.views, held, strict=True):
        rows_NX = view_NX[[block - group.first_id for block in of_group[: ROWS * blocks]]]
        written.append(rows_NX.flatten().view(torch.int16))  # states are float32
        engine.pool.release(of_group)
    return torch.stack([torch.cat(parts) for parts in logits]), torch.cat(written)


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_tokens_depend_on_their_own_history_only(
    architecture: str, dtype: str, checkpoint: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint(architecture, dtype=dtype)), num_blocks=16))
    assert "variant" not in engine.layout.numerics
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


@pytest.mark.parametrize("outputs", [4, 128, 2048])
@pytest.mark.parametrize("kind", ["packed", "functional"])
@torch.inference_mode()
def test_products_of_few_rows(kind: str, outputs: int) -> None:
    """Libraries have other kernels for few rows and for small products; rows of few features hide it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(2500, outputs, bias=False).bfloat16()
    model = torch.nn.Sequential(layer)
    assert kind == "functional" or prepack(model) == 1
    x_RK = torch.randn(60, 2500).bfloat16()
    with RowProducts():
        whole_RN = model(x_RK)
        for count in (1, 2, 3, 16, 36, 48):
            assert all(torch.equal(model(x_RK[i : i + count]), whole_RN[i : i + count]) for i in range(0, 60, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [torch.sigmoid, F.silu, F.softplus, F.gelu, partial(F.gelu, approximate="tanh"), torch.tanh, torch.exp],
    ids=["sigmoid", "silu", "softplus", "gelu", "gelu_tanh", "tanh", "exp"],
)
def test_functions_of_numbers_do_not_depend_on_their_place(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """In a tensor, of which each thread has a part, and where the rest of a vector is computed one by one."""
    x_N = (torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    apart_N = torch.stack([x_N, x_N], 1)[:, 0]  # numbers that are not contiguous are computed one by one
    with RowProducts():
        together_N = function(x_N)
        assert torch.equal(function(apart_N), together_N)
    torch.testing.assert_close(together_N, function(x_N))


def test_class_names_instructions_and_kernels(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, digest = str(checkpoint("llama", dtype="bfloat16")), numerics._digest
    assert isinstance(runner := Engine(EngineConfig(model=path, num_blocks=4)).runner, ModelRunner)
    assert runner.numerics.split("-")[2:4] == [native.instructions(), f"kernels{digest('cpu')}"]
    assert Engine(EngineConfig(model=path, num_blocks=4, dtype="float32")).layout.numerics == ""
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-DOTHER"])
    assert digest.__wrapped__("cpu") != digest("cpu") != digest("cuda")


def test_products_by_torch_are_of_a_class_of_their_own(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.up_proj(x)) * torch.einsum("...n,...n->...", x, x)[..., None]
        return y

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    engine = Engine(EngineConfig(model=str(checkpoint("llama", dtype="bfloat16")), num_blocks=4))
    assert f"-{native.instructions()}-variant-" in engine.layout.numerics
    assert "LlamaForCausalLM calls torch's einsum" in caplog.text
