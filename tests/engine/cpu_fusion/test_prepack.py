"""Packed linear layers: equal to the plain ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from pdserve.config import EngineConfig
from pdserve.engine import checkpoint_loader as checkpoint_module
from pdserve.engine.cpu_fusion.linear_method import Linear, prepack
from pdserve.kernels import linear, memory, native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 32, 129, 1000])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (96, 1000), (1024, 33)])
@torch.inference_mode()
def test_equals_the_plain_layer(in_features: int, out_features: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + in_features)
    layer = torch.nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    plain = torch.nn.Sequential(layer)
    x = torch.randn(2, rows, in_features, dtype=dtype)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert prepack(plain) == 1 and type(plain[0]) is Linear
    packed = plain(x)
    assert packed.shape == (2, rows, out_features) and packed.dtype == dtype
    # One rounding of a float32 sum to 16 bits.
    torch.testing.assert_close(packed.double(), exact, rtol=torch.finfo(dtype).eps, atol=2**-8)


@torch.inference_mode()
def test_layers_of_gpt2_are_packed() -> None:
    layer = Conv1D(70, 100).bfloat16()
    layer.bias.data.normal_()
    plain, x = torch.nn.Sequential(layer), torch.randn(1, 5, 100).bfloat16()
    expected = layer(x)
    assert prepack(plain) == 1
    torch.testing.assert_close(plain(x), expected)


@torch.inference_mode()
def test_huge_pages_keep_weights_and_their_neighbours() -> None:
    weights = [linear.pack(torch.randn(1536, 1024).bfloat16()) for _ in range(4)]
    neighbours, x = [torch.arange(1 << 17) for _ in weights], torch.randn(3, 1024, dtype=torch.bfloat16)
    before = [linear.linear(x, weight) for weight in weights]
    for weight in weights:
        memory.huge_pages(weight.data, written=True)
    assert all(torch.equal(linear.linear(x, weight), y) for weight, y in zip(weights, before, strict=True))
    assert all(torch.equal(y, torch.arange(1 << 17)) for y in neighbours)


def test_float32_is_not_replaced() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert prepack(plain) == 0 and type(plain[0]) is torch.nn.Linear


@torch.inference_mode()
def test_loaded_model_is_packed_and_keeps_its_embedding(checkpoint: Callable[..., Path]) -> None:
    loaded = checkpoint_module.load(EngineConfig(model=str(checkpoint("llama")), dtype="bfloat16", device="cpu"))
    kinds = [type(module) for module in loaded.model.modules()]
    assert Linear in kinds and torch.nn.Linear not in kinds
    embedding = loaded.model.get_input_embeddings()  # type: ignore[operator]  # a method, not a tensor
    assert torch.isfinite(embedding(torch.arange(8))).all()
