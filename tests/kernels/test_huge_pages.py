"""Asking for huge pages changes no value, whatever the tensor."""

import pytest
import torch

from pdserve.kernels.cpu import huge_pages


@pytest.mark.parametrize("count", [0, 1, 1 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("written", [False, True])
def test_values_stay(count: int, written: bool) -> None:
    x = torch.arange(count)
    huge_pages(x, written=written)
    assert torch.equal(x, torch.arange(count))
    huge_pages(x[count // 3 :], written=written)
    assert torch.equal(x, torch.arange(count))
