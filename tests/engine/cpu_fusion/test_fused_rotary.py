"""Rotary embeddings are replaced by the fused one where they compute the same, only there, and in one model only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from pdserve.config import EngineConfig
from pdserve.engine.cpu_fusion.fused_rotary import fuse_rotary
from pdserve.engine.engine import Engine
from pdserve.kernels import cpu, elementwise

if not cpu.can_build():
    pytest.skip("no C++ kernels", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = 3  # of the checkpoints


@pytest.mark.parametrize(("dtype", "table"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)])
@pytest.mark.parametrize(("tokens", "size", "turning"), [(1, 64, 64), (5, 20, 20), (3, 64, 24), (700, 128, 128)])
@torch.inference_mode()
def test_the_kernel_equals_transformers(
    tokens: int, size: int, turning: int, dtype: torch.dtype, table: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, tokens, 4, size).to(dtype), torch.randn(1, 2, tokens, size).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(1, tokens, turning).to(table), torch.randn(1, tokens, turning).to(table)
    turned = modeling_llama.apply_rotary_pos_emb(q[..., :turning], k[..., :turning], cos, sin, unsqueeze_dim=2)
    for got, new, old in zip(elementwise.rotary(q, k, cos, sin), turned, (q, k), strict=True):
        expected = torch.cat((new.to(dtype), old[..., turning:]), dim=-1)
        assert got.dtype == dtype and got.shape == old.shape
        # One unit in the last place of the sum, and one of float32's of the products.
        torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=2**-20)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens for which the kernel was called."""
    called: list[int] = []
    kernel = elementwise.rotary

    def rotary(q: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(q.shape[1])
        return kernel(q, *rest)

    monkeypatch.setattr(elementwise, "rotary", rotary)
    return called


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(40)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "qwen3_moe"]
)
def test_one_model_is_changed_and_computes_the_same(
    architecture: str, checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    path = checkpoint(architecture)
    plain, fused = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=BF16).eval() for _ in range(2))
    assert fuse_rotary(fused) == LAYERS
    calls.clear()
    expected = logits(plain)
    assert not calls, "another model of its kind"
    torch.testing.assert_close(logits(fused), expected, rtol=2**-4, atol=2**-4)  # exact but for sums in another order
    assert calls == [40] * LAYERS


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 64, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "replaced"),
    [
        ("PhiConfig", True),  # half of each head turns
        ("CohereConfig", False),  # neighbours turn together
        ("GlmConfig", False),  # likewise, and half of each head
        ("NanoChatConfig", False),  # the other way round
    ],
)
def test_what_computes_something_else_is_left_alone(config: str, replaced: bool, calls: list[int]) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, config)(**SIZES, **HEADS, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=BF16).eval()
    expected = logits(model)
    assert fuse_rotary(model) == (LAYERS if replaced else 0)
    calls.clear()
    torch.testing.assert_close(logits(model), expected, rtol=2**-4, atol=2**-4)
    assert len(calls) == (LAYERS if replaced else 0)


@pytest.mark.parametrize(
    ("kernel", "dtype", "fused"),
    [("auto", "bfloat16", True), ("reference", "bfloat16", False), ("auto", "float32", False)],
)
def test_what_is_loaded(
    kernel: str, dtype: str, fused: bool, checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    Engine(EngineConfig(model=str(checkpoint("llama")), dtype=dtype, kernel=kernel, num_blocks=8))
    assert (calls[-LAYERS:] == [2] * LAYERS) == fused, "in the trial of the architecture, with two tokens"
