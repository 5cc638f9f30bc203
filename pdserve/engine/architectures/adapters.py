"""Adapters of architectures: what transformers' code of a model lacks here, found by entry point.

[project.entry-points."pdserve.architectures"]
mine = "my_package.adapter:adapt"
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from pdserve import plugins
from pdserve.errors import SetupError
from pdserve.kv_spec import KVSpec

GROUP = "pdserve.architectures"
# Missed where the package was updated but not installed.
OURS = ("attention-sinks", "chunked-attention", "class-head", "latent-attention", "states")


@dataclass(frozen=True)
class Source:
    """Origin of a loaded model: its checkpoint, and the flag by which its outputs are pooled.

    Attributes:
        path: directory of the checkpoint.
        config: of the checkpoint, as transformers has it.
        pooling: the flag `--pooling`.
    """

    path: Path
    config: Any
    pooling: str


@runtime_checkable
class Packs(Protocol):
    """A module that an adapter puts into a model, and whose own matrices are no `nn.Linear`."""

    def pack(self) -> None:
        """Pack them for the CPU's kernels, so that a row has the same bits in any batch."""


class Adapter(Protocol):
    def __call__(self, model: Any, source: Source) -> KVSpec | None:
        """Change a loaded model in place if it is of this architecture, before layers are fused; do nothing otherwise.

        Returns:
            What the model's KV is; None: what its attention layers show, see `kv_probe.py`.

        Raises:
            UnsupportedAttention: the model is of this architecture, and the kernels do not support it.
        """


def adapt(model: Any, source: Source) -> KVSpec | None:
    """Pass a model to all adapters, and return what one of them says about its KV.

    Raises:
        SetupError: an adapter cannot be imported, or several know the KV.
    """
    specs = dict[str, KVSpec]()
    for name in sorted({*OURS, *plugins.names(GROUP)}):
        if (spec := cast(Adapter, plugins.load(GROUP, name))(model, source)) is not None:
            specs[name] = spec
    if len(specs) > 1:
        raise SetupError(
            f"{GROUP}: {' and '.join(specs)} both say what the KV of {type(model).__name__} is; remove one"
        )
    return next(iter(specs.values()), None)
