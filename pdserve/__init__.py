"""pdserve: disaggregated prefill/decode LLM serving. Read docs/architecture.md for the way in."""

import importlib

__version__ = "0.1.0"
_FILES = {  # of each class for offline use
    **dict.fromkeys(("LLM", "AsyncLLM"), "llm"),
    **dict.fromkeys(
        ("BeamSearchParams", "GuidedDecodingParams", "LoRARequest", "SamplingParams", "StructuredOutputsParams"),
        "params",
    ),
    **{"KVTransferConfig": "arguments", "RequestOutput": "outputs"},
}
__all__ = [*_FILES, "__version__"]


def __getattr__(name: str) -> object:
    """Load the classes for offline use when they are first asked for: `import pdserve` stays cheap."""
    if name in _FILES:
        return getattr(importlib.import_module(f"pdserve.offline.{_FILES[name]}"), name)
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
