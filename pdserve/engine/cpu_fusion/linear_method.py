"""Linear layers whose weights belong to a method, and to whose output a delta may be added.

    Linear ─► LinearMethod.product(x) ─► Delta.add(x, y)

A method is how a layer's weights are kept and its product is computed: plain, packed for our kernels, or low in bits. A delta
is what another part adds, such as an adapter's product. Neither knows the other.

On CPUs, 16-bit weights are packed once in the order that our kernels read. Float32 keeps the arithmetic of
`torch.nn.functional.linear`, bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.kernels import linear, memory
from pdserve.kernels.linear import PackedWeight


class LinearMethod(Protocol):
    """Owns the weights of a layer.

    Attributes:
        features: numbers of a row of the input, and of the output.
        num_bytes: size of the weights, the bias included.
    """

    features: tuple[int, int]
    num_bytes: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features], each row apart from the others."""


class Delta(Protocol):
    """Adds to the output of a layer."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y [..., out_features] with what is added for x [..., in_features]. May change y in place."""


class PlainMethod(torch.nn.Module):
    """The layer as it was."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        weight = cast(torch.Tensor, layer.weight)
        rows, columns = weight.shape
        self.features = (columns, rows) if isinstance(layer, torch.nn.Linear) else (rows, columns)
        self.num_bytes = sum(parameter.nbytes for parameter in layer.parameters())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


class PackedMethod(torch.nn.Module):
    """A weight for 16-bit rows that is packed, in 16 bits or fewer. The original can be freed."""

    def __init__(self, weight: PackedWeight, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.features = weight.features
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.weight = weight  # no parameter, so that nothing takes it for the plain weight
        self.bias = bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod`."""
        return linear.linear(x, self.weight, self.bias)


class Linear(torch.nn.Module):
    """A linear layer of a model.

    Attributes:
        delta: what is added to its output; None: nothing.
    """

    def __init__(self, method: LinearMethod) -> None:
        super().__init__()
        self.method = method
        self.in_features, self.out_features = method.features
        self.delta: Delta | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        y = self.method.product(x)
        return y if self.delta is None else self.delta.add(x, y)


def add_delta(model: torch.nn.Module, name: str, delta: Delta) -> None:
    """Add a delta to the output of the linear layer with this dotted name.

    Raises:
        ValueError: the model has no such layer, or it has a delta.
    """
    parent, _, child = name.rpartition(".")
    try:
        owner = model.get_submodule(parent)
        layer = owner.get_submodule(child)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no layer {name}") from error
    if type(layer) in (torch.nn.Linear, Conv1D):
        layer = Linear(PlainMethod(layer))
        setattr(owner, child, layer)
    if not isinstance(layer, Linear) or layer.delta is not None:
        kind = "has a delta" if isinstance(layer, Linear) else f"is a {type(layer).__name__}, not a linear layer"
        raise ValueError(f"{name} of {type(model).__name__} {kind}")
    layer.delta = delta


def packed_weight(parameter: torch.nn.Parameter, *, transposed: bool) -> PackedWeight:
    """Return a packed copy of a 16-bit weight; if it has codes of fewer bits, of these."""
    if (codes := getattr(parameter, "codes", None)) is None:
        return linear.pack(parameter.data, transposed=transposed)
    weight: PackedWeight = codes.pack(parameter.dtype, transposed=transposed)
    return weight


def replace_children(model: torch.nn.Module, make: Callable[[Any], torch.nn.Module | None]) -> int:
    """Replace in place the submodules in whose stead `make` returns another one, and return how many these are."""
    count = 0
    for parent in list(model.modules()):
        children: Iterator[tuple[str, Any]] = parent.named_children()
        for name, child in children:
            if (other := make(child)) is not None:
                setattr(parent, name, other)
                count += 1
    return count


def prepack(model: torch.nn.Module) -> int:
    """Replace in place the linear layers of a model on the CPU that are in 16 bits.

    A weight shared with the embedding is kept twice.

    Returns:
        The number of layers replaced.
    """
    packed: list[PackedMethod] = []

    def pack(layer: Any) -> Linear | None:
        if type(layer) not in (torch.nn.Linear, Conv1D) or layer.weight.dtype not in FUSED_DTYPES:
            return None
        packed.append(PackedMethod(packed_weight(layer.weight, transposed=type(layer) is Conv1D), layer.bias))
        return Linear(packed[-1])

    count = replace_children(model, pack)
    for method in packed:  # after all are allocated: neighbours share pages
        for tensor in method.weight.tensors():
            memory.huge_pages(tensor, written=True)
    return count
