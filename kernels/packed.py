"""The small integer arrays of a step, moved to a GPU in one copy."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 4  # elements: kernels read 16 bytes at a time

Arrays: TypeAlias = "Sequence[npt.NDArray[np.integer[Any]]]"


def packed_copy(arrays: Arrays, device: torch.device) -> list[torch.Tensor]:
    """Return integer arrays on a device, as int64 on a CPU, where they may share memory, and as int32 elsewhere.

    On a GPU, one copy from pinned memory moves them, and nothing waits for it: torch's allocator of pinned memory reuses a
    buffer once the copies out of it have ended.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array).to(torch.long) for array in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Arrays, *, pinned: bool) -> torch.Tensor:
    """Return arrays one after the other, int32 in host memory, each from a multiple of ALIGNMENT on."""
    staging = torch.zeros(sum(map(_padded, arrays)), dtype=torch.int32, pin_memory=pinned)
    host, begin = staging.numpy(), 0
    for array in arrays:
        host[begin : begin + array.size] = array.reshape(-1)
        begin += _padded(array)
    return staging


def unpack(packed: torch.Tensor, like: Arrays) -> list[torch.Tensor]:
    """Return views of what `pack` made of these arrays."""
    parts = packed.split([_padded(array) for array in like])
    return [part[: array.size].view(array.shape) for part, array in zip(parts, like, strict=True)]


def _padded(array: npt.NDArray[np.integer[Any]]) -> int:
    return -(-array.size // ALIGNMENT) * ALIGNMENT
