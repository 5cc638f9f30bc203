"""Gated feed-forward layers are replaced by the fused one where they compute the same, and only there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import gelu, silu
from transformers.models.llama.modeling_llama import LlamaMLP

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import load
from pdserve.engine.cpu_fusion.fused_mlp import FusedMLP, fuse_mlps
from pdserve.kernels import cpu, elementwise

if not cpu.can_build():
    pytest.skip("no C++ kernels", allow_module_level=True)

LAYERS = 3  # of the checkpoints
TORCHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1000), (1, 33), (700, 256), (7,)])
def test_the_kernel_equals_torch(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (5 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    expected = TORCHS[activation](gate) * up
    elementwise.gate(gate, up, activation)
    # The activation may be the next number, and the product be rounded once more.
    torch.testing.assert_close(gate, expected, rtol=1.5 * torch.finfo(dtype).eps, atol=2**-20)


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
def test_numbers_of_any_size(activation: str) -> None:
    gate = torch.tensor([0, -0.0, 1e-30, -1e-30, 80, -80, 1e4, -1e4, 1e38, -1e38, torch.inf], dtype=torch.bfloat16)
    expected = TORCHS[activation](gate)
    elementwise.gate(gate, torch.ones_like(gate), activation)
    torch.testing.assert_close(gate, expected, rtol=2**-7, atol=2**-20)
    gate = torch.full((40,), torch.nan, dtype=torch.bfloat16)
    elementwise.gate(gate, torch.ones_like(gate), activation)
    assert gate.isnan().all()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2"])
@torch.inference_mode()
def test_feed_forward_layers_compute_the_same(architecture: str, checkpoint: Callable[..., Path]) -> None:
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


class Told(LlamaMLP):
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
        (Told, "silu", False),
    ],
)
def test_what_computes_something_else_is_left_alone(kind: Any, activation: str, replaced: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=200, hidden_act=activation)
    model = torch.nn.Sequential(kind(config)).to(torch.bfloat16)
    assert fuse_mlps(model) == replaced
    assert isinstance(model[0], FusedMLP) == replaced


@pytest.mark.parametrize(
    ("kernel", "dtype", "fused"),
    [("auto", "bfloat16", True), ("reference", "bfloat16", False), ("auto", "float32", False)],
)
def test_what_is_loaded(kernel: str, dtype: str, fused: bool, checkpoint: Callable[..., Path]) -> None:
    model = load(EngineConfig(model=str(checkpoint("llama")), dtype=dtype, kernel=kernel)).model
    assert any(isinstance(module, FusedMLP) for module in model.modules()) == fused
