"""Modules that take a second to import, and that each worker collects but only some use."""

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Imports a module when one of its attributes is first read, other than those that pytest looks for when it collects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import anthropic as anthropic
else:
    anthropic = LazyModule("anthropic")
