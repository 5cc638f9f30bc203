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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from pdserve.adapters.checkpoint import AdapterError, Files, local_folder, read_files
from pdserve.adapters.layers import AdaptedLayers, LoadedAdapter
from pdserve.adapters.ranked_layers import LeadingLayers
from pdserve.adapters.sharing import AdapterStore, Copy, StoreError
from pdserve.adapters.slot_table import SlotTable
from pdserve.config import EngineConfig, InstanceConfig
from pdserve.engine.adapters import Host
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.errors import RequestError, SetupError
from pdserve.keys import pack_tokens
from pdserve.kv_transfer.connector import Outcome
from pdserve.proto import pdserve_pb2 as pb
from pdserve.ranks.runners import LeadingRunner

log = logging.getLogger(__name__)

OnDone = Callable[[str], None]
NUM_RETIRED = 4  # adapters that have lost their names, and are kept


class Adapters:
    """The adapters of one engine; see `pdserve.engine.adapters`. The engine thread calls all methods but `read`.

    Raises:
        SetupError: the settings exclude adapters, or one of --lora-modules cannot be used.
    """

    def __init__(self, config: EngineConfig, runner: "ModelRunner | PacedRunner") -> None:
        runner = _checked(runner)
        layers = LeadingLayers(runner, config) if isinstance(runner, LeadingRunner) else AdaptedLayers(runner, config)
        self._layers: AdaptedLayers = layers
        self._folder = Path(config.lora_folder).resolve() if config.lora_folder else None
        self._base = config.name
        url = config.connector if isinstance(config, InstanceConfig) else ""
        self._store = AdapterStore(url, runner.checkpoint.layout.groups[0].block_bytes)
        self._names: dict[str, tuple[LoadedAdapter, int]] = {}  # with nanoseconds since 1970, when each got its name
        self._retired: deque[tuple[str, LoadedAdapter, int]] = deque(
            maxlen=NUM_RETIRED
        )  # with name and time of its loss
        self._reading = WeakSet[_Reading]()
        self._by_digest: WeakValueDictionary[bytes, LoadedAdapter] = WeakValueDictionary()
        self._slots = SlotTable(config.max_loras, lambda *filled: self._fill(*filled))
        self._in_slots: dict[int, LoadedAdapter] = {}
        for name, path in config.adapters.items():
            try:
                self.add(name, self.read(local_folder(path)))
            except AdapterError as error:
                raise SetupError(f"--lora-modules {name}: {error}") from error

    def read(self, path: Path) -> LoadedAdapter:
        """Return an adapter, ready for this model.

        Raises:
            AdapterError: it cannot be read, or is not of this model.
        """
        return self._layers.prepare(read_files(path))

    def add(self, name: str, adapter: LoadedAdapter) -> None:
        """Give an adapter a name. One that has it loses it: new requests get the new one, and the others keep theirs.

        Raises:
            AdapterError: the model does not run with it; nothing has changed.
        """
        adapter = self._by_digest.setdefault(adapter.digest, adapter)
        self._layers.attach(adapter)
        self.remove(name)
        self._names[name] = adapter, time.time_ns()
        log.info("adapter %s: rank %d on %d layers, %s", name, adapter.rank, len(adapter.layers), adapter.digest.hex())

    def remove(self, name: str) -> None:
        """Take a name away, if there is an adapter with it. Its requests keep it."""
        if (named := self._names.pop(name, None)) is not None:
            self._retired.append((name, named[0], time.time_ns()))

    def change(self, order: pb.ChangeAdapter, host: Host, on_done: OnDone) -> None:
        """See `Adapters` of the engine."""
        known, reading = self._by_digest.get(order.digest), _Reading(order.name)
        self._reading.add(reading)

        def add(adapter: LoadedAdapter) -> None:
            if reading.is_unloaded:  # the later order holds
                on_done("")
                return
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
            for one in self._reading:
                one.is_unloaded |= one.name == order.name
            on_done("")
        elif known is not None and not order.offers:
            add(known)
        else:
            try:
                threading.Thread(target=work, name="adapter", daemon=True).start()
            except RuntimeError as error:  # there are as many threads as there may be
                on_done(f"{order.path!r} cannot be read: {error}")

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
                files = self._store.get(order.digest, Path(order.path))
                adapter = self._layers.prepare(files, _copy_of(files))
                if adapter.digest != order.digest:
                    raise AdapterError(f"adapter {order.digest.hex()}: the KV store has other weights under its digest")
        except AdapterError as error:
            log.warning("adapter %s: %s; %s", order.name, here, error)
            raise AdapterError(f"{here}; {error}") from error
        return adapter

    def _offer(self, digest: bytes, known: LoadedAdapter | None, host: Host) -> None:
        """Store an adapter. Raises AdapterError."""
        if known is None:
            raise AdapterError(f"adapter {digest.hex()} is not here")
        files = read_files(Path(known.path)) if known.copy is None else known.copy.read()
        if self._layers.parse(files).digest != digest:
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

    def find(self, digest: bytes) -> LoadedAdapter:
        """See `Adapters` of the engine, as for all that follow."""
        try:
            return self._by_digest[digest]
        except KeyError:
            raise RequestError("the adapter is not on this instance", kind="unknown_adapter") from None

    def listing(self) -> list[pb.Adapter]:
        named = [_described(*one, name=name) for name, one in self._names.items()]
        return named + [_described(one, lost_at, lost_name=name) for name, one, lost_at in self._retired]

    def acquire(self, seq: Sequence, *siblings: Sequence) -> bool:
        return self._slots.acquire(seq, *siblings)

    def _fill(self, slot: int, adapter: Any) -> None:
        self._in_slots[slot] = adapter
        self._layers.fill(slot, adapter)

    def release(self, seq: Sequence) -> None:
        self._slots.release(seq)

    def begin_step(self, plan: StepPlan) -> None:
        slots: list[int] = []
        for seq in plan.counts if self._slots.is_used else ():
            slot, count = self._slots.slot_of(seq), plan.num_tokens(seq)
            before = min(max(0, seq.kv.chain.adapter_start - seq.kv.num_computed), count)
            slots += [-1] * before + [slot] * (count - before)
        self._layers.set_rows(slots)


@dataclass(eq=False)
class _Reading:
    """An order whose adapter is being read. `is_unloaded`: its name has been unloaded meanwhile."""

    name: str
    is_unloaded: bool = False


def _copy_of(files: Files) -> Copy | None:
    """Return a copy of files for others, if there is room for one."""
    try:
        return Copy(files)
    except OSError as error:
        log.warning("adapter %s cannot be offered to others: %s", files.path, error)
        return None


def _described(adapter: LoadedAdapter, at: int, **names: str) -> pb.Adapter:
    path, invocation = adapter.path, pack_tokens(adapter.invocation)
    return pb.Adapter(digest=adapter.digest, path=path, loaded_at=at, invocation=invocation, **names)


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


def _checked(runner: "ModelRunner | PacedRunner") -> ModelRunner:
    """Return the runner. Raises SetupError if it runs no model to which adapters can be added."""
    if not isinstance(runner, ModelRunner):
        raise SetupError("adapters (--lora-modules) are supported with a model")
    if runner.device.type != "cpu":
        raise SetupError("adapters (--lora-modules) are supported on CPUs only, for now: use --device cpu")
    if runner.pipeline is not None:
        raise SetupError("adapters (--lora-modules) are not supported with --async-scheduling on")
    return runner
