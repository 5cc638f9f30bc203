"""KV specification of a model: groups of layers, each with the shape of its rows and its window. Plain data.

The model states it, through its attention or an adapter (`engine/architectures/`). The byte format of blocks follows from it
(`sections`, `keys.Layout`), and so do the tensors that layers read and write (`places`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.keys import Layout, Section


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same of each token, for as long.

    Attributes:
        layers: their indices, ascending.
        num_heads: KV heads of a token, of the whole model where ranks share it.
        head_dim: numbers of a head.
        latent: one row serves as K and as V.
        window: tokens that may attend to a token, the token itself included; None: all later ones.
    """

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    latent: bool = False
    window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """The KV of a model.

    Attributes:
        groups: of the layers that have KV of their own.
        reads: the other layers, each with the layer whose KV it reads.
    """

    groups: tuple[KVGroup, ...]
    reads: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def uniform(cls, num_layers: int, num_heads: int, head_dim: int) -> "KVSpec":
        """Return the spec of a model whose layers all have full attention and rows of one shape."""
        return cls((KVGroup(tuple(range(num_layers)), num_heads, head_dim),))

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups) + len(self.reads)

    @property
    def window(self) -> int | None:
        """The longest window, in tokens; None if some layer attends to all tokens."""
        windows = [group.window for group in self.groups if group.window is not None]
        return max(windows) if len(windows) == len(self.groups) else None

    @property
    def sections(self) -> tuple[Section, ...]:
        """The parts of a block. Groups whose rows have one shape share a section, in the order of their layers."""
        return tuple(
            Section(num_layers=len(layers), num_kv_heads=heads, head_dim=size, latent=latent)
            for (heads, size, latent), layers in self._layers_by_shape()
        )

    def layout(self, **others: Any) -> Layout:
        """Return the byte format of blocks. `others` are the fields of `Layout` about which this says nothing."""
        first, *more = self.sections
        return Layout(**asdict(first), more=tuple(more), **others)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each layer, where its KV is: the section, and the layer within."""
        places = {
            layer: (section, at)
            for section, (_, layers) in enumerate(self._layers_by_shape())
            for at, layer in enumerate(layers)
        }
        return [places[self.reads.get(layer, layer)] for layer in range(self.num_layers)]

    def _layers_by_shape(self) -> Iterator[tuple[tuple[int, int, bool], list[int]]]:
        """Yield each shape of rows with its layers, the shape of the first layer first."""
        layers = dict[tuple[int, int, bool], list[int]]()
        for group in sorted(self.groups, key=lambda group: group.layers):
            layers.setdefault((group.num_heads, group.head_dim, group.latent), []).extend(group.layers)
        yield from ((shape, sorted(of_shape)) for shape, of_shape in layers.items())
