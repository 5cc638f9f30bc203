"""Tests of staging with a pool on the CPU: the same copies as on a GPU, whose streams a recorder stands in for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.errors import SetupError
from pdserve.kernels import reference
from pdserve.kernels.gpu.copies import PoolCopies
from pdserve.kernels.gpu.memory import LATER_BYTES
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Connector, Outcome, request_cancel
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import PIECE_BYTES, StagedConnector, _Transfer, attach_pool

LAYOUT = Layout(
    model_fingerprint="x", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", itemsize=4
)
SHAPE = (40, 2, 2, 2, 4, 8)
KEYS = [bytes([i]) * 16 for i in range(10)]


class Gated(MemoryConnector):
    """A store that holds back puts and gets until a gate is open."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.names: list[str] = []  # put or looked for, in order

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        self.names.append(name)
        self.gate.wait(60)
        super().put(name, header, payload, lease_s)

    def get(self, name: str) -> Buffer | None:
        self.gate.wait(60)
        return super().get(name)


class Following(Gated):
    """The same, which may be followed."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, follows=True)


class Recorder:
    """Stands in for `torch.cuda` and the kernel: records what each stream is told, by name of the stream.

    Attributes:
        log: (stream, what it was told), in order.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self._local = threading.local()
        self._streams = 0
        self._events = 0

    def add(self, stream: str, what: str) -> None:
        with self.changed:
            self.log.append((stream, what))
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60), self.log

    def of(self, stream: str) -> list[str]:
        return [what for name, what in self.log if name == stream]

    # ---- torch.cuda -----------------------------------------------------------------------------------------

    def current_stream(self, device: torch.device) -> "RecordedStream":
        return getattr(self._local, "stream", RecordedStream(self, "model"))

    def Stream(self, device: torch.device) -> "RecordedStream":
        self._streams += 1
        return RecordedStream(self, ("out", "in")[self._streams - 1])

    def Event(self) -> "RecordedEvent":
        self._events += 1
        return RecordedEvent(self, f"mark {self._events}")

    @contextmanager
    def stream(self, stream: "RecordedStream") -> Any:
        self._local.stream = stream
        yield
        del self._local.stream

    # ---- Kernel ---------------------------------------------------------------------------------------------

    def gather_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
        self.add(self.current_stream(pool_N.device).name, f"gather {blocks_C.tolist()}")
        reference.gather_blocks(pool_N, blocks_C, out_C)

    def scatter_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
        self.add(self.current_stream(pool_N.device).name, f"scatter {blocks_C.tolist()}")
        reference.scatter_blocks(pool_N, blocks_C, values_C)


class RecordedStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

    def wait_event(self, event: "RecordedEvent") -> None:
        self._recorder.add(self.name, f"wait for {event.name}")

    def synchronize(self) -> None:
        self._recorder.add(self.name, "synchronize")


class RecordedEvent:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

    def record(self, stream: RecordedStream) -> None:
        self._recorder.add(stream.name, self.name)


def staged(
    inner: Connector, pool: torch.Tensor, recorder: Recorder | None = None, blocks_per_piece: int = 3, pieces: int = 2
) -> StagedConnector:
    kernel: Any = recorder or reference
    copies = PoolCopies(pool, kernel, recorder)
    piece_bytes = blocks_per_piece * LAYOUT.block_bytes
    return StagedConnector(inner, copies, LAYOUT, len(pool), pieces * piece_bytes, piece_bytes)


def test_transfers_of_more_blocks_than_staging_rows() -> None:
    source, target = torch.randn(SHAPE), torch.zeros(SHAPE)
    writer, reader = (staged(connect("memory://staging"), pool) for pool in (source, target))
    stored = writer.store(KEYS, range(5, 15), lease_s=10).result(60)
    assert stored.outcomes == [Outcome.OK] * 10
    rows = [30, 2, 7, 39, 0, 11, 12, 13, 25, 26]
    loaded = reader.load([*KEYS, b"?" * 16], [*rows, 20]).result(60)
    assert loaded.outcomes == [Outcome.OK] * 10 + [Outcome.MISSING]
    assert torch.equal(target[rows], source[5:15])
    assert not target[[20, 1, 38]].any(), "what was not loaded is not touched"
    assert reader.match(KEYS).result(60) == 10
    assert reader.load([], []).result(60).outcomes == []
    writer.close()
    reader.close()


def test_a_store_reads_what_the_model_has_written_and_a_load_overwrites_it() -> None:
    """In both directions the copy waits for the steps before the call, and for none after it."""
    recorder = Recorder()
    connector = staged(connect("memory://staging-order"), torch.randn(SHAPE), recorder)
    assert recorder.log == [
        ("model", "mark 1"),
        ("out", "wait for mark 1"),
        ("model", "mark 2"),
        ("in", "wait for mark 2"),
    ]
    recorder.log.clear()
    recorder.add("model", "a step that writes KV of block 7")
    storing = connector.store(KEYS[:1], [7], lease_s=10)
    recorder.add("model", "the next step")
    assert storing.result(60).leading == 1
    recorder.add("model", "the last step of a sequence that had block 9")
    loading = connector.load(KEYS[:1], [9])
    recorder.add("model", "a step of others")
    assert loading.result(60).leading == 1
    connector.close()
    assert recorder.of("model") == [
        "a step that writes KV of block 7",
        "mark 3",
        "the next step",
        "the last step of a sequence that had block 9",
        "mark 4",
        "a step of others",
    ]
    assert recorder.of("out") == ["wait for mark 3", "gather [7]", "synchronize"]
    assert recorder.of("in") == ["wait for mark 4", "scatter [9]", "synchronize"]


def test_a_piece_is_copied_while_the_one_before_is_stored() -> None:
    recorder, store = Recorder(), Gated("memory://staging-pipeline?timeout=60")
    connector = staged(store, torch.randn(SHAPE), recorder)
    future = connector.store(KEYS, range(10), lease_s=10)
    recorder.wait_for(lambda: recorder.of("out").count("synchronize") == 2)
    assert not future.done(), "two pieces are copied, and none is stored"
    assert not any("6" in what for what in recorder.of("out")), "the third has to wait for rows"
    store.gate.set()
    assert future.result(60).leading == 10
    gathers = [what for what in recorder.of("out") if what.startswith("gather")]
    assert gathers == ["gather [0, 1, 2]", "gather [3, 4, 5]", "gather [6, 7, 8]", "gather [9]"]
    connector.close()


def test_several_operations_are_under_way() -> None:
    """A store that waits for its store does not keep others from theirs."""
    store = Gated("memory://staging-many?timeout=60&threads=2")
    connector = staged(store, torch.randn(SHAPE), pieces=4)
    futures = [connector.store(KEYS[i : i + 2], [i, i + 1], lease_s=10) for i in (0, 2, 4)]
    while len(store.names) < 2:
        time.sleep(0.01)
    assert not any(future.done() for future in futures)
    store.gate.set()
    assert [future.result(60).leading for future in futures] == [2, 2, 2]
    connector.close()


def test_following_goes_on_piece_by_piece_as_blocks_are_stored() -> None:
    source, target = torch.randn(SHAPE), torch.zeros(SHAPE)
    writer, reader = (
        staged(connect("memory://staging-follow"), source),
        staged(Following("memory://staging-follow?timeout=60"), target),
    )
    reader._inner.gate.set()  # type: ignore[attr-defined]
    assert reader.follows and reader.capabilities.follows
    future = reader.follow(KEYS, range(10, 20), patience_s=60)
    for i in range(10):
        assert not future.done()
        assert writer.store(KEYS[i : i + 1], [i], lease_s=10).result(60).leading == 1
    assert future.result(60).outcomes == [Outcome.OK] * 10
    assert torch.equal(target[10:20], source[:10])
    missing = [bytes([100 + i]) * 16 for i in range(7)]
    outcomes = reader.follow([*KEYS[:2], *missing], range(20, 29), patience_s=0.01).result(60).outcomes
    assert outcomes == [Outcome.OK] * 2 + [Outcome.MISSING] * 7
    assert reader.follow([], [], patience_s=1).result(60).outcomes == []
    writer.close()
    reader.close()


@pytest.mark.parametrize("follows", [False, True])
def test_a_cancelled_load_ends_after_the_block_being_moved(follows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    track, under_way = _Transfer.track, threading.Semaphore(0)

    def track_and_tell(self: _Transfer, operation: Future[Any]) -> None:
        track(self, operation)
        under_way.release()

    store = Following(f"memory://staging-gate-{follows}?timeout=60")
    connector = staged(store, torch.randn(SHAPE))
    assert connector.capabilities.cancels
    store.gate.set()
    assert connector.store(KEYS, range(10), lease_s=10).result(60).leading == 10
    store.gate.clear()
    monkeypatch.setattr(_Transfer, "track", track_and_tell)
    blocks = range(20, 30)
    future = connector.follow(KEYS, blocks, patience_s=60) if follows else connector.load(KEYS, blocks)
    for _ in range(1 if follows else 2):  # pieces for which there are rows
        assert under_way.acquire(timeout=60)
    request_cancel(future)
    store.gate.set()
    outcomes = future.result(60).outcomes
    assert outcomes[-7:] == [Outcome.CANCELLED] * 7 and set(outcomes) <= {Outcome.CANCELLED, Outcome.OK}
    assert connector.load(KEYS, range(10, 20)).result(60).leading == 10, "and its rows are free again"
    connector.close()


def test_a_gpu_that_fails_in_a_copy_fails_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    connector = staged(connect("memory://staging-fault"), torch.randn(SHAPE), recorder)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "gather_blocks", fail)
        with pytest.raises(torch.AcceleratorError):
            connector.store(KEYS, range(10), lease_s=10).result(60)
    assert connector.store(KEYS, range(10), lease_s=10).result(60).leading == 10, "no rows are lost"
    connector.close()


def test_a_load_that_fails_is_over_when_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, store = Recorder(), Gated("memory://staging-late?timeout=60")
    source, target = torch.randn(SHAPE), torch.zeros(SHAPE)
    writer, reader = staged(connect("memory://staging-late"), source), staged(store, target, recorder)
    assert writer.store(KEYS, range(10), lease_s=10).result(60).leading == 10
    scatter, held, failed = recorder.scatter_blocks, threading.Event(), threading.Event()

    def fail_once(*arguments: Any) -> None:
        if not failed.is_set():
            assert held.wait(60), "the second piece, which would be left out now, is not being loaded"
            store.gate.clear()  # holds the second piece, which waits for the line below
            failed.set()
            raise torch.AcceleratorError("CUDA error: out of memory")
        scatter(*arguments)

    get = store.get

    def get_slowly(name: str) -> Buffer | None:
        if not name.endswith(KEYS[0].hex()):
            held.set()
            failed.wait(60)
        return get(name)

    monkeypatch.setattr(store, "get", get_slowly)
    monkeypatch.setattr(recorder, "scatter_blocks", fail_once)
    store.gate.set()
    future = reader.load([KEYS[0]] * 3 + KEYS[3:6], range(20, 26))
    assert held.wait(60) and failed.wait(60)
    time.sleep(0.1)
    assert not future.done(), "the second piece is still being loaded into rows of the pool"
    store.gate.set()
    with pytest.raises(torch.AcceleratorError):
        future.result(60)
    assert torch.equal(target[23:26], source[3:6]), "it was written before the end, not after it"
    writer.close()
    reader.close()


def test_a_lease_is_prolonged_by_one_caller_at_a_time() -> None:
    """As the contract promises a connector, although pieces are stored from other threads."""

    class Serial(MemoryConnector):
        calling = threading.Lock()
        overlaps = 0

        def store(self, *arguments: Any, **options: Any) -> Any:
            with self.calling:
                started.set()
                time.sleep(0.1)
                return super().store(*arguments, **options)

        def prolong(self, *arguments: Any, **options: Any) -> None:
            self.overlaps += self.calling.locked()

    started, inner = threading.Event(), Serial("memory://staging-serial")
    connector = staged(inner, torch.randn(SHAPE))
    future = connector.store(KEYS[:1], [0], lease_s=10)
    assert started.wait(60)
    connector.prolong(KEYS[:1], lease_s=20)
    assert future.result(60).leading == 1 and not inner.overlaps
    connector.close()


def test_a_pool_on_a_gpu_needs_a_connector_that_copies_or_knows_gpus() -> None:
    class InPlace(MemoryConnector):
        knows_gpus = False

        @property
        def capabilities(self) -> Any:
            return replace(super().capabilities, in_place=True, gpu_memory=self.knows_gpus)

    pool = torch.empty(SHAPE, device="meta")  # any device but the CPU
    connector = InPlace("memory://staging-in-place")
    with pytest.raises(SetupError, match="memory:// reads pools in place"):
        attach_pool(connector, pool, LAYOUT, lambda: PoolCopies(pool, reference))
    connector.knows_gpus = True
    assert attach_pool(connector, pool, LAYOUT, lambda: PoolCopies(pool, reference)) is connector
    memory = connector.memory
    assert (memory.gpu.kind, len(memory.gpu), memory.gpu.nbytes) == ("VRAM", 40, pool.nbytes)
    assert memory.rows.shape == (40, LAYOUT.block_bytes)
    memory.check(KEYS[:1], [39])
    with pytest.raises(ValueError):
        memory.check(KEYS[:1], [40])
    connector.close()


def test_the_buffers_on_the_gpu_are_counted_when_its_memory_is_divided() -> None:
    assert 3 * PIECE_BYTES <= LATER_BYTES, "of stores, of loads, and of loads that convert"
