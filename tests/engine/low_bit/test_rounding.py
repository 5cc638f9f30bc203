"""Weights that are rounded as they are loaded: what the dense model with the rounded weights computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.cpu_fusion import experts, linear_method
from pdserve.kernels import linear
from tests.engine.low_bit.test_checkpoint import answer


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt2"])
def test_rounded_weights_have_the_bits_of_the_dense_ones(
    quantization: str, architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(architecture)
    tokens, logprobs, weights = answer(path, dtype="bfloat16", quantization=quantization)
    assert weights and sum(weight.nbytes for weight in weights) < 0.6 * sum(
        2 * torch.Size(weight.shape).numel() for weight in weights
    )
    loaded = load(EngineConfig(model=str(path), dtype="float32", device="cpu", quantization=quantization))
    rounded = load(EngineConfig(model=str(path), dtype="bfloat16", device="cpu", quantization=quantization))
    assert rounded.layout.model_fingerprint == loaded.layout.model_fingerprint
    assert (
        rounded.layout.model_fingerprint != load(EngineConfig(model=str(path), device="cpu")).layout.model_fingerprint
    )

    def dense(parameter: torch.nn.Parameter, *, transposed: bool) -> linear.PackedWeight:
        return linear.pack(parameter.data, transposed=transposed)

    for module in (linear_method, experts):
        monkeypatch.setattr(module, "packed_weight", dense)
    assert answer(path, dtype="bfloat16", quantization=quantization) == (tokens, logprobs, [])
    assert answer(path, dtype="bfloat16")[1] != logprobs, "rounding changes the model"
