"""PEFT's names and shapes of adapters on the experts of a mixture, whose weights transformers stacks.

    target_modules     matrices for each layer of each expert, named as in checkpoints: `layers.0.mlp.experts.3.gate_proj`
    target_parameters  matrices for a stacked weight. PEFT wraps the module once for each that it targets, the last one
                       outermost: `layers.0.mlp.experts` has those of `down_proj`, `….experts.base_layer` of `gate_up_proj`

A router has matrices under its own name in both ways: `layers.0.mlp.gate`, a target as `gate` or as `gate.weight`.

Shape legend: E experts, X those that an adapter names, K input features, N output features, R rank.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.kernels import lora
from pdserve.kernels.linear import PackedWeight

# The layers of an expert whose outputs a stacked weight has, in their order, as checkpoints name them.
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
MOST_PARTS = max(len(parts) for names in PARTS.values() for parts in names)
_LAYER = re.compile(r"(.+\.)(\w+)\.experts\.(\d+)\.(\w+)")
_WRAPPED = re.compile(r"(.+?)((?:\.base_layer)*)")


@dataclass(frozen=True)
class LowRank:
    """A low-rank delta: scale · x · Aᵀ · B.

    Attributes:
        a_RK: A; [E, R, K] of a stacked weight.
        b_RN: B, transposed; [E, R, N] of a stacked weight.
    """

    a_RK: torch.Tensor
    b_RN: torch.Tensor
    scale: float


@dataclass(frozen=True)
class StackedWeight:
    """A weight of all experts of a module.

    Attributes:
        features: K and N of one expert.
        is_transposed: it is [E, K, N], not [E, N, K].
        has_parts: its outputs are those of the layers in `PARTS`, one after the other.
    """

    name: str
    num_experts: int
    features: tuple[int, int]
    is_transposed: bool = False
    has_parts: bool = True

    def __str__(self) -> str:
        return f"{self.num_experts} experts, {self.features[0]} → {self.features[1]}"

    def split(self, a: torch.Tensor, b: torch.Tensor, rank: int, scale: float, is_old: bool) -> LowRank | None:
        """Return what PEFT's matrices add, A [E · R, K] and B [N, R · E]; None if these have other shapes.

        Args:
            is_old: they were saved by PEFT before 0.19. It took the first dimension of each expert for K, whatever it was,
                so unless the weight is transposed, A is [E · R, N], and B [K, R · E]. Shapes show that, too, unless K is N.
        """
        (in_features, out_features), experts = self.features, self.num_experts
        is_old = is_old if in_features == out_features else a.shape[1:] == (out_features,)
        swapped = is_old and not self.is_transposed
        rows, columns = (out_features, in_features) if swapped else (in_features, out_features)
        if a.shape != (experts * rank, rows) or b.shape != (columns, rank * experts):
            return None
        a_ERI, b_ERO = a.reshape(experts, rank, rows), b.reshape(columns, rank, experts).permute(2, 1, 0).contiguous()
        return LowRank(b_ERO, a_ERI, scale) if swapped else LowRank(a_ERI, b_ERO, scale)


Modules = Mapping[str, Sequence[StackedWeight]]


def stacked_weights(model: torch.nn.Module) -> Modules:
    """Return the stacked weights of experts, in the order in which they were registered, by the names of their modules."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(type(module).forward, "__wrapped__") or not hasattr(module, "is_transposed"):
            continue  # transformers' decorator of experts sets both
        plain = [(key, one.shape) for key, one in module.named_parameters(recurse=False) if one.dim() == 3]
        packed = [(key, one.shape) for key, one in vars(module).items() if isinstance(one, PackedWeight)]
        transposed, weights = bool(module.is_transposed), []
        for key, (experts, rows, columns) in plain or packed:
            features = (rows, columns) if transposed else (columns, rows)
            has_parts = bool(module.is_concatenated) and not transposed
            weights.append(StackedWeight(key, experts, features, transposed, has_parts))
        if weights:
            found[name] = tuple(weights)
    return found


def routers(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return the features of the modules that multiply by a weight amid other work, as routers of mixtures do, by name."""
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_layer = isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D)
        if weight is not None and weight.dim() == 2 and not is_layer:
            found[name] = (weight.shape[1], weight.shape[0])
    return found


def router(name: str, of: Collection[str]) -> str | None:
    """Return the router that a name stands for. What is around it may have another name in checkpoints, as around experts."""
    if name in of:
        return name
    around, _, last = name.rpartition(".")
    layer = around.rpartition(".")[0]
    alike = [one for one in of if re.fullmatch(rf"{re.escape(layer)}\.\w+\.{re.escape(last)}", one)]
    return alike[0] if len(alike) == 1 else None


def targeted(name: str, targets: Sequence[str], modules: Modules) -> tuple[str, StackedWeight] | None:
    """Return the stacked weight that a name of PEFT's stands for, with the module's; None if there is none.

    Args:
        targets: `target_parameters`.
    """
    match = _WRAPPED.fullmatch(name)
    assert match is not None
    module, depth = match[1], match[2].count(".")
    weights = [one for one in modules.get(module, ()) if is_target(f"{module}.{one.name}", targets)]
    return (module, weights[-1 - depth]) if depth < len(weights) else None


def untargeted(targets: Sequence[str], modules: Modules, routers: Collection[str]) -> list[str]:
    """Return those of `target_parameters` that are neither stacked weights nor those of routers."""
    names = [f"{module}.{one.name}" for module, weights in modules.items() for one in weights]
    names += [f"{one}.weight" for one in routers]
    return [one for one in targets if not any(is_target(name, [one]) for name in names)]


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether `target_parameters` name a parameter."""
    return any(name == one or name.endswith(f".{one}") for one in targets)


class ExpertLayer(NamedTuple):
    """A layer of one expert, as checkpoints name it: of the outputs of a stacked weight, the part with this number."""

    module: str
    weight: StackedWeight
    expert: int
    part: int
    parts: int

    @property
    def features(self) -> tuple[int, int]:
        in_features, out_features = self.weight.features
        return in_features, out_features // self.parts


def expert_layer(name: str, modules: Modules) -> ExpertLayer | None:
    """Return what a name stands for; None if it is no layer of an expert of these modules.

    What is around the experts may have another name in checkpoints than in the model: `block_sparse_moe` is `mlp` there.
    """
    if (match := _LAYER.fullmatch(name)) is None:
        return None
    layer, module, expert, part = match[1], f"{match[1]}{match[2]}.experts", int(match[3]), match[4]
    if module not in modules:
        alike = [one for one in modules if re.fullmatch(rf"{re.escape(layer)}\w+\.experts", one)]
        module = alike[0] if len(alike) == 1 else ""
    for weight in modules.get(module, ()):
        for parts in PARTS.get(weight.name, ()):
            if part in parts and (weight.has_parts or len(parts) == 1):
                return ExpertLayer(module, weight, expert, parts.index(part), len(parts))
    return None


def stack(weight: StackedWeight, layers: Mapping[ExpertLayer, LowRank], dtype: torch.dtype) -> lora.Stack:
    """Return what is added to the layers of some experts as matrices for their stacked weight.

    As PEFT does, A's rows follow each other, and B has the rows of each layer in its columns, and zeros in the others.
    """
    experts = sorted({one.expert for one in layers})
    of_expert = {expert: [(one, layers[one]) for one in sorted(layers) if one.expert == expert] for expert in experts}
    rank = max(sum(len(one.a_RK) for _, one in each) for each in of_expert.values())
    (in_features, out_features), scales = weight.features, []
    a_XRK = torch.zeros((len(experts), rank, in_features), dtype=dtype)
    b_XRN = torch.zeros((len(experts), rank, out_features), dtype=dtype)
    for at, each in enumerate(of_expert.values()):
        start, has_one = 0, len({one.scale for _, one in each}) == 1
        for layer, one in each:
            rows, first = slice(start, start + len(one.a_RK)), layer.part * layer.features[1]
            a_XRK[at, rows] = one.a_RK
            b_RN = one.b_RN if has_one else one.b_RN.float() * one.scale
            b_XRN[at, rows, first : first + layer.features[1]] = b_RN
            start = rows.stop
        scales.append(each[0][1].scale if has_one else 1.0)
    return lora.stack(experts, a_XRK, b_XRN, scales)


def whole_stack(delta: LowRank, dtype: torch.dtype) -> lora.Stack:
    """Return what is added to a stacked weight."""
    count = len(delta.a_RK)
    return lora.stack(range(count), delta.a_RK.to(dtype), delta.b_RN.to(dtype), [delta.scale] * count)
