"""Launch parameters of Triton kernels: the device, and the number of programs at a time."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETER_PROCESSORS = 4  # assumed in the interpreter, so that tests cover split KV and persistent programs
INTERPRETER_SHARED_MEMORY = 99 << 10  # bytes, assumed there as well


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block of threads may have."""
    if device.type != "cuda":
        return INTERPRETER_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stub


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context in which kernels start on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
