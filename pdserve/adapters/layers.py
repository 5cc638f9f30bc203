"""The layers of a model to which adapters add: which matrices they have by slot, and whether they add in this step.

    prepare (any thread) ─► attach: once for each layer ─► fill: a slot ─► set_rows: the slot of each row of a step

On several ranks, each has its part of each layer; see `ranked_layers.py`.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.adapters.checkpoint import Adapter, AdapterError, Files, parse_adapter
from pdserve.adapters.expert_delta import ExpertsDelta, forward_with
from pdserve.adapters.experts import (
    ExpertLayer,
    LowRank,
    StackedWeight,
    expert_layer,
    router,
    routers,
    stack,
    stacked_weights,
    whole_stack,
)
from pdserve.adapters.sharing import Copy
from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import find_shard
from pdserve.engine.cpu_fusion.linear_method import Linear, add_delta
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.parallel.shard import SummedLayer
from pdserve.engine.step_graph import Graphs
from pdserve.kernels import lora, native


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that is ready for the model's layers.

    Attributes:
        path: from where it was read.
        invocation: see `Adapter`.
        layers: its matrices by the names of the layers; of experts, by those of their modules and weights.
        copy: of its files, if it came from the KV store.
    """

    digest: bytes
    rank: int
    path: str
    invocation: tuple[int, ...]
    layers: lora.Layers = field(repr=False)
    copy: Copy | None = None


class _LayerDelta:
    """Adds to the output of one layer. Which rows add what is the same for all layers of a step: `rows`.

    Raises:
        ValueError: the model has no such layer.
    """

    def __init__(self, model: torch.nn.Module, name: str, rows: lora.Rows, max_rank: int, dtype: torch.dtype) -> None:
        self._table = lora.Table(rows.num_slots)
        self._rows, self._max_rank, self._dtype = rows, lora.padded(max_rank), dtype
        self._add = lora.add if native.is_available() else lora.add_by_torch
        self._join(model, name)

    def _join(self, model: torch.nn.Module, name: str) -> None:
        add_delta(model, name, self)
        self._layer: Any = model.get_submodule(name)

    def fill(self, slot: int, of: lora.Matrices | None) -> None:
        """Put an adapter's matrices into a slot; None: it has none."""
        self._table.set(slot, of)

    def switch(self, on: bool) -> None:
        """Let the layer add, or not."""
        self._layer.delta = self if on else None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Delta`. Raises ValueError if the layer gets other rows than the step has, or in another dtype."""
        if x.dtype != self._dtype or x.numel() != self._rows.num_rows * x.shape[-1]:
            raise ValueError(f"a layer gets {x.numel() // x.shape[-1]} rows of {x.dtype}")
        return self._add(x, y, self._rows, self._table, self._max_rank)


class _RouterDelta(_LayerDelta):
    """Adds to the scores by which a router chooses experts, amid its forward, in float32: many routers compute them so."""

    def _join(self, model: torch.nn.Module, name: str) -> None:
        self._layer, self._dtype = model.get_submodule(name), torch.float32

    def switch(self, on: bool) -> None:
        if on:
            self._layer.forward = partial(forward_with, self._layer, self._add_to_scores)
        elif "forward" in vars(self._layer):
            del self._layer.forward

    def _add_to_scores(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.add(x.float(), y.float()).to(y.dtype)


class AdaptedLayers:
    """The layers of one model. The engine thread calls all methods but `prepare` and `parse`."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._runner, self._max_rank = runner, config.max_lora_rank
        self._rows = lora.Rows(config.max_loras, max(config.max_num_batched_tokens, config.max_num_seqs))
        self._experts, self._routers = stacked_weights(runner.checkpoint.model), routers(runner.checkpoint.model)
        group = runner.checkpoint.group
        self._shard = None if group is None else find_shard(config, group)
        self._layers: dict[str, Any] = {}  # `_LayerDelta` or `ExpertsDelta`
        self._graphs: Graphs | None = None  # of steps with adapters, or while such a step runs, of those without
        self._is_on = False

    def parse(self, files: Files) -> Adapter:
        """Return the adapter in files. Raises AdapterError as `parse_adapter`."""
        return parse_adapter(files, self._max_rank, self._experts, self._routers)

    def prepare(self, files: Files, copy: Copy | None = None) -> LoadedAdapter:
        """Return the adapter in files, ready for this model. Raises AdapterError: it is not of this model, or see `parse`."""
        found = self.parse(files)
        model, dtype = self._runner.checkpoint.model, self._runner.checkpoint.dtype
        layers: lora.Layers = {}
        of_experts = dict[ExpertLayer, LowRank]()
        for name, whole in found.layers.items():
            expert, router_name = expert_layer(name, self._experts), router(name, self._routers)
            inner, layer = router_name or _inner(model, name), self._part(files, name, whole)
            features = self._routers.get(inner) or _features(model, inner) if expert is None else expert.features
            if features != (given := (layer.a_RK.shape[1], layer.b_RN.shape[1])):
                base = "no such linear layer" if features is None else f"one of {features[0]} → {features[1]}"
                raise AdapterError(
                    f"{files.path} is of another base: {name} maps {given[0]} → {given[1]}, and here is {base}"
                )
            if inner in layers:
                raise AdapterError(f"{files.path} has matrices of {name} under two names")
            if expert is None:
                own_dtype = dtype if router_name is None else torch.float32
                layers[inner] = lora.matrices(layer.a_RK, layer.b_RN, layer.scale, own_dtype)
            elif expert.expert >= expert.weight.num_experts:
                raise AdapterError(f"{files.path} is of another base: it names {name}, and here are {expert.weight}")
            elif expert in of_experts or expert.weight.name in found.stacks.get(expert.module, ()):
                raise AdapterError(f"{files.path} has matrices of {name} under two names")
            else:
                of_experts[expert] = layer
        layers |= _stacks(found, of_experts, dtype)
        return LoadedAdapter(found.digest, found.rank, str(files.path), found.invocation, lora.together(layers), copy)

    def _part(self, files: Files, name: str, layer: LowRank) -> LowRank:
        """Return this rank's part of what is added to a layer. Raises AdapterError if it is one of experts."""
        if self._shard is None:
            return layer
        if ".experts." in name or router(name, self._routers):
            what = "adapters of experts and routers need one device, so leave out --tensor-parallel-size"
            raise AdapterError(f"{files.path} names {name}: {what}")
        return LowRank(*self._shard.low_rank(name, layer.a_RK, layer.b_RN), layer.scale)

    def attach(self, adapter: LoadedAdapter) -> None:
        """Let an adapter's layers add from now on. Raises AdapterError: the model does not run with it, and is as before."""
        if new := [layer for layer in adapter.layers if layer not in self._layers]:
            try:
                self._attach(new)
            except Exception as error:  # whatever the model does with its layers
                kind = type(self._runner.checkpoint.model).__name__
                raise AdapterError(f"{adapter.path}: {kind} does not run with it: {error}") from error

    def _attach(self, names: list[str]) -> None:
        """Prepare further layers, and try them. Recorded steps with adapters lack them, and are recorded again."""
        self._switch(False)
        model: Any = self._runner.checkpoint.model
        before = {name: model.get_submodule(name) for name in names}
        added, rest = dict[str, Any](), (self._rows, self._max_rank, self._runner.checkpoint.dtype)
        try:
            for name in names:
                if name in self._experts:
                    added[name] = ExpertsDelta(before[name], self._experts[name], *rest)
                else:
                    kind = _RouterDelta if name in self._routers else _LayerDelta
                    added[name] = kind(model, name, *rest)
                added[name].switch(True)
            self._rows.set([-1, -1])
            with self._runner.scratch_sequence() as last_logits:
                last_logits(0, 2)
        except Exception:
            for name, layer in before.items():
                model.set_submodule(name, layer)
            raise
        finally:
            for delta in added.values():
                delta.switch(False)
        self._layers |= added
        self._graphs = self._runner.new_graphs()

    def fill(self, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot."""
        for name, delta in self._layers.items():
            delta.fill(slot, adapter.layers.get(name))

    def set_rows(self, slots: list[int]) -> None:
        """Set the slot of each row of the next step; -1, or none at all: it has no adapter."""
        self._switch(max(slots, default=-1) >= 0)
        if self._is_on:
            self._rows.set(slots)

    def _switch(self, on: bool) -> None:
        """Let layers add something, or not: then a step is as on an engine without adapters."""
        if on == self._is_on:
            return
        self._is_on = on
        for delta in self._layers.values():
            delta.switch(on)
        self._runner.graphs, self._graphs = self._graphs, self._runner.graphs


def _stacks(found: Adapter, layers: dict[ExpertLayer, LowRank], dtype: torch.dtype) -> dict[str, dict[str, lora.Stack]]:
    """Return an adapter's matrices for experts by the names of their modules and weights.

    Args:
        layers: those of single experts.
    """
    of_weights = dict[tuple[str, StackedWeight], dict[ExpertLayer, LowRank]]()
    for layer, delta in layers.items():
        of_weights.setdefault((layer.module, layer.weight), {})[layer] = delta
    stacks = dict[str, dict[str, lora.Stack]]()
    for (module, weight), of_weight in of_weights.items():
        stacks.setdefault(module, {})[weight.name] = stack(weight, of_weight, dtype)
    for module, deltas in found.stacks.items():
        for name, delta in deltas.items():
            stacks.setdefault(module, {})[name] = whole_stack(delta, dtype)
    return stacks


def _inner(model: torch.nn.Module, name: str) -> str:
    """Return the name of a linear layer within what sums it over ranks, if something does."""
    try:
        return f"{name}.part" if isinstance(model.get_submodule(name), SummedLayer) else name
    except AttributeError:
        return name


def _features(model: torch.nn.Module, name: str) -> tuple[int, int] | None:
    """Return the numbers of a row of a layer's input and output; None if the model has no such linear layer inside."""
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError:
        return None
    if layer is cast(Any, model).get_output_embeddings():
        return None  # which gets only some of a step's rows
    if type(layer) in (torch.nn.Linear, Linear):
        return layer.in_features, layer.out_features
    return (layer.weight.shape[0], layer.weight.shape[1]) if type(layer) is Conv1D else None
