"""The import of transformers' models without torch's compiler and distributed tensors: half of its time, and unused here.

Decorators for torch.compile load the compiler, sympy and Triton, and so do modules for distributed tensors, unless torch was
built without these. While this module imports transformers, it has neither; the compiler can be loaded afterwards.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class _NoCompiler(ModuleType):
    """Stands for `torch._dynamo`, of which only decorators are called, and modules imported that need no compiler."""

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _leave_as_it_is


def _leave_as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    """The decorator that does nothing, with or without arguments."""
    return _leave_as_it_is if function is None else function


if "torch._dynamo" not in sys.modules:
    is_available = torch.distributed.is_available
    sys.modules["torch._dynamo"] = _NoCompiler()
    torch.distributed.is_available = lambda: False
    try:
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available = is_available
        del sys.modules["torch._dynamo"]
