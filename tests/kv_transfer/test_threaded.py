"""Deadlines, fences and faults, with a store that does as it is told."""

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer import operation, threaded
from pdserve.kv_transfer.blocks import StreamedPart
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer, HeaderFormat, is_intact
from pdserve.kv_transfer.threaded import Full, ThreadedConnector

LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]

TIMEOUT = 0.3


class Clock:
    """In the place of `time`: stands still until it is told to go on, so that nothing is late because the machine is busy."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def go_on(self, seconds: float, connector: "Scripted") -> None:
        self.now += seconds
        with connector._watchdog._changed:
            connector._watchdog._changed.notify()  # it waits by another clock


class Scripted(ThreadedConnector):
    """Answers from a dict. `before` runs at the start of every hook, and may wait or raise."""

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


class Stuck:
    """A `before` that hangs in the n-th call, until `free` is set."""

    def __init__(self, n: int = 1) -> None:
        self.free = threading.Event()
        self.reached = threading.Event()
        self.hangs = False
        self._left = n

    def __call__(self, _: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.hangs = True
            self.reached.set()
            assert self.free.wait(60)
            self.hangs = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (threaded, operation):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def connector(layout_of: LayoutOf, clock: Clock) -> Iterator[Scripted]:
    connector = Scripted()
    rows = np.random.default_rng(1).integers(0, 256, (8, 4096), dtype=np.uint8)
    connector.attach(PoolMemory(rows, layout_of(4096)))
    yield connector
    connector.close()


def test_a_load_past_its_deadline_is_answered_and_leaves_the_rows_alone(
    connector: Scripted, clock: Clock, new_keys: NewKeys
) -> None:
    keys, rows = new_keys(3), connector.memory.rows
    assert connector.store(keys, [0, 1, 2], lease_s=1).result(60).leading == 3
    connector.before = stuck = Stuck(2)

    future = connector.load(keys, [4, 5, 6])
    assert stuck.reached.wait(60)
    clock.go_on(TIMEOUT * 0.9, connector)
    assert not future.done()
    clock.go_on(TIMEOUT * 0.2, connector)
    assert future.result(60).outcomes == [Outcome.OK, Outcome.UNAVAILABLE, Outcome.UNAVAILABLE] and stuck.hangs

    rows[4:7] = 7  # the caller gave the blocks to somebody else
    stuck.free.set()
    connector.close()  # waits for the worker
    assert (rows[4:7] == 7).all()


class Halting(StreamedPart):
    """Half of a payload; the other half arrives in the end, when nobody may want it any more."""

    def __init__(self, payload: bytes) -> None:
        self.free = threading.Event()
        self.reached = threading.Event()
        self._payload, self._at = payload, 0

    def __len__(self) -> int:
        return len(self._payload)

    def read_into(self, memory: memoryview) -> int:
        there = len(self._payload) if self.free.is_set() else len(self._payload) // 2
        count = min(len(memory), there - self._at)
        memory[:count] = self._payload[self._at : self._at + count]
        self._at += count
        return count

    def wait(self) -> None:
        self.reached.set()
        assert self.free.wait(60)


def test_what_arrives_after_the_deadline_stays_out(
    connector: Scripted, clock: Clock, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,), rows = new_keys(1), connector.memory.rows
    assert connector.store([key], [0], lease_s=1).result(60).leading == 1
    (value,) = connector.values.values()
    late = Halting(value[HEADER_BYTES:])
    monkeypatch.setattr(connector, "get_many", lambda blocks: blocks[0].accept(value[:HEADER_BYTES], [late]))
    future = connector.load([key], [4])
    assert late.reached.wait(60)
    clock.go_on(2 * TIMEOUT, connector)
    assert future.result(60).outcomes == [Outcome.UNAVAILABLE]  # a worker that waits holds up nothing

    rows[4] = 7
    late.free.set()
    connector.close()
    assert (rows[4] == 7).all()


def test_a_store_past_its_deadline_stores_nothing_wrong(connector: Scripted, clock: Clock, new_keys: NewKeys) -> None:
    """The rows change after the answer. What the late worker still stores must not look right."""
    keys, rows, header_format = new_keys(2), connector.memory.rows, HeaderFormat(connector.memory.layout)
    before = rows.copy()
    connector.before = stuck = Stuck(1)
    future = connector.store(keys, [0, 1], lease_s=1)
    assert stuck.reached.wait(60)
    clock.go_on(2 * TIMEOUT, connector)
    assert future.result(60).outcomes == [Outcome.UNAVAILABLE] * 2

    rows[:2] = 7
    stuck.free.set()
    connector.close()
    for row, key in enumerate(keys):
        value = connector.values.get(f"{connector.namespace.hex()}/{key.hex()}")
        if value is not None:
            header, payload = value[:64], value[64:]
            right = payload == before[row].tobytes()
            assert right or not (header_format.matches(header, key) and is_intact(header, payload))


def test_operations_behind_a_stuck_one_end_at_their_own_deadlines(
    connector: Scripted, clock: Clock, new_keys: NewKeys
) -> None:
    keys = new_keys(1)
    connector.before = stuck = Stuck(1)
    first = connector.match(keys)
    assert stuck.reached.wait(60)
    clock.go_on(TIMEOUT / 2, connector)
    behind = [connector.store(keys, [0], lease_s=1), connector.load(keys, [0])]
    clock.go_on(TIMEOUT * 0.6, connector)
    assert first.result(60) == 0 and not any(future.done() for future in behind)
    clock.go_on(TIMEOUT, connector)
    assert [future.result(60).outcomes for future in behind] == [[Outcome.UNAVAILABLE]] * 2
    stuck.free.set()
    connector.before = lambda _: None
    assert connector.store(keys, [0], lease_s=1).result(60).leading == 1  # the worker came back


def test_a_deadline_grows_with_the_bytes_and_those_before_them_and_only_for_these(
    connector: Scripted, clock: Clock, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At four blocks a second in the worst case, four blocks and six behind them may take as long as they do here."""
    monkeypatch.setattr(threaded, "MIN_BYTES_PER_S", 4 * 4096)
    keys = new_keys(8)
    both = threading.Event()

    def take_time(_: str) -> None:
        assert both.wait(60)
        clock.go_on(0.2, connector)

    connector.before = take_time
    first = connector.store(keys[:4], range(4), lease_s=1)
    behind = connector.store(keys[2:], range(2, 8), lease_s=1)
    both.set()
    assert first.result(60).leading == 4, "0.8 s is more than the time-out"
    assert behind.result(60).leading == 6, "and these took 2.0 s, more than they would have had alone"

    connector.before = stuck = Stuck(1)
    large, small = connector.load(keys, range(8)), connector.match(keys)
    assert stuck.reached.wait(60)
    clock.go_on(TIMEOUT * 1.1, connector)
    assert small.result(60) == 0 and not large.done(), "no bytes, no patience"
    clock.go_on(1.9, connector)
    assert not large.done()
    clock.go_on(0.2, connector)
    assert large.result(60).outcomes == [Outcome.UNAVAILABLE] * 8 and stuck.hangs
    stuck.free.set()


def test_a_declared_fault_is_an_outcome_counted_and_logged_once(
    connector: Scripted, new_keys: NewKeys, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> None:
        raise ConnectionRefusedError("nobody there")

    connector.before = refuse
    keys = new_keys(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert connector.store(keys, [0, 1], lease_s=1).result(60).outcomes == [Outcome.UNAVAILABLE] * 2
    assert connector.match(keys).result(60) == 0
    assert connector.stats().failures == {("store", Outcome.UNAVAILABLE): 10}
    assert [record.getMessage() for record in caplog.records] == [
        "scripted: store failed: ConnectionRefusedError: nobody there"
    ]


def test_a_fault_in_the_middle_keeps_what_was_done(connector: Scripted, new_keys: NewKeys) -> None:
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


def test_a_defect_is_raised_by_the_future_and_the_worker_goes_on(connector: Scripted, new_keys: NewKeys) -> None:
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


def test_close_gives_up_on_a_store_that_hangs(layout_of: LayoutOf, new_keys: NewKeys) -> None:
    connector = Scripted()
    connector.attach(PoolMemory(np.zeros((2, 4096), np.uint8), layout_of(4096)))
    connector.before = stuck = Stuck(1)
    future = connector.load(new_keys(1), [0])
    assert stuck.reached.wait(60)
    connector.close()
    assert stuck.hangs, "close has not waited for it"
    assert future.done() and future.result().outcomes == [Outcome.UNAVAILABLE]
    stuck.free.set()


def test_a_pool_of_another_shape_is_a_mistake(layout_of: LayoutOf) -> None:
    with pytest.raises(ValueError, match="blocks of 4096 bytes"):
        Scripted().attach(PoolMemory(np.zeros((2, 100), np.uint8), layout_of(4096)))


def test_closing_what_could_not_be_attached_is_fine(layout_of: LayoutOf) -> None:
    class Unreachable(Scripted):
        def open(self) -> None:
            raise SetupError("nobody there")

        def shut(self) -> None:
            raise AssertionError("was never open")

    connector = Unreachable()
    with pytest.raises(SetupError):
        connector.attach(PoolMemory(np.zeros((2, 4096), np.uint8), layout_of(4096)))
    connector.close()


def test_using_it_before_attach_is_a_mistake(new_keys: NewKeys) -> None:
    with pytest.raises(RuntimeError, match="not attached"):
        Scripted().match(new_keys(1))
