"""Norms are replaced by the fused one where they compute the same, and only there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import load
from pdserve.engine.cpu_fusion.fused_norm import FusedNorm, fuse_norms
from pdserve.kernels import cpu, elementwise

try:
    cpu.library()
except cpu.CannotBuild as reason:
    pytest.skip(f"no C++ kernels: {reason}", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1000), (2, 5, 7, 128), (1, 33), (700, 256)])
@torch.inference_mode()
def test_the_kernel_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(shape[-1]).to(dtype)
    x = torch.randn(shape).to(dtype)
    expected = norm(x)
    # A sum in another order can move what is normalised by a unit, and the product with the weight is rounded once more.
    units = {torch.float32: 2**-20, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(elementwise.rms_norm(x, norm.weight, 1e-6), expected, rtol=units, atol=units / 64)
    transposed = x.transpose(0, -2).contiguous().transpose(0, -2)
    torch.testing.assert_close(
        elementwise.rms_norm(transposed, norm.weight, 1e-6), expected, rtol=units, atol=units / 64
    )


@pytest.mark.parametrize(
    ("norm", "replaced"), [(LlamaRMSNorm(64), True), (Qwen3RMSNorm(64), True), (Gemma3RMSNorm(64), False)]
)
def test_what_computes_something_else_is_left_alone(norm: torch.nn.Module, replaced: bool) -> None:
    torch.nn.init.normal_(norm.weight, std=0.5)  # type: ignore[arg-type]  # a tensor, not a module
    model = torch.nn.Sequential(norm, torch.nn.LayerNorm(64)).to(torch.bfloat16)
    assert fuse_norms(model) == replaced
    assert isinstance(model[0], FusedNorm) == replaced and isinstance(model[1], torch.nn.LayerNorm)


def test_float32_is_left_alone() -> None:
    model = torch.nn.Sequential(LlamaRMSNorm(64))
    assert fuse_norms(model) == 0


@pytest.mark.parametrize(("kernel", "fused"), [("auto", True), ("reference", False)])
def test_the_reference_stays_the_reference(kernel: str, fused: bool, checkpoint: Callable[..., Path]) -> None:
    model = load(EngineConfig(model=str(checkpoint("llama")), dtype="bfloat16", kernel=kernel)).model
    assert any(isinstance(module, FusedNorm) for module in model.modules()) == fused
