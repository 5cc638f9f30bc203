"""Adapters of another package: one notes which models it sees, and knows the KV of OPT's; one is wrong about all."""

from typing import Any

from pdserve.engine.architectures.adapters import Source
from pdserve.kv_spec import KVGroup, KVSpec

NUM_LAYERS = 1
seen: list[str] = []


def adapt(model: Any, source: Source) -> KVSpec | None:
    """Return a group for each layer, which a single one would say as well."""
    seen.append(f"{type(model).__name__} of {source.path.name}, pooling {source.pooling}")
    if source.config.model_type != "opt":
        return None
    config = source.config
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    return KVSpec(tuple(KVGroup((layer,), heads, size) for layer in range(config.num_hidden_layers)))


def adapt_too(model: Any, source: Source) -> KVSpec:
    return KVSpec.uniform(NUM_LAYERS, 1, 1)
