"""Checks the order of accesses to memory on a GPU without one, by vector clocks of streams, events and the host.

A `StreamChecker` takes the place of `torch.cuda`, and tensors on the CPU that of a GPU's. Two accesses to the same bytes, one
of which writes, must be ordered: by their stream, an event, or a wait of the host. Operators run at once; only what orders
them on a GPU counts. Besides:
    - Memory is in use on the stream that allocates it until then, since torch's allocator gives out what was freed on the
      host, and freed memory must not be in use elsewhere.
    - Only the engine's thread may wait for the model's stream.

The host is one actor: what one of its threads has waited for is over for all. `torch.zeros` allocates host memory here, all
else that of a GPU.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pdserve.kernels import reference
from pdserve.kernels.gpu.copies import PoolCopies

HOST, MODEL = "host", "model"
READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")
Clock = dict[str, int]
Bytes = tuple[int, int]  # address of the first, and of that behind the last


class Access(NamedTuple):
    first: int
    end: int
    stream: str
    tick: int
    writes: bool
    what: str


def extent(x: torch.Tensor) -> Bytes:
    """Return the addresses from the first to the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.itemsize if x.numel() else 0)


def rows_of(x: torch.Tensor, rows: Iterable[int]) -> list[Bytes]:
    return [extent(x[row]) for row in rows]


def joined(*clocks: Clock) -> Clock:
    return {name: max(clock.get(name, 0) for clock in clocks) for name in {name for clock in clocks for name in clock}}


class WatchedStream:
    def __init__(self, checker: "StreamChecker", name: str) -> None:
        self.checker, self.name = checker, name

    def wait_event(self, event: "WatchedEvent") -> None:
        self.checker.advance(self.name, event.clock)

    def synchronize(self) -> None:
        self.checker.wait(self.name)


class WatchedEvent:
    clock: Clock = {}  # noqa: RUF012 - replaced as a whole

    def __init__(self, checker: "StreamChecker") -> None:
        self._checker = checker

    def record(self, stream: WatchedStream) -> None:
        self.clock = self._checker.clock(stream.name)

    def synchronize(self) -> None:
        self._checker.advance(HOST, self.clock)


class StreamChecker:
    """Stands in for `torch.cuda`. Made by the engine's thread.

    Attributes:
        errors: what was not ordered, in sentences.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {}, MODEL: {}}
        self._accesses: list[Access] = []
        self._host_memory: set[Bytes] = set()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._engine = threading.get_ident()

    # ---- torch.cuda -------------------------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> WatchedStream:
        with self._lock:
            name = f"stream {len(self._clocks)}"
            self._clocks[name] = {}
            return WatchedStream(self, name)

    def Event(self) -> WatchedEvent:
        return WatchedEvent(self)

    def current_stream(self, device: object = None) -> WatchedStream:
        return WatchedStream(self, getattr(self._local, "stream", MODEL))

    @contextmanager
    def stream(self, stream: WatchedStream) -> Iterator[None]:
        before = self.current_stream().name
        self._local.stream = stream.name
        try:
            yield
        finally:
            self._local.stream = before

    # ---- clocks -----------------------------------------------------------------------------------------------

    def clock(self, stream: str) -> Clock:
        with self._lock:
            return joined(self._clocks[stream], self._clocks[HOST])

    def advance(self, stream: str, clock: Clock) -> None:
        with self._lock:
            self._clocks[stream] = joined(self._clocks[stream], clock)

    def wait(self, stream: str) -> None:
        """The host waits for a stream."""
        self.advance(HOST, self._clocks[stream])

    def wait_for_current(self, what: str) -> None:
        """The host waits for this thread's stream, as for a copy from or to memory that is not pinned."""
        name = self.current_stream().name
        if name == MODEL and not self.is_engine:
            self.errors.append(f"{what} waits for the model in a thread beside it")
        self.wait(name)

    @property
    def is_engine(self) -> bool:
        return threading.get_ident() == self._engine and not getattr(self._local, "is_worker", False)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """What is done within is that of another thread than the engine's."""
        self._local.is_worker = True
        try:
            yield
        finally:
            self._local.is_worker = False

    # ---- accesses ---------------------------------------------------------------------------------------------

    def launch(self, what: str, reads: Sequence[Bytes], writes: Sequence[Bytes]) -> None:
        """Access memory on this thread's stream."""
        self._access(self.current_stream().name, what, reads, writes)

    def on_host(self, what: str, reads: Sequence[Bytes] = (), writes: Sequence[Bytes] = ()) -> None:
        """Access memory from the host, or by a library that it calls."""
        self._access(HOST, what, reads, writes)

    def _access(self, stream: str, what: str, reads: Sequence[Bytes], writes: Sequence[Bytes]) -> None:
        with self._lock:
            clock = self.clock(stream)
            tick = clock[stream] = clock.get(stream, 0) + 1
            self._clocks[stream] = clock
            for places, is_write in ((reads, False), (writes, True)):
                for first, end in places:
                    self._add(Access(first, end, stream, tick, is_write, what), clock)

    def _add(self, new: Access, clock: Clock) -> None:
        """Compare an access with those before it, and keep it in place of those that it stands for."""
        kept = list[Access]()
        for old in self._accesses:
            if not (old.first < new.end and new.first < old.end):
                kept.append(old)
                continue
            is_ordered = clock.get(old.stream, 0) >= old.tick
            if not is_ordered and (old.writes or new.writes):
                self.errors.append(f"{new.what} on {new.stream} is not behind {old.what} on {old.stream}")
            covers = new.first <= old.first and old.end <= new.end
            if not (is_ordered and covers and (new.writes or not old.writes)):
                kept.append(old)
        self._accesses = [*kept, new]

    def allocated_on_host(self, x: torch.Tensor) -> None:
        place = extent(x)
        self._host_memory.add(place)
        weakref.finalize(x.untyped_storage(), self._host_memory.discard, place).atexit = False

    def is_host_memory(self, x: torch.Tensor) -> bool:
        first, end = extent(x)
        return any(start <= first and end <= stop for start, stop in [*self._host_memory])

    def allocated(self, x: torch.Tensor, what: str) -> None:
        """Take note of a new tensor, and of its end."""
        self.launch(what, [], [extent(x)])
        storage, stream = x.untyped_storage(), self.current_stream().name
        place = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        weakref.finalize(storage, self._freed, place, stream, what).atexit = False

    def _freed(self, place: Bytes, stream: str, what: str) -> None:
        with self._lock:
            clock, kept = self.clock(stream), list[Access]()
            for access in self._accesses:
                if not (access.first < place[1] and place[0] < access.end):
                    kept.append(access)
                elif clock.get(access.stream, 0) < access.tick:
                    self.errors.append(f"memory of {what} on {stream} is freed before {access.what} on {access.stream}")
            self._accesses = kept


class Watch(TorchDispatchMode):
    """Shows a checker what operators of torch access in this thread."""

    def __init__(self, checker: StreamChecker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func._schema.name
        inputs, outputs = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and (x.dim() or name in READS)]
            for tree in ((args, kwargs), result)
        )  # without numbers
        known = {x.untyped_storage().data_ptr() for x in inputs}
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        new = [x for x in outputs if x.untyped_storage().data_ptr() not in known and x.numel()]
        if name == "aten::zeros":
            self._checker.allocated_on_host(result)
            return result
        if not (written or new or name in READS) or all(map(self._checker.is_host_memory, [*inputs, *written])):
            return result  # a view, or work of the host
        reads = [extent(x) for x in inputs if not any(x is one for one in written)]
        writes = [extent(x) for x in written]
        if name == "aten::index_select":
            reads = [*rows_of(args[0], args[2].tolist()), extent(args[2])]
        elif name == "aten::index_copy_":
            writes = rows_of(args[0], args[2].tolist())
        self._checker.launch(name, reads, writes)
        for x in new:
            self._checker.allocated(x, name)
        is_copy = name == "aten::copy_" and not (args[2:] or (kwargs.get("non_blocking", False),))[0]
        to_host = name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu")
        if name in READS or is_copy or to_host:
            self._checker.wait_for_current(name)
        return result


class WatchedKernel:
    """The reference kernel's copies of blocks, which access single blocks of the pool."""

    def __init__(self, checker: StreamChecker) -> None:
        self._checker = checker

    def gather_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
        with _disable_current_modes():
            self._checker.launch(
                "gather", [*rows_of(pool_N, blocks_C.tolist()), extent(blocks_C)], [extent(out_C)] if len(out_C) else []
            )
            reference.gather_blocks(pool_N, blocks_C, out_C)

    def scatter_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
        with _disable_current_modes():
            self._checker.launch("scatter", [extent(values_C), extent(blocks_C)], rows_of(pool_N, blocks_C.tolist()))
            reference.scatter_blocks(pool_N, blocks_C, values_C)


class WatchedCopies(PoolCopies):
    """Copies of a pool under watch."""

    def __init__(self, pool_N: torch.Tensor, checker: StreamChecker) -> None:
        kernel: Any = WatchedKernel(checker)
        super().__init__(pool_N, kernel, checker)


@contextmanager
def watching(checker: StreamChecker) -> Iterator[None]:
    """Show the checker what this thread does, and all threads that start within."""
    run = threading.Thread.run

    def run_watched(thread: threading.Thread) -> None:
        with Watch(checker):
            run(thread)

    with pytest.MonkeyPatch.context() as patch, Watch(checker):
        patch.setattr(threading.Thread, "run", run_watched)
        yield
