"""Memory advice: huge pages keep all values, and malloc keeps freed memory."""

import resource
import sys

import pytest
import torch

from pdserve.kernels.memory import huge_pages, keep_freed_memory


@pytest.mark.parametrize("count", [0, 1, 1 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("written", [False, True])
def test_huge_pages_keep_values(count: int, written: bool) -> None:
    x = torch.arange(count)
    huge_pages(x, written=written)
    assert torch.equal(x, torch.arange(count))
    huge_pages(x[count // 3 :], written=written)
    assert torch.equal(x, torch.arange(count))


def test_freed_memory_is_reused_without_page_faults() -> None:
    assert sys.platform == "linux"
    size = 48 << 20  # more than malloc keeps by default
    if keep_freed_memory() < size:
        pytest.skip("needs the malloc of a recent glibc")
    faults = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert len(b"x" * size) == size
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert faults[1] < size / resource.getpagesize() / 10
