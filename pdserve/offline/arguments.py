"""Keyword arguments of `LLM`: the flags of `pdserve up`, and arguments of vLLM's class that have an equivalent here."""

import json
from dataclasses import dataclass, fields
from typing import Any

from pdserve.config import UpConfig

SETTINGS = {field.name for field in fields(UpConfig)}
# Arguments of vLLM's that change nothing here, and their values that do not; empty: all.
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "compilation_config": (),
    "disable_custom_all_reduce": (),
    "disable_log_stats": (),
    "enable_chunked_prefill": (True, None),
    "enable_lora": (False,),
    "enforce_eager": (),
    "generation_config": ("vllm",),
    "hf_overrides": (None, {}),
    "load_format": ("auto", "safetensors"),
    "max_logprobs": (),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "revision": (None,),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "score", "classify"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False, None),
}
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass
class KVTransferConfig:
    """Location of the KV store, as in vLLM.

    Attributes:
        kv_connector: the store's URL, such as file:///var/kv or redis://host: vLLM's class names mean nothing here.
        kv_role: one of vLLM's. Every instance stores and loads: the roles of a deployment are `prefill` and `decode`.
    """

    kv_connector: str
    kv_role: str = "kv_both"

    def __post_init__(self) -> None:
        if "://" not in self.kv_connector:
            raise ValueError(f"kv_connector is a URL here, such as file:///var/kv, not {self.kv_connector!r}")
        if self.kv_role not in KV_ROLES:
            raise ValueError(f"kv_role is one of {', '.join(KV_ROLES)}, not {self.kv_role!r}")


def settings_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as settings of `pdserve up`.

    Raises:
        TypeError: there is no such argument, here or in vLLM as far as it is known here.
        ValueError: a value asks for what is not supported.
    """
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "kv_transfer_config":
            given = KVTransferConfig(**value) if isinstance(value, dict) else value
            settings |= {"connector": given.kv_connector} if given else {}
        elif name == "enable_prefix_caching":
            settings["prefix_caching"] = "off" if value is False else "on"
        elif name == "speculative_config" and not isinstance(value, str):
            settings |= {name: json.dumps(value)} if value else {}
        elif name in SETTINGS:
            settings[name] = value
        elif name not in WITHOUT_EFFECT:
            raise TypeError(f"LLM has no argument {name!r}; it takes the flags of `pdserve up`, with underscores")
        elif (known := WITHOUT_EFFECT[name]) and value not in known:
            raise ValueError(f"{name}={value!r} is not supported; leave it out, or give {known[0]!r}")
    return settings
