"""Memory of a GPU: how much of it the pool of an instance may take, and host memory that the GPU can reach.

Several instances may share a GPU. Each has its share of the memory, whatever the others have taken of theirs.
"""

import weakref

import torch

CONTEXT_BYTES = 512 << 20  # the most that CUDA itself takes for a process, whose exact size no process can ask for
GRAPH_BYTES = 4 << 20  # that the driver takes for one CUDA graph of a decode step
LATER_BYTES = 64 << 20  # of buffers that are allocated after the pool: those of `kv_transfer/staging.py`


def pool_bytes(total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Return the bytes that the pool of one instance may take; 0 if there is no room.

    Args:
        total, free: memory of the GPU. What is not free may belong to other processes.
        reserved: memory that torch holds in this process between steps, which is the weights.
        peak: further memory that a step needs.
        utilization: share of the total for this instance, CUDA's own memory included.
    """
    own = reserved + min(max(total - free - reserved, 0), CONTEXT_BYTES)
    return max(0, int(min(total * utilization - own, free)) - peak - LATER_BYTES)


class PeakMeter:
    """Context manager that measures the memory which torch takes from a GPU meanwhile, in addition to what it has.

    Attributes:
        peak: bytes, with what the allocator loses to fragmentation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0

    def __enter__(self) -> "PeakMeter":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)
        self.peak = torch.cuda.max_memory_reserved(self._device) - self._before
        torch.cuda.empty_cache()


def reserved_bytes(device: torch.device) -> int:
    """Return what torch holds of a GPU in this process, after it has given back what it only keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def free_for_pool(device: torch.device, peak: int, utilization: float) -> int:
    """Return `pool_bytes` of this process on a GPU."""
    reserved = reserved_bytes(
        device
    )  # first: the graphs that were measured are gone, and their memory is kept for later
    free, total = torch.cuda.mem_get_info(device)
    return pool_bytes(total, free, reserved, peak, utilization)


def describe(device: torch.device, utilization: float) -> str:
    """Return the free and total memory of a GPU in words, for out-of-memory errors."""
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{device} has {total / 2**30:.1f} GiB, {free / 2**30:.1f} of them free, and "
        f"--gpu-memory-utilization {utilization:.2g} of them are for this instance"
    )


def pin(x: torch.Tensor) -> torch.Tensor:
    """Make host memory reachable by GPUs as long as it exists, so that copies need no detour, and return it.

    `Tensor.pin_memory` copies, and its allocator rounds up to a power of two: either can double the memory of a large tensor.

    Raises:
        MemoryError: the system does not let the process lock so much memory.
    """
    if not x.nbytes:
        return x
    status = torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0)
    if int(status):
        raise MemoryError(
            f"{x.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {int(status)}); "
            "raise `ulimit -l`, or the memory limit of the container"
        )
    # Otherwise the driver would take other memory at this address for this one.
    weakref.finalize(x.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, x.data_ptr()).atexit = False
    return x
