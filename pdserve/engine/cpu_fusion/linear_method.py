"""Linear layers whose weights belong to a method, and to whose output a delta may be added.

    Linear ─► LinearMethod.product(x) ─► Delta.add(x, y)

A method is how a layer's weights are kept and its product is computed: plain, packed for our kernels, or low in bits. A delta
is what another part adds, such as an adapter's product. Neither knows the other.
"""

from typing import Protocol, cast

import torch


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
    if type(layer) is torch.nn.Linear:
        layer = Linear(PlainMethod(layer))
        setattr(owner, child, layer)
    if not isinstance(layer, Linear) or layer.delta is not None:
        kind = "has a delta" if isinstance(layer, Linear) else f"is a {type(layer).__name__}, not a linear layer"
        raise ValueError(f"{name} of {type(model).__name__} {kind}")
    layer.delta = delta
