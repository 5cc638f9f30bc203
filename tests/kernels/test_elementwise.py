"""The first of the largest, beside torch; the other functions are tested where they take the place of modules."""

import pytest
import torch

from pdserve.kernels import elementwise

pytestmark = pytest.mark.usefixtures("cpu_kernel")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (40, 1024), (40, 2055), (1, 151_936)])
def test_argmax_is_the_first_of_the_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).mul(2).round().to(dtype)  # many are equal
    largest = x == x.amax(dim=1, keepdim=True)
    first = largest.int().cumsum(dim=1).eq(1).logical_and(largest).nonzero()[:, 1]
    assert torch.equal(elementwise.argmax(x), first)
    assert torch.equal(elementwise.argmax(x.T.contiguous().T), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 2047, 2054])
def test_argmax_finds_any_place(place: int, dtype: torch.dtype) -> None:
    x = torch.full((1, 2055), -torch.inf, dtype=dtype)
    assert elementwise.argmax(x).tolist() == [0]
    x[0, place] = -5
    assert elementwise.argmax(x).tolist() == [place]
    x[0, (place + 1) % 2055] = torch.nan
    assert elementwise.argmax(x).tolist() == [place]
