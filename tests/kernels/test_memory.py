"""Asking for huge pages changes no value, whatever the tensor; memory that was freed is there for the next step."""

import resource
import sys

import pytest
import torch

from pdserve.kernels.cpu import huge_pages, keep_freed_memory


@pytest.mark.parametrize("count", [0, 1, 1 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("written", [False, True])
def test_values_stay(count: int, written: bool) -> None:
    x = torch.arange(count)
    huge_pages(x, written=written)
    assert torch.equal(x, torch.arange(count))
    huge_pages(x[count // 3 :], written=written)
    assert torch.equal(x, torch.arange(count))


def test_freed_memory_needs_no_new_pages() -> None:
    assert sys.platform == "linux"
    size = 48 << 20  # more than malloc ever keeps by itself
    if keep_freed_memory() < size:
        pytest.skip("needs the malloc of glibc, not too old a one")
    faults = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert len(b"x" * size) == size
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert faults[1] < size / resource.getpagesize() / 10
