"""Chunked attention (Llama 4): layers attend within chunks of positions, others scale queries by the log of their position.

Up to the end of the first chunk, and before the scale leaves 1, both are ordinary causal attention. The context ends there.
"""

from typing import Any

import torch

from pdserve.engine.architectures.adapters import Source


def first_chunk(text_config: Any) -> int | None:
    """Return the number of positions with ordinary attention; None if there is no limit."""
    limits = []
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        limits.append(text_config.attention_chunk_size)
    if getattr(text_config, "attn_temperature_tuning", False):
        limits.append(int(text_config.floor_scale) - 1)
    return min(limits, default=None)


def adapt(model: torch.nn.Module, source: Source) -> None:
    """Leave out in place the scale of queries, which is 1 for the positions supported: an adapter.

    transformers would take the row of a token in the batch for its position.
    """
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            setattr(module, "attn_temperature_tuning", False)  # noqa: B010, mypy takes it for a layer
