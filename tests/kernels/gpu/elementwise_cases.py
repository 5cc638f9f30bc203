"""Cases of test_elementwise.py, run in a new process: fused operations equal torch's, in Triton's interpreter or on a GPU.

float16 only in the interpreter, which truncates where a GPU rounds to bfloat16.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pdserve.config import EngineConfig
from pdserve.engine.cpu_fusion.fused_layers import FusedMLP
from pdserve.engine.cpu_fusion.tolerance import nearly_equal
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.kernels import noise
from pdserve.kernels.gpu import elementwise, gumbel
from pdserve.request import Request, SamplingParams

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float16, *([torch.bfloat16] if CUDA else [])]
EPS = 1e-6


@pytest.fixture(autouse=True)
def seed() -> None:
    """Rounding of the last bit is compared, so the numbers are the same in each run."""
    torch.manual_seed(1)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def llama_norm(x: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return weight_N * y.to(x.dtype)


def llama_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] and [1, T, R] → [1, H, T, D]"""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    return torch.cat((rotated * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None], rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight_N = (normal(*shape, dtype=dtype) for shape in ((3, 5, 100), (3, 5, 100), (100,)))
    assert nearly_equal(elementwise.rms_norm(x, weight_N, EPS), llama_norm(x, weight_N))
    total, y = elementwise.add_rms_norm(x, residual, weight_N, EPS)
    assert torch.equal(total, x + residual) and nearly_equal(y, llama_norm(total, weight_N))
    assert torch.equal(elementwise.add_rms_norm(x[1:2], residual[1:2], weight_N, EPS)[1], y[1:2]), "alone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, activation: str) -> None:
    gate, up = normal(7, 300, dtype=dtype) * 3, normal(7, 300, dtype=dtype)
    expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    elementwise.gate(gate, up, activation)
    assert nearly_equal(gate, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rotated", "heads", "has_norms"), [(16, 16, 10, True), (20, 20, 2, False), (64, 24, 3, True)]
)
def test_rotation_and_write(dtype: torch.dtype, size: int, rotated: int, heads: int, has_norms: bool) -> None:
    tokens, kv_heads, block_size = 6, 2, 4
    q, k, v = (normal(1, n, tokens, size, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cos, sin = (normal(1, tokens, rotated, dtype=dtype) for _ in range(2))
    weights = normal(size, dtype=dtype), normal(size, dtype=dtype)
    pool = torch.full((5, 2, 2, kv_heads, block_size, size), 7.0, device=DEVICE).to(dtype)
    slots_T = torch.tensor([3, -1, 8, 9, 10, 19], device=DEVICE, dtype=torch.int32)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (q, k, v))
    got = elementwise.rotate_and_write(
        q_THD, k_TGD, v_TGD, cos[0], sin[0], (*weights, EPS) if has_norms else None, pool[:, 1], slots_T
    )
    if has_norms:
        q, k = (llama_norm(x, weight) for x, weight in zip((q, k), weights, strict=True))
    assert nearly_equal(got, llama_rotary(q, cos, sin)[0].transpose(0, 1))
    kept = slots_T >= 0
    at = slots_T[kept].long()
    written = pool[at // block_size, 1, :, :, at % block_size]
    assert nearly_equal(written[:, 0], llama_rotary(k, cos, sin)[0].transpose(0, 1)[kept])
    assert torch.equal(written[:, 1], v_TGD[kept])
    untouched = (pool == 7).all(-1).sum()
    assert untouched == pool[..., 0].numel() - 2 * kv_heads * len(at), "no other slot, and no other layer"


@pytest.mark.parametrize(
    "architecture", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma2"))]
)
def test_fused_models_say_what_plain_ones_say(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Layers of Llama's kind are fused, others left alone; tokens are those of the model without fusion."""
    path = str(checkpoint(architecture, dtype="float16"))
    tokens = []
    for kernel in ("triton", "reference"):
        engine = Engine(EngineConfig(model=path, kernel=kernel, device=DEVICE.type, num_blocks=8, dtype="float16"))
        assert isinstance(engine.runner, ModelRunner)
        layers: Any = engine.checkpoint.model.get_submodule("model.layers")
        layer = layers[0]
        assert ("forward" in vars(layer)) == (kernel == "triton" and architecture != "gemma2")
        assert ("forward" in vars(layer.self_attn)) == (kernel == "triton")
        assert isinstance(layer.mlp, FusedMLP) == (kernel == "triton")
        tokens.append(greedy(engine, list(range(3, 20)), 3))
    assert tokens[0] == tokens[1]


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    seq = engine.new_sequence(
        "r", Request(prompt=prompt, sampling=SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    )
    engine.add(seq)
    while seq.output.finish_reason() is None:
        engine.step()
    return seq.output.tokens[seq.output.num_prompt :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_sums_of_logits_and_noise(dtype: torch.dtype) -> None:
    """Over several parts of the vocabulary, the last of them short, and with temperatures that make sums large."""
    vocab, rows = 2 * gumbel.PART + 700, torch.tensor([2, 0, 3], device=DEVICE)
    logits = (3 * torch.randn(4, vocab, device=DEVICE)).to(dtype)
    counters = torch.tensor([-(5**27), 7**22, 0], device=DEVICE)
    temperatures = torch.tensor([1.0, 0.01, 50.0], device=DEVICE)
    sums, margins, tokens = gumbel.largest_sums(logits, logits.argmax(-1), rows, counters, temperatures)
    chosen = logits[rows].float()
    scaled = (chosen - chosen.amax(-1, keepdim=True)) / temperatures[:, None]
    expected = (scaled + noise.fast_gumbel(noise.random_bits(counters, torch.arange(vocab, device=DEVICE)))).topk(2)
    assert torch.equal(tokens, expected.indices[:, 0])
    torch.testing.assert_close(sums, expected.values[:, 0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(margins, expected.values[:, 0] - expected.values[:, 1], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_sums_of_a_row_that_is_not_finite_are_none(wrong: float) -> None:
    """So that the reference decides, which reports it."""
    logits = torch.randn(1, 2000, device=DEVICE)
    logits[0, 7 if wrong != float("-inf") else slice(None)] = wrong
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    sums, _, _ = gumbel.largest_sums(logits, logits.max(-1).indices, zeros, zeros, torch.ones(1, device=DEVICE))
    assert not sums.isfinite().any()


def test_noise_in_its_tails() -> None:
    """The float64 noise of the smallest and the largest numbers, to 1e-5."""
    bits = torch.tensor([0, 1, 1 << 20, 1 << 51, (1 << 52) - 1, 1 << 52, (1 << 53) - (1 << 20), (1 << 53) - 1])
    out = torch.empty(len(bits), device=DEVICE)
    _noise_of[(1,)](out, bits.to(DEVICE), SIZE=len(bits))
    torch.testing.assert_close(out.cpu().double(), noise.gumbel(bits), atol=1e-5, rtol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def _noise_of(out, bits, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(out + i, gumbel._gumbel(tl.load(bits + i)))
