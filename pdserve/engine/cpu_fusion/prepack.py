"""Layers whose 16-bit weights are packed once in the order that our kernels read, on CPUs.

Float32 keeps the arithmetic of `torch.nn.functional.linear`, bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.kernels import linear, memory
from pdserve.kernels.linear import PackedWeight


class PackedLinear(torch.nn.Module):
    """Replacement of a 16-bit linear layer. The original weight can be freed."""

    def __init__(self, weight: PackedWeight, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.features
        self.weight = weight  # no parameter, so that nothing takes it for the plain weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        return linear.linear(x, self.weight, self.bias)


def prepack(model: torch.nn.Module) -> int:
    """Replace in place the linear layers of a model on the CPU that are in 16 bits.

    A weight shared with the embedding is kept twice.

    Returns:
        The number of layers replaced.
    """
    packed: list[PackedLinear] = []
    for parent in list(model.modules()):
        children: Iterator[tuple[str, Any]] = parent.named_children()
        for name, child in children:
            if type(child) in (torch.nn.Linear, Conv1D) and child.weight.dtype in FUSED_DTYPES:
                weight = linear.pack(child.weight.data, transposed=type(child) is Conv1D)
                packed.append(PackedLinear(weight, child.bias))
                setattr(parent, name, packed[-1])
    for layer in packed:  # after all are allocated: neighbours share pages
        memory.huge_pages(layer.weight.data, written=True)
    return len(packed)
