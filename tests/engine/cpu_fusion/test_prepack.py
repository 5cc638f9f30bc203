"""Packed linear layers compute what the plain ones do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import checkpoint
from pdserve.engine.cpu_fusion.prepack import PackedLinear, TiledLinear, prepack
from pdserve.kernels import linear

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 kernels"
)


@needs_bf16
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 32, 129, 1000])
@pytest.mark.parametrize(("wide", "high"), [(64, 64), (96, 1000), (1024, 33)])
@torch.inference_mode()
def test_equals_the_plain_layer(wide: int, high: int, rows: int, bias: bool, tiled: bool) -> None:
    torch.manual_seed(rows + wide)
    layer = torch.nn.Linear(wide, high, bias=bias, dtype=torch.bfloat16)
    plain = torch.nn.Sequential(layer)
    x = torch.randn(2, rows, wide, dtype=torch.bfloat16)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert prepack(plain, tiled=tiled) == 1
    assert type(plain[0]) is (TiledLinear if tiled and linear.available() else PackedLinear)
    packed = plain(x)
    assert packed.shape == (2, rows, high) and packed.dtype == torch.bfloat16
    # One rounding to bfloat16, of a sum in float32.
    torch.testing.assert_close(packed.double(), exact, rtol=2**-7, atol=2**-8)


@needs_bf16
@torch.inference_mode()
def test_large_weights_and_what_lies_beside_them_survive_their_move_to_huge_pages() -> None:
    kinds: list[type[PackedLinear] | type[TiledLinear]] = [PackedLinear, *([TiledLinear] if linear.available() else [])]
    layers = [kind(torch.nn.Linear(1024, 1536, dtype=torch.bfloat16)) for _ in range(4) for kind in kinds]
    beside, x = [torch.arange(1 << 17) for _ in layers], torch.randn(3, 1024, dtype=torch.bfloat16)
    before = [layer(x) for layer in layers]
    for layer in layers:
        layer.use_huge_pages()
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
    assert all(torch.equal(y, torch.arange(1 << 17)) for y in beside)


def test_float32_is_left_alone() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert prepack(plain, tiled=True) == 0 and type(plain[0]) is torch.nn.Linear


@needs_bf16
@torch.inference_mode()
def test_a_loaded_model_is_packed_and_keeps_its_embedding(checkpoint_path: Path) -> None:
    loaded = checkpoint.load(EngineConfig(model=str(checkpoint_path), dtype="bfloat16", device="cpu"))
    kinds = [type(module) for module in loaded.model.modules()]
    assert (TiledLinear if linear.available() else PackedLinear) in kinds and torch.nn.Linear not in kinds
    embedding = loaded.model.get_input_embeddings()  # type: ignore[operator]  # a method, not a tensor
    assert torch.isfinite(embedding(torch.arange(8))).all()


@pytest.fixture
def checkpoint_path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")
