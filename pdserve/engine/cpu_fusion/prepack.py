"""Layers whose 16-bit weights are packed once in the order that our kernels read, on CPUs.

Float32 keeps the arithmetic of `torch.nn.functional.linear`, bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.engine.cpu_fusion.linear_method import Linear
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.kernels import linear, memory
from pdserve.kernels.linear import PackedWeight


class PackedMethod(torch.nn.Module):
    """A 16-bit weight that is packed. The original can be freed."""

    def __init__(self, weight: PackedWeight, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.features = weight.features
        self.num_bytes = weight.data.nbytes + (0 if bias is None else bias.nbytes)
        self.weight = weight  # no parameter, so that nothing takes it for the plain weight
        self.bias = bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod`."""
        return linear.linear(x, self.weight, self.bias)


def prepack(model: torch.nn.Module) -> int:
    """Replace in place the linear layers of a model on the CPU that are in 16 bits.

    A weight shared with the embedding is kept twice.

    Returns:
        The number of layers replaced.
    """
    packed: list[PackedMethod] = []
    for parent in list(model.modules()):
        children: Iterator[tuple[str, Any]] = parent.named_children()
        for name, child in children:
            if type(child) in (torch.nn.Linear, Conv1D) and child.weight.dtype in FUSED_DTYPES:
                weight = linear.pack(child.weight.data, transposed=type(child) is Conv1D)
                packed.append(PackedMethod(weight, child.bias))
                setattr(parent, name, Linear(packed[-1]))
    for method in packed:  # after all are allocated: neighbours share pages
        memory.huge_pages(method.weight.data, written=True)
    return len(packed)
