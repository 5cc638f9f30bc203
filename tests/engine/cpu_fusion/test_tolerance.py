"""Tolerance of fused layers: one unit in the last place."""

import torch

from pdserve.engine.cpu_fusion.tolerance import nearly_equal


def test_one_unit_in_the_last_place_is_tolerated() -> None:
    x = torch.tensor([1.0, -3.5, 1000.0], dtype=torch.bfloat16)
    unit = torch.finfo(torch.bfloat16).eps
    assert nearly_equal(x, x * (1 + unit))
    assert not nearly_equal(x, x * (1 + 4 * unit))


def test_dtypes_must_agree() -> None:
    assert not nearly_equal(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16))
