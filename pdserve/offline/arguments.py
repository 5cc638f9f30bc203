"""Keyword arguments of `LLM`: the flags of `pdserve up`, and arguments of vLLM's class that have an equivalent here."""

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from pdserve.config import UpConfig

# Arguments of vLLM's that change nothing here, and what only `pdserve up` does. Their values that are accepted; empty: all.
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "autoscale": ("",),
    "compilation_config": (),
    "disable_custom_all_reduce": (),
    "disable_log_stats": (),
    "enable_chunked_prefill": (True,),
    "enforce_eager": (),
    "generation_config": ("vllm",),
    "hf_overrides": ({},),
    "keys_file": ("",),
    "load_format": ("auto", "safetensors"),
    "max_instances": (0,),
    "max_logprobs": (),
    "on": ("processes",),
    "pipeline_parallel_size": (1,),
    "revision": (None,),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "score", "classify"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False,),
}
SETTINGS = {name: kind for name, kind in get_type_hints(UpConfig).items() if name not in WITHOUT_EFFECT}
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
    """Return keyword arguments as settings of `pdserve up`. None stands for the default, as in vLLM.

    Raises:
        TypeError: there is no such argument, here or in vLLM as far as it is known here.
        ValueError: a value is of another type, or asks for what is not supported.
    """
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        known = WITHOUT_EFFECT.get(name, ())
        if name not in (names := {*OF_VLLM, *SETTINGS, *WITHOUT_EFFECT}):
            close = difflib.get_close_matches(name, sorted(names), n=1)
            what = f"did you mean {close[0]!r}?" if close else "it takes the flags of `pdserve up`, with underscores"
            raise TypeError(f"LLM has no argument {name!r}; {what}")
        if value is None:
            continue
        if name in OF_VLLM:
            settings |= OF_VLLM[name](value)
        elif name in SETTINGS:
            settings[name] = _typed(name, value)
        elif known and value not in known:
            raise ValueError(f"{name}={value!r} is not supported; leave it out, or give {known[0]!r}")
    return settings


def _store(config: Any) -> dict[str, Any]:
    given = KVTransferConfig(**config) if isinstance(config, dict) else config
    if not isinstance(given, KVTransferConfig):
        raise ValueError(f"kv_transfer_config must be a KVTransferConfig or a dictionary, not {config!r}")
    return {"connector": given.kv_connector}


def _prefix_caching(enabled: Any) -> dict[str, Any]:
    return {"prefix_caching": "on" if enabled else "off"}


def _adapters(enabled: Any) -> dict[str, Any]:
    return {"lora_folder": "/"} if enabled else {}


def _speculation(config: Any) -> dict[str, Any]:
    return {"speculative_config": config if isinstance(config, str) else json.dumps(config)} if config else {}


# Arguments of vLLM's that become a setting.
OF_VLLM: dict[str, Callable[[Any], dict[str, Any]]] = {
    "enable_lora": _adapters,
    "kv_transfer_config": _store,
    "enable_prefix_caching": _prefix_caching,
    "speculative_config": _speculation,
}


def _typed(name: str, value: Any) -> Any:
    """Return the value in the setting's type. Raises ValueError."""
    try:
        return msgspec.convert(os.fspath(value) if isinstance(value, os.PathLike) else value, SETTINGS[name])
    except msgspec.ValidationError as error:
        expected = str(error).partition("`")[2].partition("`")[0].removesuffix(" | null")
        raise ValueError(f"{name} must be {expected}, not {value!r}") from error
