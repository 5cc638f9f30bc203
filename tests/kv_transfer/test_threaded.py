"""Tests of deadlines, fences and faults, with a scripted store and clock."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer import batched, blocks
from pdserve.kv_transfer.blocks import StreamedPart
from pdserve.kv_transfer.connector import Capabilities, Outcome, PoolMemory
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer, HeaderFormat, is_intact
from pdserve.kv_transfer.rules.context import make_layout
from pdserve.kv_transfer.threaded import Full, ThreadedConnector
from pdserve.kv_transfer.url import Query
from tests.kv_transfer.clock import Clock

LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]

TIMEOUT = 0.3


class Scripted(ThreadedConnector):
    """A connector over a dict. `before` is called at the start of every hook, and may wait or raise."""

    scheme = "scripted"

    def __init__(self, url: str = f"scripted://?timeout={TIMEOUT}&threads=1") -> None:
        super().__init__(url)
        self.values: dict[str, bytes] = {}
        self.before: Callable[[str], None] = lambda _: None

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        self.before("put")
        self.values[name] = header + bytes(payload)

    def get(self, name: str) -> Buffer | None:
        value = self.values.get(name)
        self.before("get")
        return value

    def contains(self, name: str) -> bool:
        self.before("contains")
        return name in self.values

    def delete(self, name: str) -> None:
        self.before("delete")
        self.values.pop(name, None)


class HangInCall:
    """A `before` that hangs in the n-th call until `resume` is set."""

    def __init__(self, n: int = 1) -> None:
        self.resume = threading.Event()
        self.reached = threading.Event()
        self.hangs = False
        self._calls_left = n

    def __call__(self, _: str) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            self.hangs = True
            self.reached.set()
            assert self.resume.wait(60)
            self.hangs = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def connector(layout_of: LayoutOf, clock: Clock) -> Iterator[Scripted]:
    connector = Scripted()
    rows = np.random.default_rng(1).integers(0, 256, (8, 4096), dtype=np.uint8)
    connector.attach(PoolMemory(rows, layout_of(4096)))
    yield connector
    connector.close()


def test_a_load_past_its_deadline_ends_and_leaves_the_rows_alone(
    connector: Scripted, clock: Clock, new_keys: NewKeys
) -> None:
    keys, rows = new_keys(3), connector.memory.rows
    assert connector.store(keys, [0, 1, 2], lease_s=1).result(60).leading == 3
    connector.before = hang = HangInCall(2)

    future = connector.load(keys, [4, 5, 6])
    assert hang.reached.wait(60)
    clock.advance(TIMEOUT * 0.9, connector)
    assert not future.done()
    clock.advance(TIMEOUT * 0.2, connector)
    assert future.result(60).outcomes == [Outcome.OK, Outcome.UNAVAILABLE, Outcome.UNAVAILABLE] and hang.hangs

    rows[4:7] = 7  # the caller reuses the rows
    hang.resume.set()
    connector.close()  # waits for the worker
    assert (rows[4:7] == 7).all()


class LatePart(StreamedPart):
    """A payload whose second half arrives only when `resume` is set."""

    def __init__(self, payload: bytes) -> None:
        self.resume = threading.Event()
        self.reached = threading.Event()
        self._payload, self._offset = payload, 0

    def __len__(self) -> int:
        return len(self._payload)

    def read_into(self, memory: memoryview) -> int:
        available = len(self._payload) if self.resume.is_set() else len(self._payload) // 2
        count = min(len(memory), available - self._offset)
        memory[:count] = self._payload[self._offset : self._offset + count]
        self._offset += count
        return count

    def wait(self) -> None:
        self.reached.set()
        assert self.resume.wait(60)


def test_bytes_that_arrive_after_the_deadline_are_not_written(
    connector: Scripted, clock: Clock, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,), rows = new_keys(1), connector.memory.rows
    assert connector.store([key], [0], lease_s=1).result(60).leading == 1
    (value,) = connector.values.values()
    late = LatePart(value[HEADER_BYTES:])
    monkeypatch.setattr(connector, "get_many", lambda blocks: blocks[0].accept(value[:HEADER_BYTES], [late]))
    future = connector.load([key], [4])
    assert late.reached.wait(60)
    clock.advance(2 * TIMEOUT, connector)
    assert future.result(60).outcomes == [Outcome.UNAVAILABLE]  # a waiting worker does not delay the watchdog

    rows[4] = 7
    late.resume.set()
    connector.close()
    assert (rows[4] == 7).all()


def test_a_store_past_its_deadline_stores_no_valid_wrong_block(
    connector: Scripted, clock: Clock, new_keys: NewKeys
) -> None:
    """The rows change after the deadline. A value that the late worker still stores must not be valid."""
    keys, rows, header_format = new_keys(2), connector.memory.rows, HeaderFormat(connector.memory.layout)
    before = rows.copy()
    connector.before = hang = HangInCall(1)
    future = connector.store(keys, [0, 1], lease_s=1)
    assert hang.reached.wait(60)
    clock.advance(2 * TIMEOUT, connector)
    assert future.result(60).outcomes == [Outcome.UNAVAILABLE] * 2

    rows[:2] = 7
    hang.resume.set()
    connector.close()
    for row, key in enumerate(keys):
        value = connector.values.get(f"{connector.namespace.hex()}/{key.hex()}")
        if value is not None:
            header, payload = value[:64], value[64:]
            right = payload == before[row].tobytes()
            assert right or not (header_format.matches(header, key) and is_intact(header, payload))


def test_operations_queued_behind_a_hanging_one_end_at_their_own_deadlines(
    connector: Scripted, clock: Clock, new_keys: NewKeys
) -> None:
    keys = new_keys(1)
    connector.before = hang = HangInCall(1)
    first = connector.match(keys)
    assert hang.reached.wait(60)
    clock.advance(TIMEOUT / 2, connector)
    behind = [connector.store(keys, [0], lease_s=1), connector.load(keys, [0])]
    clock.advance(TIMEOUT * 0.6, connector)
    assert first.result(60) == 0 and not any(future.done() for future in behind)
    clock.advance(TIMEOUT, connector)
    assert [future.result(60).outcomes for future in behind] == [[Outcome.UNAVAILABLE]] * 2
    hang.resume.set()
    connector.before = lambda _: None
    assert connector.store(keys, [0], lease_s=1).result(60).leading == 1  # the worker is available again


def test_operations_behind_a_copy_that_hangs_end_at_their_own_deadlines(
    connector: Scripted, clock: Clock, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one from a peer whose memory cannot be read now. Its own operation ends with it, since the row is in use."""
    keys = new_keys(1)
    assert connector.store(keys, [0], lease_s=1).result(60).leading == 1
    hang = HangInCall(1)
    monkeypatch.setattr(blocks, "copy_and_hash", lambda *_: hang(""))
    hanging = connector.load(keys, [4])
    assert hang.reached.wait(60)
    behind = connector.load(keys, [5])
    clock.advance(2 * TIMEOUT, connector)
    try:
        assert behind.result(60).outcomes == [Outcome.UNAVAILABLE] and not hanging.done()
    finally:
        hang.resume.set()
    assert hanging.result(60).outcomes != [Outcome.OK]


def test_a_deadline_is_extended_for_the_bytes_of_the_operation_and_those_before_it(
    connector: Scripted, clock: Clock, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a minimum of four blocks per second, two queued stores of four and six blocks meet their deadlines."""
    monkeypatch.setattr(batched, "MIN_BYTES_PER_S", 4 * 4096)
    keys = new_keys(8)
    both = threading.Event()

    def take_time(_: str) -> None:
        assert both.wait(60)
        clock.advance(0.2, connector)

    connector.before = take_time
    first = connector.store(keys[:4], range(4), lease_s=1)
    behind = connector.store(keys[2:], range(2, 8), lease_s=1)
    both.set()
    assert first.result(60).leading == 4, "0.8 s is more than the timeout"
    assert behind.result(60).leading == 6, "2.0 s is more than this store would have had alone"

    connector.before = hang = HangInCall(1)
    large, small = connector.load(keys, range(8)), connector.match(keys)
    assert hang.reached.wait(60)
    clock.advance(TIMEOUT * 1.1, connector)
    assert small.result(60) == 0 and not large.done(), "a match moves no bytes and gets no extension"
    clock.advance(1.9, connector)
    assert not large.done()
    clock.advance(0.2, connector)
    assert large.result(60).outcomes == [Outcome.UNAVAILABLE] * 8 and hang.hangs
    hang.resume.set()


def test_a_fault_is_an_outcome_and_counted_and_logged_once(
    connector: Scripted, new_keys: NewKeys, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> None:
        raise ConnectionRefusedError("no server")

    connector.before = refuse
    keys = new_keys(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert connector.store(keys, [0, 1], lease_s=1).result(60).outcomes == [Outcome.UNAVAILABLE] * 2
    assert connector.match(keys).result(60) == 0
    assert connector.stats().failures == {("store", Outcome.UNAVAILABLE): 10}
    assert [record.getMessage() for record in caplog.records] == [
        "scripted: store failed: ConnectionRefusedError: no server"
    ]


def test_blocks_stored_before_a_fault_stay_ok(connector: Scripted, new_keys: NewKeys) -> None:
    keys = new_keys(3)
    calls = iter([None, None, OSError("gone")])

    def third_fails(_: str) -> None:
        error = next(calls)
        if error:
            raise error

    connector.before = third_fails
    assert connector.store(keys, [0, 1, 2], lease_s=1).result(60).outcomes == [
        Outcome.OK,
        Outcome.OK,
        Outcome.UNAVAILABLE,
    ]


def test_a_programming_error_is_raised_by_the_future_and_the_worker_survives(
    connector: Scripted, new_keys: NewKeys
) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    keys = new_keys(1)
    connector.before = broken
    with pytest.raises(ZeroDivisionError):
        connector.store(keys, [0], lease_s=1).result(60)
    with pytest.raises(ZeroDivisionError):
        connector.match(keys).result(60)
    connector.before = lambda _: None
    assert connector.store(keys, [0], lease_s=1).result(60).leading == 1


def test_a_full_store_is_an_outcome_per_block(connector: Scripted, new_keys: NewKeys) -> None:
    calls = iter([False, True, False])

    def second_is_full(_: str) -> None:
        if next(calls):
            raise Full

    connector.before = second_is_full
    assert connector.store(new_keys(3), [0, 1, 2], lease_s=1).result(60).outcomes == [
        Outcome.OK,
        Outcome.FULL,
        Outcome.OK,
    ]


def test_close_does_not_wait_forever_for_a_hanging_store(layout_of: LayoutOf, new_keys: NewKeys) -> None:
    connector = Scripted()
    connector.attach(PoolMemory(np.zeros((2, 4096), np.uint8), layout_of(4096)))
    connector.before = hang = HangInCall(1)
    future = connector.load(new_keys(1), [0])
    assert hang.reached.wait(60)
    connector.close()
    assert hang.hangs, "close did not wait for it"
    assert future.done() and future.result().outcomes == [Outcome.UNAVAILABLE]
    hang.resume.set()


def test_a_pool_of_another_shape_is_refused(layout_of: LayoutOf) -> None:
    with pytest.raises(ValueError, match="blocks of 4096 bytes"):
        Scripted().attach(PoolMemory(np.zeros((2, 100), np.uint8), layout_of(4096)))


def test_close_after_a_failed_attach(layout_of: LayoutOf) -> None:
    class Unreachable(Scripted):
        def open(self) -> None:
            raise SetupError("no server")

        def shut(self) -> None:
            raise AssertionError("open() had failed")

    connector = Unreachable()
    with pytest.raises(SetupError):
        connector.attach(PoolMemory(np.zeros((2, 4096), np.uint8), layout_of(4096)))
    connector.close()


def test_close_after_no_thread_could_be_started(layout_of: LayoutOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is open by then, which may hold connections, files or memory."""
    ended = list[str]()

    class Opened(Scripted):
        def shut(self) -> None:
            ended.append("shut")

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    connector = Opened()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            connector.attach(PoolMemory(np.zeros((2, 4096), np.uint8), layout_of(4096)))
    connector.close()
    assert ended == ["shut"]


def test_a_call_before_attach_raises(new_keys: NewKeys) -> None:
    with pytest.raises(RuntimeError, match="not attached"):
        Scripted().match(new_keys(1))


@pytest.mark.parametrize("name", ["_run", "_name", "_blocks", "_lock", "_stats"])
def test_a_private_name_of_the_base_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} replaces a private name of the connector base classes"):
        type("Mine", (MemoryConnector,), {name: lambda self: None})
    with pytest.raises(TypeError, match=rf"Mine\.{name} replaces"):
        type("Mine", (ThreadedConnector,), {name: lambda self: None})


@pytest.mark.parametrize("hook", ["configure", "open"])
def test_a_private_attribute_of_the_base_is_refused(hook: str, layout_of: Callable[..., Layout]) -> None:
    def replace_lock(self: Any, *_: object) -> None:
        self._lock = object()

    connector = type("Mine", (MemoryConnector,), {hook: replace_lock})("memory://test-shadow")
    with pytest.raises(TypeError, match=r"Mine\._lock replaces"):
        connector.attach(PoolMemory(np.zeros((1, 4096), np.uint8), layout_of(4096)))


def test_a_bug_at_the_end_of_an_operation_does_not_end_the_thread(
    attach: Callable[..., Any], new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, (key,) = attach("memory://test-bug-at-end?threads=1"), new_keys(1)
    with monkeypatch.context() as patch:
        patch.setattr(instance.connector._stats, "count", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            instance.store([key], [0])
    assert instance.store([key], [0]).leading == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_close_waits_for_shut_until_its_deadline(
    attach: Callable[..., Any],
    hurry_shut: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hangs: bool,
) -> None:
    instance, resume, ended = attach("memory://test-shut"), threading.Event(), threading.Event()
    if hangs:
        hurry_shut(instance.connector)

    def shut() -> None:
        if hangs:
            resume.wait(60)
        ended.set()

    monkeypatch.setattr(instance.connector, "shut", shut)
    instance.connector.close()
    assert ended.is_set() != hangs and ("background work still waits" in caplog.text) == hangs
    resume.set()
    assert ended.wait(60)


def test_a_value_that_two_connectors_put_keeps_the_longer_lease() -> None:
    """Both have found it missing before, so none has renewed it."""
    url = f"memory://test-{uuid.uuid4().hex}?size=10KiB"
    one, other = MemoryConnector(url), MemoryConnector(url)
    for connector in (one, other):
        connector.attach(PoolMemory(np.zeros((1, 4096), np.uint8), make_layout(4096)))
    header, payload = bytes(64), memoryview(bytes(4096))
    one.put("a", header, payload, 600.0)
    other.put("a", header, payload, 0.0)
    other.put("b", header, payload, 600.0)
    with pytest.raises(Full):
        other.put("c", header, payload, 600.0)
    assert one.contains("a") and one.contains("b")
    for connector in (one, other):
        connector.close()
    memory.unlink(url)


def test_capabilities_may_depend_on_parameters_of_the_url() -> None:
    class Sometimes(MemoryConnector):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, keeps_leases=self._keeps)

        def configure(self, query: Query) -> None:
            super().configure(query)
            self._keeps = query.flag("keeps", True)

    assert Sometimes("memory://x").capabilities.keeps_leases
    assert not Sometimes("memory://x?keeps=0").capabilities.keeps_leases
