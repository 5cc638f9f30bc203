"""Formats of quantized checkpoints: how a layer's tensors are read, and which are refused."""

from typing import Any

import pytest
import torch

from pdserve.engine.low_bit.formats import read_format, read_layer
from pdserve.errors import SetupError

BLOCK_GROUP: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": BLOCK_GROUP}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(("settings", "name"), [(FP8, "weight_scale_inv"), (COMPRESSED, "weight_scale")])
def test_the_last_block_of_rows_may_be_smaller(settings: dict[str, Any], name: str) -> None:
    """Of 192 rows, the first 128 have one scale: they are not halved."""
    weight = torch.randn(192, 256).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    codes = read_layer("a", {"weight": weight, name: scales}, read_format(settings))
    expected = weight.float()
    for row in range(2):
        for column in range(2):
            expected[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= scales[row, column]
    assert torch.equal(codes.dequantize(torch.float32), expected)


@pytest.mark.parametrize("shape", [(192, 192), (300, 256)])
def test_scales_that_do_not_fit_the_blocks_are_refused(shape: tuple[int, int]) -> None:
    tensors = {"weight": torch.zeros(shape).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(SetupError, match="a is no fp8 layer of 8 bits"):
        read_layer("a", tensors, read_format(FP8))


def test_blocks_of_no_known_size_are_refused() -> None:
    group = {"weights": {**BLOCK_GROUP, "block_structure": None}}
    with pytest.raises(SetupError, match="does not say how large blocks are"):
        read_format({**COMPRESSED, "config_groups": {"group_0": group}})
