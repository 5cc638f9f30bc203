"""Tolerance of fused layers: one unit in the last place."""

import torch

from pdserve.engine.cpu_fusion.tolerance import nearly_equal


def test_one_unit_in_the_last_place_is_tolerated() -> None:
    x = torch.tensor([1.0, -3.5, 1000.0], dtype=torch.bfloat16)
    assert nearly_equal(x, torch.tensor([1.0078125, -3.515625, 1004], dtype=torch.bfloat16))
    assert not nearly_equal(x, torch.tensor([1.0, -3.5, 1012], dtype=torch.bfloat16))


def test_dtypes_must_agree() -> None:
    assert not nearly_equal(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16))
