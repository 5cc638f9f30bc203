"""Order of what copies, checksums and the model do to the same memory, over random schedules; and that defects are found."""

import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pdserve.kernels.gpu.copies import Lane
from pdserve.kernels.gpu.rows import GPURows, OwnStream
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.rules.context import make_layout
from pdserve.kv_transfer.staging import StagedConnector
from tests.stream_order import MODEL, StreamChecker, WatchedCopies, extent, rows_of, watching

BLOCKS, WORDS = 12, 8
NUM_SCHEDULES = 2000


class Schedule:
    """One random order of steps, stores, loads and checksums, as engine and connectors may make them.

    A block that is being stored is read by steps, one that is being loaded is not used by them. Work of connectors starts
    after the steps that were launched until then, and is done at any time later.
    """

    def __init__(self, seed: int, checker: StreamChecker) -> None:
        self._random = random.Random(seed)
        self._checker = checker
        self._pool = torch.empty(BLOCKS, WORDS, dtype=torch.int64)
        copies = WatchedCopies(self._pool, checker)
        self._host = copies.rows(4)
        self._out, self._in = copies.lane(4), copies.lane(4)
        self._memory = copies.in_place()
        self._work: list[tuple[Callable[[], None], dict[int, int], list[int]]] = []
        self._stored: dict[int, int] = {}  # how often a block is being read by connectors
        self._loaded: dict[int, int] = {}

    def run(self, length: int) -> None:
        actions = [self._step, self._step, self._store, self._load, self._do_work, self._do_work, self._do_work]
        for _ in range(length):
            self._random.choice(actions)()
        while self._work:
            self._do_work()

    def _pick(self, *busy: dict[int, int]) -> list[int]:
        free = [block for block in range(BLOCKS) if not any(block in one for one in busy)]
        return self._random.sample(free, min(len(free), self._random.randint(1, 4)))

    def _step(self) -> None:
        reads, writes = self._pick(self._loaded), self._pick(self._loaded, self._stored)
        self._checker.launch("a step", rows_of(self._pool, reads), rows_of(self._pool, writes))

    def _queue(self, busy: dict[int, int], blocks: list[int], work: Callable[[], None]) -> None:
        for block in blocks:
            busy[block] = busy.get(block, 0) + 1
        self._work.append((work, busy, blocks))

    def _store(self) -> None:
        if blocks := self._pick(self._loaded):
            kind = self._random.choice([self._store_by_copy, self._store_in_place])
            self._queue(self._stored, blocks, kind(blocks))

    def _store_by_copy(self, blocks: list[int]) -> Callable[[], None]:
        mark, rows = self._out.mark(), self._host[: len(blocks)]

        def work() -> None:
            self._out.read(blocks, rows, mark)
            self._checker.on_host("a connector's put", reads=[extent(rows)])

        return work

    def _store_in_place(self, blocks: list[int]) -> Callable[[], None]:
        mark = self._memory.mark()

        def work() -> None:
            self._memory.wait(mark)
            self._memory.digests(blocks)
            self._checker.on_host("a peer's read", reads=rows_of(self._pool, blocks))

        return work

    def _load(self) -> None:
        if blocks := self._pick(self._loaded, self._stored):
            kind = self._random.choice([self._load_by_copy, self._load_in_place])
            self._queue(self._loaded, blocks, kind(blocks))

    def _load_by_copy(self, blocks: list[int]) -> Callable[[], None]:
        mark, rows = self._in.mark(), self._host[: len(blocks)]

        def work() -> None:
            self._checker.on_host("a connector's get", writes=[extent(rows)])
            self._in.write(rows, blocks, mark)

        return work

    def _load_in_place(self, blocks: list[int]) -> Callable[[], None]:
        mark = self._memory.mark()

        def work() -> None:
            self._memory.wait(mark)
            bounce = self._memory.like(len(blocks))
            self._checker.on_host("a read from a peer", writes=[(bounce.address, bounce.address + bounce.nbytes)])
            self._memory.copy(blocks, bounce, range(len(blocks)))

        return work

    def _do_work(self) -> None:
        if not self._work:
            return
        work, busy, blocks = self._work.pop(self._random.randrange(len(self._work)))
        with self._checker.worker():
            work()
        for block in blocks:
            busy[block] -= 1
            if not busy[block]:
                del busy[block]


def errors_of(seed: int, length: int = 25) -> list[str]:
    """Return what a random schedule finds."""
    checker = StreamChecker()
    with watching(checker):
        Schedule(seed, checker).run(length)
    return checker.errors


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, NUM_SCHEDULES), marks=pytest.mark.until_recorded("kernels/gpu"))],
    ids=["some", "all"],
)
def test_right_code_has_no_errors(seeds: range) -> None:
    assert [*filter(None, map(errors_of, seeds))] == []


class WatchedStore(MemoryConnector):
    """A store whose reads of host rows are accesses, too."""

    checker: StreamChecker

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        with _disable_current_modes():
            self.checker.on_host("a connector's put", reads=[extent(torch.frombuffer(payload, dtype=torch.uint8))])
        super().put(name, header, payload, lease_s)


def test_staging_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its real threads, beside steps that write to other blocks."""
    checker = StreamChecker()
    monkeypatch.setattr(WatchedStore, "checker", checker, raising=False)
    layout = make_layout(64)
    pool = torch.zeros(BLOCKS, 64, dtype=torch.uint8)
    with watching(checker):
        inner = WatchedStore(f"memory://order-{uuid.uuid4().hex}?timeout=60")
        connector = StagedConnector(inner, WatchedCopies(pool, checker), layout, BLOCKS, 4 * 128, 128)
        for turn in range(10):
            keys = [bytes([turn, i]) * 8 for i in range(4)]
            checker.launch("a step", [], rows_of(pool, range(8)))
            stored = connector.store(keys, range(4), lease_s=60)
            checker.launch("a step", rows_of(pool, range(4)), rows_of(pool, range(4, 12)))
            assert stored.result(60).leading == 4
            loaded = connector.load(keys, range(4, 8))
            checker.launch("a step", rows_of(pool, range(4)), rows_of(pool, range(8, 12)))
            assert loaded.result(60).leading == 4
            checker.launch("a step", rows_of(pool, range(12)), [])
        connector.close()
    assert checker.errors == []


# ---- defects ----------------------------------------------------------------------------------------------------


def wait_for_no_event(self: Any, event: object) -> None: ...


def mark_own_stream(self: Any) -> object:
    event = self._cuda.Event()
    event.record(self._stream)
    return event


def mark_once(self: Any) -> object:
    event = self.__dict__.setdefault("mark_once", self._cuda.Event())
    if not event.clock:
        event.record(self._cuda.current_stream(self._device))
    return event


def wait_for_no_mark(self: Any, mark: object) -> None: ...


@contextmanager
def without_a_wait_at_the_end(self: Any) -> Iterator[None]:
    with self._cuda.stream(self._stream):
        yield


@contextmanager
def on_the_models_stream(self: Any) -> Iterator[None]:
    yield


def buffer_that_is_in_use(self: Any, pool_N: torch.Tensor, kernel: Any, max_blocks: int, cuda: Any) -> None:
    OwnStream.__init__(self, pool_N.device, cuda)
    self._pool_N, self._kernel = pool_N, kernel
    self._buffer_C = pool_N.new_empty((max_blocks, *pool_N.shape[1:]))


def bounce_buffer_of_the_models_stream(self: Any, count: int) -> GPURows:
    """As it was made once: what the model's kernels still use may be given to a peer."""
    return GPURows(torch.empty_like(self._rows[:1]).repeat(count, 1), self._cuda)


def digests_read_on_the_models_stream(self: Any, rows: Any) -> list[bytes]:
    """As checksums were read once: behind all that the engine has queued."""
    with self._synchronized():
        total = self._words.index_select(0, self._ids(rows)).sum(1)
    return [int(one).to_bytes(8, "little", signed=True) for one in total.to("cpu", copy=True).tolist()]


def buffer_freed_early(self: Any, blocks: Any, rows: torch.Tensor, after: Any) -> None:
    """A buffer that the model's stream allocates, and that is dropped while the copy out of it is queued."""
    with self._cuda.stream(self._stream):
        self._wait(after)
        ids_C = self._ids(blocks)
    buffer_C = self._pool_N.new_empty((len(blocks), *self._pool_N.shape[1:]))
    self._wait(self.mark())
    with self._cuda.stream(self._stream):
        self._kernel.gather_blocks(self._pool_N, ids_C, buffer_C)
        rows.copy_(buffer_C.view(torch.uint8), non_blocking=True)
    del buffer_C
    self._stream.synchronize()


DEFECTS: dict[str, tuple[type, str, Any, str]] = {
    "an event is not waited for": (Lane, "_wait", wait_for_no_event, "is not behind a step on model"),
    "a mark of the wrong stream": (OwnStream, "mark", mark_own_stream, "is not behind a step on model"),
    "a stale mark": (OwnStream, "mark", mark_once, "is not behind a step on model"),
    "a mark is not waited for": (GPURows, "wait", wait_for_no_mark, "is not behind a step on model"),
    "no wait at the end": (OwnStream, "_synchronized", without_a_wait_at_the_end, "is not behind aten::copy_"),
    "copies on the model's stream": (OwnStream, "_synchronized", on_the_models_stream, "waits for the model"),
    "a buffer that is in use": (Lane, "__init__", buffer_that_is_in_use, "is not behind aten::new_empty on model"),
    "a bounce buffer that is in use": (GPURows, "like", bounce_buffer_of_the_models_stream, "a read from a peer"),
    "a host read behind the model": (GPURows, "digests", digests_read_on_the_models_stream, "waits for the model"),
    "memory freed early": (Lane, "read", buffer_freed_early, "is freed before"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, replacement, sentence = DEFECTS[defect]
    monkeypatch.setattr(where, name, replacement)
    found = [error for seed in range(20) for error in errors_of(seed)]
    assert any(sentence in error for error in found), found[:5]


def test_streams_events_and_waits_order_accesses() -> None:
    """The checker itself: what is ordered, and what is not."""
    x = torch.zeros(4)
    for order in ("none", "event", "wait"):
        checker = StreamChecker()
        stream, event = checker.Stream(x.device), checker.Event()
        checker.launch("a write", [], [extent(x)])
        event.record(checker.current_stream())
        if order == "event":
            stream.wait_event(event)
        elif order == "wait":
            checker.wait(MODEL)
        with checker.stream(stream):
            checker.launch("a read", [extent(x)], [])
            checker.launch("another read", [extent(x[:2])], [])
        assert len(checker.errors) == (2 if order == "none" else 0)
        checker.on_host("a read of the host", [extent(x)])
        checker.on_host("a write of the host", [], [extent(x)])
        assert any("a write of the host" in error for error in checker.errors)
