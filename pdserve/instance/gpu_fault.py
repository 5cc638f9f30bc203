"""Failures of GPUs in one sentence each, by the exception that torch or Triton raises."""

_NO_MEMORY = "lower --max-num-batched-tokens or --gpu-memory-utilization, or end what else uses the GPU"
_NO_KERNEL = "--kernel reference runs on any GPU, slowly"


def gpu_fault(error: BaseException) -> str | None:
    """Return a sentence that says what happened and what helps; None if no GPU is the cause.

    Exceptions are told apart by name, because processes without a GPU import neither torch's nor Triton's.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
    if "OutOfResources" in names:
        return f"a kernel needs more than this GPU has ({reason}); {_NO_KERNEL}"
    if "TritonError" in names:
        return f"a kernel cannot be compiled for this GPU ({reason}); {_NO_KERNEL}"
    if "no kernel image" in reason:
        return f"this build of torch does not support the GPU ({reason}); install one for its compute capability"
    if "OutOfMemoryError" in names or "out of memory" in reason:
        return f"the GPU has no memory left ({reason}); {_NO_MEMORY}"
    if "AcceleratorError" in names or reason.startswith(("CUDA error", "Triton Error [CUDA]", "NVML", "cuDNN error")):
        return f"the GPU failed ({reason}); look for lines with NVRM or Xid in the kernel log (dmesg)"
    return None
