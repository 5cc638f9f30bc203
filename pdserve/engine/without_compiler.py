"""transformers without torch's compiler, which nothing here uses and which takes as long to import as the rest of instances.

Decorators for torch.compile load it, and Triton; so do modules for distributed tensors, unless torch was built without these,
and operators on the meta device, on which models are built. It can be loaded afterwards.
"""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_DECORATORS = {"allow_in_graph", "assume_constant_result", "disable"}


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which models are imported and built without the compiler. What needs more than decorators gets it."""
    if _COMPILER in sys.modules:
        yield
        return
    stub = sys.modules[_COMPILER] = _NoCompiler()
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is stub:
            del sys.modules[_COMPILER]


class _NoCompiler(ModuleType):
    """Stands for `torch._dynamo`: decorators do nothing, its modules can be imported, and all else loads the compiler."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _DECORATORS:
            return _leave_as_it_is
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def _leave_as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    """The decorator that does nothing, with or without arguments."""
    return _leave_as_it_is if function is None else function


def _import_models() -> None:
    """Import transformers' models as with a torch without distributed tensors, or with all of it if a version needs these."""
    import transformers

    before, is_available = {*sys.modules}, torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with without_compiler():
            import transformers.masking_utils
            import transformers.modeling_utils
    except (AttributeError, ImportError, NameError, TypeError) as error:
        log.warning("transformers %s is imported with all of torch: %s", transformers.__version__, error)
        for name in {*sys.modules} - before:
            if name.startswith("transformers."):
                del sys.modules[name]
    finally:
        torch.distributed.is_available = is_available


if _COMPILER not in sys.modules:
    _import_models()
