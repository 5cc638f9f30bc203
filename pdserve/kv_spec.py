"""KV specification of a model: groups of layers, each with the shape of its rows and its window. Plain data.

The model states it, through its attention or an adapter (`engine/architectures/`). The byte format of blocks follows from it
(`sections`, `keys.Layout`), and so do the tensors that layers read and write (`places`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from pdserve.keys import STATE_WINDOW, Layout, Section

STATE_BYTES = 4  # of a number


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
        reads: further layers, each with the layer whose KV it reads.
        states: of recurrent layers, the float32 numbers of each kind of state, by layer and kind.
        num_without: layers that have no KV.
    """

    groups: tuple[KVGroup, ...]
    reads: Mapping[int, int] = field(default_factory=dict)
    states: Mapping[tuple[int, str], int] = field(default_factory=dict)
    num_without: int = 0

    @classmethod
    def uniform(cls, num_layers: int, num_heads: int, head_dim: int) -> "KVSpec":
        """Return the spec of a model whose layers all have full attention and rows of one shape."""
        return cls((KVGroup(tuple(range(num_layers)), num_heads, head_dim),))

    def in_bytes(self, scale_bytes: int) -> "KVSpec":
        """Return the spec of KV in 8 bits: each head of K or V is followed by its scale, and numbers count bytes."""
        return replace(
            self, groups=tuple(replace(group, head_dim=group.head_dim + scale_bytes) for group in self.groups)
        )

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups) + len(self.reads) + self.num_without

    @property
    def windows(self) -> list[int | None]:
        """The windows of the layers, the longest first. Layers of one window are a group of the pool."""
        return sorted({group.window for group in self.groups}, key=lambda window: -(window or math.inf))

    @property
    def window(self) -> int | None:
        """The longest window, in tokens; None if some layer attends to all tokens."""
        return next(iter(self.windows), None)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The parts of a block. Groups whose rows have one shape and one window share a section, in the order of layers."""
        has_groups = len(self.windows) > 1
        return tuple(
            Section(
                num_layers=len(layers),
                num_kv_heads=heads,
                head_dim=size,
                latent=latent,
                window=window or 0 if has_groups else 0,
            )
            for (window, heads, size, latent), layers in self._layers_by_kind()
        )

    def layout(self, **others: Any) -> Layout:
        """Return the byte format of blocks. `others` are the fields of `Layout` about which this says nothing.

        States are padded to whole blocks of the other groups.
        """
        first, *more = self.sections
        layout = Layout(**asdict(first), more=tuple(more), **others)
        if not self.states:
            return layout
        unit = math.lcm(*(group.block_numbers for group in layout.groups))
        numbers = -(-sum(self.states.values()) * STATE_BYTES // layout.itemsize // unit) * unit
        size = numbers // layout.block_size
        state = Section(num_layers=1, num_kv_heads=1, head_dim=size, latent=True, window=STATE_WINDOW)
        return replace(layout, more=(*more, state))

    @property
    def state_offsets(self) -> dict[tuple[int, str], int]:
        """The offset of each state in a row of all states, in float32 numbers."""
        return dict(zip(self.states, accumulate(self.states.values(), initial=0), strict=False))

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each layer, where its KV is: the section, and the layer within. Of one without KV, the section of states."""
        places = {
            layer: (section, at)
            for section, (_, layers) in enumerate(self._layers_by_kind())
            for at, layer in enumerate(layers)
        }
        states = len(self.sections), 0
        return [places.get(self.reads.get(layer, layer), states) for layer in range(self.num_layers)]

    def _layers_by_kind(self) -> Iterator[tuple[tuple[int | None, int, int, bool], list[int]]]:
        """Yield each window and shape of rows with its layers: the longest window first, then the one of the first layer."""
        for window in self.windows:
            layers = dict[tuple[int | None, int, int, bool], list[int]]()
            for group in sorted(self.groups, key=lambda group: group.layers):
                if group.window == window:
                    kind = window, group.num_heads, group.head_dim, group.latent
                    layers.setdefault(kind, []).extend(group.layers)
            yield from ((kind, sorted(of_kind)) for kind, of_kind in layers.items())
