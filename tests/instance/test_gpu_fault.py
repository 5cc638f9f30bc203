"""Failures of GPUs, as torch and Triton raise them, become one sentence each."""

import pytest
import torch

from pdserve.instance.gpu_fault import gpu_fault


class TritonError(Exception):
    """Stands in for Triton's, which is not installed everywhere."""


class OutOfResources(TritonError):
    pass


class CompilationError(TritonError):
    pass


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            OutOfResources("out of resource: shared memory, Required: 114944, Hardware limit: 101376. Reducing …"),
            ("needs more than this GPU has", "Required: 114944", "--kernel reference"),
        ),
        (CompilationError("at 3:1:\n  bad"), ("cannot be compiled", "--kernel reference")),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), ("no memory left", "2 GiB")),
        (RuntimeError("CUDA error: out of memory"), ("no memory left", "--gpu-memory-utilization")),
        (
            torch.AcceleratorError(
                "CUDA error: no kernel image is available for execution on the device\nCompile with"
            ),
            ("this build of torch does not support the GPU",),
        ),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"),
            ("the GPU failed", "an illegal memory access", "Xid"),
        ),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), ("the GPU failed", "device-side assert")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling …"), ("the GPU failed", "CUBLAS")),
    ],
)
def test_a_sentence_for_each(error: BaseException, parts: tuple[str, ...]) -> None:
    sentence = gpu_fault(error)
    assert sentence is not None and "\n" not in sentence
    for part in parts:
        assert part in sentence


def test_other_exceptions_are_defects() -> None:
    for error in (AssertionError("leaked"), RuntimeError("shapes do not match"), ValueError("CUDA"), MemoryError()):
        assert gpu_fault(error) is None


def test_triton_raises_what_is_expected() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    sentence = gpu_fault(errors.OutOfResources(114944, 101376, "shared memory"))
    assert sentence is not None and "114944" in sentence
    assert (gpu_fault(errors.PTXASError("no")) or "").startswith("a kernel cannot be compiled")
