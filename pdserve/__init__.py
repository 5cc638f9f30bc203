"""pdserve: disaggregated prefill/decode LLM serving. Read docs/architecture.md for the way in."""

import importlib

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Load the classes for offline use when they are first asked for: `import pdserve` stays cheap."""
    if name in __all__:
        return getattr(importlib.import_module("pdserve.offline.llm"), name)
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
