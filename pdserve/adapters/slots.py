"""The adapters of an engine: which are here, which have slots, and which rows of a step have which.

    read (any thread) ─► add: under a name ─► acquire: a slot, for a sequence ─► begin_step: rows by slot ─► release

An adapter stays in host memory as long as it has a name or a sequence. One that has lost its name stays a little longer, so
that requests that began with it can move here.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.adapters.checkpoint import AdapterError, Files, parse_adapter, read_files
from pdserve.adapters.sharing import AdapterStore, StoreError
from pdserve.adapters.slot_table import SlotTable
from pdserve.config import EngineConfig, InstanceConfig
from pdserve.engine.adapters import Host
from pdserve.engine.cpu_fusion.linear_method import Linear, add_delta
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.engine.step_graph import Graphs
from pdserve.errors import RequestError, SetupError
from pdserve.kernels import lora, native
from pdserve.keys import pack_tokens
from pdserve.kv_transfer.connector import Outcome
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

OnDone = Callable[[str], None]
NUM_RETIRED = 4  # adapters that have lost their names, and are kept


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that is ready for the model's layers.

    Attributes:
        path: from where it was read.
        invocation: see `Adapter`.
        layers: its matrices by the names of the layers.
    """

    digest: bytes
    rank: int
    path: str
    invocation: tuple[int, ...]
    layers: dict[str, lora.Matrices] = field(repr=False)


class _LayerDelta:
    """Adds to the output of one layer. Which rows add what is the same for all layers of a step: `rows`."""

    def __init__(self, rows: lora.Rows, max_rank: int, dtype: torch.dtype) -> None:
        self.table = lora.Table(rows.num_slots)
        self._rows, self._max_rank, self._dtype = rows, max_rank, dtype
        self._add = lora.add if native.is_available() else lora.add_by_torch

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Delta`. Raises ValueError if the layer gets other rows than the step has, or in another dtype."""
        if x.dtype != self._dtype or x.numel() != self._rows.num_rows * x.shape[-1]:
            raise ValueError(f"a layer gets {x.numel() // x.shape[-1]} rows of {x.dtype}")
        return self._add(x, y, self._rows, self.table, self._max_rank)


class Adapters:
    """The adapters of one engine; see `pdserve.engine.adapters`. The engine thread calls all methods but `read`.

    Raises:
        SetupError: the settings exclude adapters, or one of --lora-modules cannot be used.
    """

    def __init__(self, config: EngineConfig, runner: "ModelRunner | PacedRunner") -> None:
        self._runner = _checked(config, runner)
        self._max_rank = config.max_lora_rank
        self._folder = Path(config.lora_folder).resolve() if config.lora_folder else None
        self._base = config.name
        url = config.connector if isinstance(config, InstanceConfig) else ""
        self._store = AdapterStore(url, self._runner.checkpoint.layout.groups[0].block_bytes)
        self._names: dict[str, tuple[LoadedAdapter, int]] = {}  # with nanoseconds since 1970, when each got its name
        self._retired: deque[LoadedAdapter] = deque(maxlen=NUM_RETIRED)
        self._by_digest: WeakValueDictionary[bytes, LoadedAdapter] = WeakValueDictionary()
        self._slots = SlotTable(config.max_loras, lambda *filled: self._fill(*filled))
        self._in_slots: dict[int, LoadedAdapter] = {}
        most_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
        self._rows = lora.Rows(config.max_loras, most_rows)
        self._layers: dict[str, tuple[Linear, _LayerDelta]] = {}
        self._graphs: Graphs | None = None  # of steps with adapters, or while such a step runs, of those without
        self._is_on = False
        for name, path in config.adapters.items():
            try:
                self.add(name, self.read(Path(path)))
            except AdapterError as error:
                raise SetupError(f"--lora-modules {name}: {error}") from error

    def read(self, path: Path) -> LoadedAdapter:
        """Return an adapter, ready for this model.

        Raises:
            AdapterError: it cannot be read, or is not of this model.
        """
        return self._prepared(read_files(path))

    def _prepared(self, files: Files) -> LoadedAdapter:
        found, path = parse_adapter(files, self._max_rank), files.path
        model, dtype = self._runner.checkpoint.model, self._runner.checkpoint.dtype
        layers = {}
        for name, layer in found.layers.items():
            features = _features(model, name)
            if features != (given := (layer.a_RK.shape[1], layer.b_RN.shape[1])):
                base = "no such linear layer" if features is None else f"one of {features[0]} → {features[1]}"
                raise AdapterError(
                    f"{path} is of another base: {name} maps {given[0]} → {given[1]}, and here is {base}"
                )
            layers[name] = lora.matrices(layer.a_RK, layer.b_RN, layer.scale, dtype)
        return LoadedAdapter(found.digest, found.rank, str(path), found.invocation, layers)

    def add(self, name: str, adapter: LoadedAdapter) -> None:
        """Give an adapter a name. One that has it loses it: new requests get the new one, and the others keep theirs.

        Raises:
            AdapterError: the model does not run with it; nothing has changed.
        """
        adapter = self._by_digest.setdefault(adapter.digest, adapter)
        if new := [layer for layer in adapter.layers if layer not in self._layers]:
            try:
                self._attach(new)
            except Exception as error:  # whatever the model does with its layers
                kind = type(self._runner.checkpoint.model).__name__
                raise AdapterError(f"{adapter.path}: {kind} does not run with it: {error}") from error
        self.remove(name)
        self._names[name] = adapter, time.time_ns()
        log.info("adapter %s: rank %d on %d layers, %s", name, adapter.rank, len(adapter.layers), adapter.digest.hex())

    def remove(self, name: str) -> None:
        """Take a name away, if there is an adapter with it. Its requests keep it."""
        if (named := self._names.pop(name, None)) is not None:
            self._retired.append(named[0])

    def change(self, order: pb.ChangeAdapter, host: Host, on_done: OnDone) -> None:
        """See `Adapters` of the engine."""
        known = self._by_digest.get(order.digest)

        def add(adapter: LoadedAdapter) -> None:
            if order.name in self._names and not order.replaces:
                on_done(f"the name {order.name!r} is taken")
                return
            try:
                self.add(order.name, adapter)
            except AdapterError as error:
                on_done(str(error))
            else:
                on_done("")

        def work() -> None:
            try:
                if order.offers:
                    self._offer(order.digest, known, host)
                    then = partial(on_done, "")
                else:
                    then = partial(add, self._obtained(order, host))
            except AdapterError as error:
                then = partial(on_done, str(error))
            except Exception as error:  # whatever is in the files, the order waits for an answer
                log.exception("adapter %s", order.name)
                then = partial(on_done, f"{order.path!r} cannot be read: {type(error).__name__}")
            host.post(then)

        if order.name == self._base:
            on_done(f"{order.name!r} is the name of the model")
        elif not order.path and not order.offers:
            self.remove(order.name)
            on_done("")
        elif known is not None and not order.offers:
            add(known)
        else:
            threading.Thread(target=work, name="adapter", daemon=True).start()

    def _obtained(self, order: pb.ChangeAdapter, host: Host) -> LoadedAdapter:
        """Return an order's adapter: what is in the folder, unless others have another one. That is in the KV store.

        Raises:
            AdapterError: it is in neither, or cannot be used.
        """
        try:
            adapter = self.read(self._path(order))
            if order.digest in (b"", adapter.digest):
                return adapter
            here = f"{order.path} has other weights here"
        except AdapterError as error:
            if not order.digest:
                raise
            here = str(error)
        try:
            with _counted(host, "load"):
                adapter = self._prepared(self._store.get(order.digest, Path(order.path)))
                if adapter.digest != order.digest:
                    raise AdapterError(f"adapter {order.digest.hex()}: the KV store has other weights under its digest")
        except AdapterError as error:
            log.warning("adapter %s: %s; %s", order.name, here, error)
            raise AdapterError(f"{here}; {error}") from error
        return adapter

    def _offer(self, digest: bytes, known: LoadedAdapter | None, host: Host) -> None:
        """Store an adapter that was read from a folder. Raises AdapterError."""
        if known is None:
            raise AdapterError(f"adapter {digest.hex()} is not here")
        files = read_files(Path(known.path))
        if parse_adapter(files, self._max_rank).digest != digest:
            raise AdapterError(f"{known.path} has other weights now than adapter {digest.hex()}")
        with _counted(host, "store"):
            self._store.put(digest, files)

    def _path(self, order: pb.ChangeAdapter) -> Path:
        """Return the folder that an order names. Raises AdapterError if nothing may be loaded from there."""
        if self._folder is None:
            raise AdapterError("this instance loads no adapters at run time; start it with --lora-folder")
        path = (self._folder / order.path).resolve()
        if not path.is_relative_to(self._folder):
            raise AdapterError(f"{order.path} is outside of --lora-folder {self._folder}")
        return path

    def _attach(self, names: list[str]) -> None:
        """Prepare further layers, and try them. Recorded steps with adapters lack them, and are recorded again."""
        self._switch(False)
        model: Any = self._runner.checkpoint.model
        before = {name: model.get_submodule(name) for name in names}
        added = dict[str, tuple[Linear, _LayerDelta]]()
        try:
            for name in names:
                delta = _LayerDelta(self._rows, lora.padded(self._max_rank), self._runner.checkpoint.dtype)
                add_delta(model, name, delta)
                added[name] = model.get_submodule(name), delta
            self._rows.set([-1, -1])
            with self._runner.scratch_sequence() as last_logits:
                last_logits(0, 2)
        except Exception:
            for name, layer in before.items():
                model.set_submodule(name, layer)
            raise
        finally:
            for layer, _ in added.values():
                layer.delta = None
        self._layers |= added
        self._graphs = self._runner.new_graphs()

    def find(self, digest: bytes) -> LoadedAdapter:
        """See `Adapters` of the engine, as for all that follow."""
        try:
            return self._by_digest[digest]
        except KeyError:
            raise RequestError("the adapter is not on this instance", kind="unknown_adapter") from None

    def listing(self) -> list[pb.Adapter]:
        named = [(name, *one) for name, one in self._names.items()]
        return [
            pb.Adapter(
                name=name,
                digest=one.digest,
                path=one.path,
                loaded_at=loaded_at,
                invocation=pack_tokens(one.invocation),
            )
            for name, one, loaded_at in (*named, *(("", one, 0) for one in self._retired))
        ]

    def acquire(self, seq: Sequence, *siblings: Sequence) -> bool:
        return self._slots.acquire(seq, *siblings)

    def _fill(self, slot: int, adapter: Any) -> None:
        self._in_slots[slot] = adapter
        for name, (_, delta) in self._layers.items():
            delta.table.set(slot, adapter.layers.get(name))

    def release(self, seq: Sequence) -> None:
        self._slots.release(seq)

    def begin_step(self, plan: StepPlan) -> None:
        slots: list[int] = []
        for seq in plan.counts if self._slots.is_used else ():
            slot, count = self._slots.slot_of(seq), plan.num_tokens(seq)
            before = min(max(0, seq.kv.chain.adapter_start - seq.kv.num_computed), count)
            slots += [-1] * before + [slot] * (count - before)
        self._switch(max(slots, default=-1) >= 0)
        if self._is_on:
            self._rows.set(slots)

    def _switch(self, on: bool) -> None:
        """Let layers add something, or not: then a step is as on an engine without adapters."""
        if on == self._is_on:
            return
        self._is_on = on
        for layer, delta in self._layers.values():
            layer.delta = delta if on else None
        self._runner.graphs, self._graphs = self._graphs, self._runner.graphs


@contextmanager
def _counted(host: Host, direction: str) -> Iterator[None]:
    """Count how an adapter's way to the KV store, or from there, ends."""
    outcome = "refused"
    try:
        yield
        outcome = Outcome.OK
    except StoreError as error:
        outcome = error.outcome
        raise
    finally:
        host.post(partial(host.count, "adapter_transfers", 1, direction=direction, outcome=str(outcome)))


def _checked(config: EngineConfig, runner: "ModelRunner | PacedRunner") -> ModelRunner:
    """Return the runner. Raises SetupError if it runs no model to which adapters can be added."""
    if not isinstance(runner, ModelRunner) or config.tensor_parallel_size > 1:
        raise SetupError("adapters (--lora-modules) are supported with a model, on one device")
    if runner.device.type != "cpu":
        raise SetupError("adapters (--lora-modules) are supported on CPUs only, for now: use --device cpu")
    if runner.pipeline is not None:
        raise SetupError("adapters (--lora-modules) are not supported with --async-scheduling on")
    return runner


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
