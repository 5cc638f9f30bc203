"""Fused MLPs: replace gated MLPs that compute the same, and only those."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.cpu_fusion.fused_layers import FusedMLP, fuse_mlps
from pdserve.kernels import native

if not native.is_available():
    pytest.skip("no C++ kernels", allow_module_level=True)

LAYERS = 3  # of the checkpoint fixture


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2"])
@torch.inference_mode()
def test_fused_mlps_equal_the_originals(architecture: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    plain = [layer.mlp for layer in model.model.layers]
    assert fuse_mlps(model) == LAYERS
    x = torch.randn(1, 5, 64, dtype=torch.bfloat16)
    for layer, mlp in zip(model.model.layers, plain, strict=True):
        assert isinstance(layer.mlp, FusedMLP)
        # Products that differ by a unit in the last place, summed.
        torch.testing.assert_close(layer.mlp(x), mlp(x), rtol=2**-5, atol=2**-5)


class Scaled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Crossed(LlamaMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Parametrised(LlamaMLP):
    def forward(self, x: torch.Tensor, scale: float = 1) -> Any:
        return scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("kind", "activation", "replaced"),
    [
        (LlamaMLP, "silu", True),
        (LlamaMLP, "gelu_pytorch_tanh", True),
        (LlamaMLP, "gelu", False),
        (LlamaMLP, "relu2", False),
        (Scaled, "silu", False),
        (Crossed, "silu", False),
        (Parametrised, "silu", False),
    ],
)
def test_only_equal_mlps_are_replaced(kind: Any, activation: str, replaced: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=200, hidden_act=activation)
    model = torch.nn.Sequential(kind(config)).to(torch.bfloat16)
    assert fuse_mlps(model) == replaced
    assert isinstance(model[0], FusedMLP) == replaced


@pytest.mark.parametrize(
    ("kernel", "dtype", "fused"),
    [("auto", "bfloat16", True), ("reference", "bfloat16", False), ("auto", "float32", False)],
)
def test_fusion_depends_on_kernel_and_dtype(
    kernel: str, dtype: str, fused: bool, checkpoint: Callable[..., Path]
) -> None:
    model = load(EngineConfig(model=str(checkpoint("llama")), dtype=dtype, kernel=kernel)).model
    assert any(isinstance(module, FusedMLP) for module in model.modules()) == fused
