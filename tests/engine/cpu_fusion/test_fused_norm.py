"""Fused norms: replace norms that compute the same, and only those."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.cpu_fusion.fused_layers import FusedNorm, fuse_norms
from pdserve.kernels import native

if not native.is_available():
    pytest.skip("no C++ kernels", allow_module_level=True)


@pytest.mark.parametrize(
    ("norm", "replaced"), [(LlamaRMSNorm(64), True), (Qwen3RMSNorm(64), True), (Gemma3RMSNorm(64), False)]
)
def test_only_equal_norms_are_replaced(norm: torch.nn.Module, replaced: bool) -> None:
    torch.nn.init.normal_(norm.weight, std=0.5)  # type: ignore[arg-type]  # a tensor, not a module
    model = torch.nn.Sequential(norm, torch.nn.LayerNorm(64)).to(torch.bfloat16)
    assert fuse_norms(model) == replaced
    assert isinstance(model[0], FusedNorm) == replaced and isinstance(model[1], torch.nn.LayerNorm)


def test_float32_is_not_replaced() -> None:
    model = torch.nn.Sequential(LlamaRMSNorm(64))
    assert fuse_norms(model) == 0


@pytest.mark.parametrize(("kernel", "fused"), [("auto", True), ("reference", False)])
def test_reference_kernel_disables_fusion(kernel: str, fused: bool, checkpoint: Callable[..., Path]) -> None:
    model = load(EngineConfig(model=str(checkpoint("llama")), dtype="bfloat16", kernel=kernel)).model
    assert any(isinstance(module, FusedNorm) for module in model.modules()) == fused
