"""Adapters in PEFT's format for the tests' checkpoints, and checkpoints with them merged: by definition, not by our code."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
STACKED = ("gate_up_proj", "down_proj")  # weights of all experts of a module


def make_adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: tuple[str, ...] = ALL,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter for the linear layers of a base whose names end with one of the targets.

    Args:
        ranks: PEFT's rank_pattern, of which the keys are ends of names here.
        size: of its product, relative to the base's output.
        transposed: the base keeps its weights as [in, out].
        config: further settings of adapter_config.json.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in sorted(load_file(base / "model.safetensors").items()):
        name = key.removesuffix(".weight")
        if weight.dim() != 2 or not name.endswith(targets):
            continue
        r = next((value for end, value in (ranks or {}).items() if name.endswith(end)), rank)
        out_features, in_features = reversed(weight.shape) if transposed else weight.shape
        a = torch.randn((r, in_features), generator=random)
        b = torch.randn((out_features, r), generator=random) * float(weight.float().std()) * size / alpha
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    assert tensors
    path.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    settings |= {"rank_pattern": ranks or {}, "bias": "none", "base_model_name_or_path": "elsewhere"}
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def experts_of(model: Any) -> list[tuple[str, Any]]:
    """Return the modules with stacked weights of experts, by their names."""
    return [(name, one) for name, one in model.named_modules() if hasattr(one, "is_transposed")]


def make_stacked_adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: tuple[str, ...] = STACKED,
    seed: int = 0,
    size: float = 1.0,
    **config: Any,
) -> Path:
    """Write a random adapter for stacked weights of experts, as PEFT 0.21 does with `target_parameters`.

    It wraps the module once for each weight, in the order in which they were registered. A of an expert is a run of rows; in
    the columns of B, the experts take turns.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, module in experts_of(model):
        weights = [(key, one.data) for key, one in module.named_parameters(recurse=False) if key in targets]
        for depth, (_, weight) in enumerate(reversed(weights)):
            experts, *shape = weight.shape
            in_features, out_features = shape if module.is_transposed else reversed(shape)
            a = torch.randn((experts * rank, in_features), generator=random)
            b = (
                torch.randn((out_features, experts * rank), generator=random)
                * float(weight.float().std())
                * size
                / alpha
            )
            wrapped = f"base_model.model.{name}" + ".base_layer" * depth
            tensors |= {f"{wrapped}.lora_A.weight": a, f"{wrapped}.lora_B.weight": b}
    assert tensors
    path.mkdir(parents=True)
    parameters = [f"experts.{key}" for key in sorted(targets)]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [], "bias": "none"}
    settings |= {"target_parameters": parameters, "peft_version": "0.21.2"}
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def merge_stacked(model: Any, adapter: Path, scales: dict[str, float]) -> None:
    """Add an adapter for stacked weights to those of a model."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_parameters"]
    for name, module in experts_of(model):
        keys = [key for key, _ in module.named_parameters(recurse=False) if f"experts.{key}" in targets]
        for depth, key in enumerate(reversed(keys)):
            wrapped, weight = f"base_model.model.{name}" + ".base_layer" * depth, getattr(module, key).data
            a, b = (tensors[f"{wrapped}.lora_{one}.weight"].double() for one in "AB")
            a, b = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight)))
            scale = next(value for end, value in scales.items() if f"{name}.{key}".endswith(end))
            delta = torch.einsum("ore,eri->eio" if module.is_transposed else "ore,eri->eoi", b, a)
            weight.copy_(weight.double() + scale * delta)


def with_settings(path: Path, adapter: Path, **config: Any) -> Path:
    """Write an adapter of the same tensors with other settings."""
    shutil.copytree(adapter, path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def merge(path: Path, base: Path, adapter: Path, scales: dict[str, float], transposed: bool = False) -> Path:
    """Write the base with an adapter added to its weights.

    Args:
        scales: of the layers whose names end so; "" for all others.
    """
    shutil.copytree(base, path)
    if json.loads((adapter / "adapter_config.json").read_text()).get("target_parameters"):
        model = AutoModelForCausalLM.from_pretrained(base)
        merge_stacked(model, adapter, scales)
        model.save_pretrained(path)
        return path
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        scale = next(value for end, value in scales.items() if name.endswith(end))
        product = tensors[key.replace("lora_A", "lora_B")].double() @ a.double()
        weight = weights[f"{name}.weight"]
        product = product.T if transposed else product
        weights[f"{name}.weight"] = (weight.double() + scale * product).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Made(NamedTuple):
    """An adapter, and the scales by which its parts are added, by the ends of the layers' names."""

    path: Path
    scales: dict[str, float]
    transposed: bool = False


def modules(adapters: dict[str, Made]) -> str:
    """Return adapters as --lora-modules."""
    return ",".join(f"{name}={made.path}" for name, made in adapters.items())


LAYERS = {  # of architectures: ends of the names of linear layers and routers
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": (*ATTENTION, "gate", "w1", "w3", "w2"),
    "gpt_oss": ("router", *ATTENTION),
    "qwen3_moe": (*ATTENTION, "gate", "gate_proj", "up_proj", "down_proj"),
}
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")


def six_adapters(folder: Path, base: Path, architecture: str) -> dict[str, Made]:
    """Write adapters of ranks 4 to 64, with rank-stabilised scales, patterns, some of the layers, and another dtype.

    Of mixtures, they have matrices for routers and each layer of each expert; the fifth has some for stacked weights instead.
    """
    names, transposed = LAYERS.get(architecture, ALL), architecture == "gpt2"

    def make(name: str, scales: dict[str, float], **settings: Any) -> Made:
        settings = {"targets": names, "transposed": transposed, **settings}
        return Made(make_adapter(folder / name, base, **settings), scales, transposed)

    first, last = names[0], names[-1]
    fifth = make("attention", {"": 2.0}, rank=10, alpha=20, seed=5, targets=names[:2], size=3)
    if architecture in MIXTURES:
        scales = {"down_proj": 3.0, "gate_up_proj": 1.5}
        stacked: Any = {"rank": 16, "alpha": 6, "alpha_pattern": {"down_proj": 12}, "use_rslora": True, "size": 2}
        fifth = Made(make_stacked_adapter(folder / "stacked", base, **stacked), scales)
    patterns = {"ranks": {last: 16}, "alpha_pattern": {first: 16, last: 16}}
    return {
        "small": make("small", {"": 3.0}, rank=4, alpha=12, seed=1),
        "large": make("large", {"": 0.5}, rank=64, alpha=32, seed=2),
        "stable": make("stable", {"": 2.0}, rank=16, alpha=8, seed=3, use_rslora=True),
        "patterns": make("patterns", {first: 2.0, last: 1.0, "": 1.5}, rank=8, alpha=12, seed=4, **patterns),
        fifth.path.name: fifth,
        "bfloat16": make("bfloat16", {"": 2.0}, rank=8, seed=6, dtype=torch.bfloat16),
    }
