"""Prepacked linear layers: equal to the plain ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import checkpoint_loader as checkpoint_module
from pdserve.engine.cpu_fusion.prepack import PackedLinear, TiledLinear, largest_min_rows, prepack
from pdserve.engine.cpu_fusion.row_products import pad_rows, round_up
from pdserve.kernels import linear

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 kernels"
)


@needs_bf16
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 32, 129, 1000])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (96, 1000), (1024, 33)])
@torch.inference_mode()
def test_equals_the_plain_layer(in_features: int, out_features: int, rows: int, bias: bool, tiled: bool) -> None:
    torch.manual_seed(rows + in_features)
    layer = torch.nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)
    plain = torch.nn.Sequential(layer)
    x = torch.randn(2, rows, in_features, dtype=torch.bfloat16)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert prepack(plain, tiled=tiled) == 1
    assert type(plain[0]) is (TiledLinear if tiled and linear.is_available() else PackedLinear)
    packed = plain(x)
    assert packed.shape == (2, rows, out_features) and packed.dtype == torch.bfloat16
    # One rounding of a float32 sum to bfloat16.
    torch.testing.assert_close(packed.double(), exact, rtol=2**-7, atol=2**-8)


@needs_bf16
@torch.inference_mode()
def test_huge_pages_keep_weights_and_their_neighbours() -> None:
    kinds: list[type[PackedLinear] | type[TiledLinear]] = [
        PackedLinear,
        *([TiledLinear] if linear.is_available() else []),
    ]
    layers = [kind(torch.nn.Linear(1024, 1536, dtype=torch.bfloat16)) for _ in range(4) for kind in kinds]
    neighbours, x = [torch.arange(1 << 17) for _ in layers], torch.randn(3, 1024, dtype=torch.bfloat16)
    before = [layer(x) for layer in layers]
    for layer in layers:
        layer.use_huge_pages()
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
    assert all(torch.equal(y, torch.arange(1 << 17)) for y in neighbours)


@needs_bf16
@pytest.mark.parametrize(("setting", "rows"), [("auto", 2), ("off", 1)])
def test_layers_pad_to_two_rows_unless_batch_invariance_is_off(
    checkpoint: Callable[..., Path], setting: str, rows: int
) -> None:
    config = EngineConfig(model=str(checkpoint("llama", dtype="bfloat16")), batch_invariant=setting)
    model = checkpoint_module.load(config).model
    assert largest_min_rows(model) == (1 if linear.is_available() else rows), "AMX needs no padding"


def test_numbers_of_rows_are_few_and_not_much_larger() -> None:
    sizes = [round_up(rows) for rows in range(1, 2049)]
    assert len(set(sizes)) == 80
    assert all(rows <= size <= max(16, rows * 9 / 8) for rows, size in enumerate(sizes, 1))
    assert all(round_up(size) == size for size in sizes)


@needs_bf16
@torch.inference_mode()
def test_kernels_are_compiled_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: set[int] = set()

    def recorded(x: torch.Tensor, rows: int) -> torch.Tensor:
        padded.add(rows)
        return pad_rows(x, rows)

    monkeypatch.setattr("pdserve.engine.cpu_fusion.prepack.pad_rows", recorded)
    layer = PackedLinear(torch.nn.Linear(64, 96, dtype=torch.bfloat16))
    x = torch.randn(300, 64, dtype=torch.bfloat16)
    together = layer(x)
    assert all(torch.equal(layer(x[:rows]), together[:rows]) for rows in range(1, 301)), "the added rows change no bit"
    assert len(padded) < 60


def test_float32_is_not_replaced() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert prepack(plain, tiled=True) == 0 and type(plain[0]) is torch.nn.Linear


@needs_bf16
@torch.inference_mode()
def test_loaded_model_is_packed_and_keeps_its_embedding(checkpoint_path: Path) -> None:
    loaded = checkpoint_module.load(EngineConfig(model=str(checkpoint_path), dtype="bfloat16", device="cpu"))
    kinds = [type(module) for module in loaded.model.modules()]
    assert (TiledLinear if linear.is_available() else PackedLinear) in kinds and torch.nn.Linear not in kinds
    embedding = loaded.model.get_input_embeddings()  # type: ignore[operator]  # a method, not a tensor
    assert torch.isfinite(embedding(torch.arange(8))).all()


@pytest.fixture
def checkpoint_path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")
