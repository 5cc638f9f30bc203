"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

An adapter adds scale · x · Aᵀ · Bᵀ to the output of each of its layers. Its digest is that of these numbers: of every tensor,
and of every setting that changes the sum. Names, paths and what matters in training only are not in it. A setting that is
not known, and has a value, is refused, since it may change the sum.

Shape legend: K input features, N output features, R rank, E experts.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from pdserve.adapters.experts import LowRank, Modules, is_target, targeted, untargeted
from pdserve.errors import reason
from pdserve.keys import KEY_BYTES
from pdserve.lines.untrusted import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of tensors' names, as PEFT saves them
_NO_MODULES: Modules = {}
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "alora_invocation_tokens",
    "target_parameters",
    "peft_version",
}
# Which modules these name shows in the names of tensors; the others matter in training only, or say where it was.
_HARMLESS = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("lora_dropout", "inference_mode", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
    *("megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config"),
}
_NEUTRAL = {"bias": "none"}  # setting → its value without effect, where that is not empty
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole (modules_to_save)",
    "bias": "biases",
    "lora_bias": "biases",
    "trainable_token_indices": "embeddings of tokens",
}
MAX_TOKEN_ID = 2**31
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the base's weights as well


class AdapterError(ValueError):
    """An adapter cannot be used; the text says why, in one sentence."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's numbers.

    Attributes:
        layers: by the dotted names of the base's linear layers, and of layers of its experts.
        stacks: by the dotted names of modules of experts, and the names of their stacked weights.
        digest: of all that changes the sum.
        rank: of its largest layer.
        invocation: tokens of an activated adapter (aLoRA, Greenewald et al. 2025): it is added from where these occur last in
            the prompt on. Empty: it is added to all.
    """

    layers: dict[str, LowRank] = field(repr=False)
    stacks: dict[str, dict[str, LowRank]] = field(repr=False)
    digest: bytes
    rank: int
    invocation: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        deltas = [*self.layers.values(), *(one for each in self.stacks.values() for one in each.values())]
        return sum(one.a_RK.nbytes + one.b_RN.nbytes for one in deltas)


class Files(NamedTuple):
    """The files of an adapter.

    Attributes:
        path: of their folder.
        config, weights: what is in them.
    """

    path: Path
    config: bytes
    weights: bytes


def local_folder(name: str) -> Path:
    """Return the folder of an adapter; of a hub id, such as owner/name, that of its files. Raises AdapterError."""
    path = Path(name).expanduser()
    if path.is_dir() or name[0] in "./~" or name.count("/") != 1:
        return path  # reading it says what is missing
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise AdapterError(f"{name} is no folder, and the hub download failed: {why}") from error


def read_files(path: Path) -> Files:
    """Return the files of the adapter in a folder. Raises AdapterError."""
    try:
        return Files(path, *((path / (file := name)).read_bytes() for name in (CONFIG, WEIGHTS)))
    except OSError as error:
        raise AdapterError(f"{path / file} cannot be read: {reason(error)}") from error


def parse_adapter(
    files: Files, max_rank: int, modules: Modules = _NO_MODULES, routers: Collection[str] = ()
) -> Adapter:
    """Return the adapter in files, in the dtype in which it is there.

    Args:
        modules, routers: of the base, see `stacked_weights` and `routers`.

    Raises:
        AdapterError: it is incomplete, of a kind that is not supported, or of a higher rank.
    """
    path, config, tensors = files.path, _parse_config(files), _parse_tensors(files)
    layers, stacks = dict[str, LowRank](), dict[str, dict[str, LowRank]]()
    targets, is_old = config.get("target_parameters") or [], _is_old(config)
    if unknown := untargeted(targets, modules, routers):
        what = f"target_parameters names {unknown[0]!r}, and here are no weights of experts or routers of that name"
        raise AdapterError(f"{path / CONFIG}: {what}")
    invocation = tuple(config.get("alora_invocation_tokens") or ())
    digest = hashlib.blake2b(json.dumps(invocation).encode() if invocation else b"", digest_size=KEY_BYTES)
    highest = 0
    for name in sorted({name for name, _ in tensors}):
        if (name, "A") not in tensors or (name, "B") not in tensors:
            raise AdapterError(f"{path / WEIGHTS} has only one of the two matrices of {name}")
        a, b = tensors[name, "A"], tensors[name, "B"]
        found = targeted(name, targets, modules)
        key = f"{name}.weight" if is_target(f"{name}.weight", targets) else name
        key = key if found is None else f"{found[0]}.{found[1].name}"
        rank, scale = _rank_and_scale(config, key)
        if rank > max_rank:
            raise AdapterError(f"{path} has rank {rank}, and --max-lora-rank is {max_rank}")
        delta = _linear(a, b, rank, scale) if found is None else found[1].split(a, b, rank, scale, is_old)
        if delta is None:
            of = "" if found is None else f" ({found[1]})"
            shapes = f"{[*a.shape]} and {[*b.shape]}"
            raise AdapterError(f"{path}: {key}{of} has rank {rank} by {CONFIG}, and matrices of {shapes}")
        header: list[Any] = [key, scale.hex(), [[str(one.dtype), *one.shape] for one in (a, b)]]
        header += [is_old] if found is not None else []
        digest.update(json.dumps(header).encode())
        for one in (a, b):
            digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
        highest = max(highest, rank)
        if found is None:
            layers[name] = delta
        else:
            stacks.setdefault(found[0], {})[found[1].name] = delta
    if not tensors:
        raise AdapterError(f"{path / WEIGHTS} has no matrices of LoRA")
    return Adapter(layers, stacks, digest.digest(), highest, invocation)


def _is_old(config: dict[str, Any]) -> bool:
    """Return whether an adapter was saved by PEFT before 0.19; see `StackedWeight`. It says its version since 0.18."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", str(config.get("peft_version")))
    return match is None or (int(match[1]), int(match[2])) < (0, 19)


def _linear(a_RK: torch.Tensor, b_NR: torch.Tensor, rank: int, scale: float) -> LowRank | None:
    """Return what the matrices of a linear layer add; None if they have other shapes."""
    if a_RK.dim() != 2 or b_NR.dim() != 2 or not len(a_RK) == b_NR.shape[1] == rank:
        return None
    return LowRank(a_RK, b_NR.T.contiguous(), scale)


def _parse_config(files: Files) -> dict[str, Any]:
    """Return the settings of an adapter. Raises AdapterError."""
    file = files.path / CONFIG
    try:
        config = read_json(files.config)
    except ValueError as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError(f"{file}: its peft_type is {kind!r}, and only LORA is supported")
    if config.get("init_lora_weights", True) not in _INITS:
        kind = config["init_lora_weights"]
        raise AdapterError(f"{file}: initialised by {kind!r}, it is of other base weights; save it as plain LoRA")
    for name, value in config.items():
        if name in _READ or name in _HARMLESS or not value or value == _NEUTRAL.get(name):
            continue
        what = _REFUSED.get(name, f"the setting {name}")
        raise AdapterError(f"{file}: {what} is not supported; train the adapter without")
    tokens = config.get("alora_invocation_tokens") or []
    if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < MAX_TOKEN_ID for one in tokens):
        raise AdapterError(f"{file}: alora_invocation_tokens is {tokens!r}, and must be a list of token ids")
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise AdapterError(f"{file}: target_parameters is {targets!r}, and must be a list of names")
    for name, kinds in (("r", int), ("lora_alpha", int | float), ("rank_pattern", dict), ("alpha_pattern", dict)):
        if not isinstance(config.setdefault(name, {} if kinds is dict else 8) or {}, kinds):  # null: no pattern
            raise AdapterError(f"{file}: {name} is {config[name]!r}")
    return config


def _rank_and_scale(config: dict[str, Any], name: str) -> tuple[int, float]:
    """Return rank and scale of a layer: those of the first pattern that its name ends with, else of the whole adapter."""

    def of(pattern: str, otherwise: str) -> Any:
        for key, value in (config[pattern] or {}).items():
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        return config[otherwise]

    try:
        rank, alpha = int(of("rank_pattern", "r")), float(of("alpha_pattern", "lora_alpha"))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not abs(scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"the scale is {scale}")
        return rank, scale
    except (ArithmeticError, TypeError, ValueError, re.error) as error:
        raise AdapterError(f"{CONFIG}: rank and alpha of {name} cannot be read: {error}") from error


def _parse_tensors(files: Files) -> dict[tuple[str, str], torch.Tensor]:
    """Return the matrices by the layer's name and A or B. Raises AdapterError.

    They are no views of the file: it may be written anew while they are in use.
    """
    found, file = {}, files.path / WEIGHTS
    try:
        tensors = safetensors.torch.load(files.weights)
    except SafetensorError as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None or not key.startswith(PREFIX):
            raise AdapterError(f"{file}: {key} is no matrix of LoRA, and nothing else is supported")
        if tensor.dtype not in _DTYPES or not tensor.isfinite().all():
            raise AdapterError(f"{file}: {key} is in {tensor.dtype}, or has numbers that are not finite")
        if (match[1].removeprefix(PREFIX), match[2]) in found:
            raise AdapterError(f"{file}: {key} is there under another name as well")
        found[match[1].removeprefix(PREFIX), match[2]] = tensor
    return found
