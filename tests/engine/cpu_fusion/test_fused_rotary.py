"""Fused rotary embeddings: replace functions that compute the same, only those, and in one model only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.cpu_fusion.fused_layers import fuse_rotary
from pdserve.engine.engine import Engine
from pdserve.kernels import elementwise, native

if not native.is_available():
    pytest.skip("no C++ kernels", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = 3  # of the checkpoint fixture


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each kernel call."""
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
def test_one_model_changes_and_computes_the_same(
    architecture: str, checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    path = checkpoint(architecture)
    plain, fused = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=BF16).eval() for _ in range(2))
    assert fuse_rotary(fused) == LAYERS
    calls.clear()
    expected = logits(plain)
    assert not calls, "another model of this architecture"
    torch.testing.assert_close(logits(fused), expected, rtol=2**-4, atol=2**-4)  # equal except for the order of sums
    assert calls == [40] * LAYERS


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 64, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "replaced"),
    [
        ("PhiConfig", True),  # half of each head is rotated
        ("CohereConfig", False),  # adjacent elements rotate together
        ("GlmConfig", False),  # likewise, half of each head
        ("NanoChatConfig", False),  # opposite direction
    ],
)
def test_only_equal_functions_are_replaced(config: str, replaced: bool, calls: list[int]) -> None:
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
def test_fusion_depends_on_kernel_and_dtype(
    kernel: str, dtype: str, fused: bool, checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    Engine(EngineConfig(model=str(checkpoint("llama")), dtype=dtype, kernel=kernel, num_blocks=8))
    assert (calls[-LAYERS:] == [2] * LAYERS) == fused, "the probe of the architecture has two tokens"
