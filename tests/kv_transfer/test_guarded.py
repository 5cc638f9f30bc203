"""The circuit breaker in front of a connector, with a store that the test lets answer or time out."""

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import PROBE_KEY, Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.guarded import GuardedConnector, guard
from tests.waiting import wait_until

TIMEOUT = 4.0
SHORT = 0.05  # the time-out of a connector with threads
KEYS = [b"a" * 16, b"b" * 16]
UNAVAILABLE = [Outcome.UNAVAILABLE] * 2


class Manual(Connector):
    """Records its calls; the test completes their futures."""

    scheme = "manual"
    capabilities = Capabilities(timeout_s=TIMEOUT, follows=True)

    def __init__(self) -> None:
        self.calls: list[tuple[str, Future[Any]]] = []
        self.inner_stats = Stats(parts={"part": Stats()})

    def attach(self, memory: PoolMemory) -> None: ...

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._call("store")

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._call("load")

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._call("follow")

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return self._call("match")

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._call("release")

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self._call("prolong")

    def stats(self) -> Stats:
        return self.inner_stats

    def close(self) -> None: ...

    def _call(self, name: str) -> Future[Any]:
        self.calls.append((name, Future()))
        return self.calls[-1][1]


class Scene:
    """A guarded connector, its clock, and the thread that calls it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inner = Manual()
        self.posted: list[Callable[[], None]] = []
        self.connector = GuardedConnector(self.inner, self.posted.append, lambda: self.now)

    def run_posted(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for function in posted:
            function()

    def end(self, result: Any, seconds: float = 0.1) -> None:
        """Complete the latest call, `seconds` after the previous event."""
        self.now += seconds
        self.inner.calls[-1][1].set_result(result)
        self.run_posted()

    def hang(self) -> None:
        """Let a match and a store time out, as for one request."""
        self.connector.match(KEYS)
        self.end(0, TIMEOUT)
        self.connector.store(KEYS, [0, 1], lease_s=1.0)
        self.end(Result(UNAVAILABLE, TIMEOUT), TIMEOUT)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.inner.calls]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_seconds_in_which_an_operation_begins_count(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out that the store counts from its own start is one, however late the caller sees it begin."""
    begin = scene.inner.store

    def begin_late(keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        scene.now += TIMEOUT
        return begin(keys, block_ids, lease_s=lease_s)

    monkeypatch.setattr(scene.inner, "store", begin_late)
    for _ in range(2):
        scene.connector.store(KEYS, [0, 1], lease_s=1.0)
        scene.end(Result(UNAVAILABLE, TIMEOUT), 0.0)
    assert scene.connector.load(KEYS, [0, 1]).result(0).outcomes == UNAVAILABLE


def test_calls_pass_while_the_store_answers(scene: Scene) -> None:
    for _ in range(3):
        future = scene.connector.load(KEYS, [0, 1])
        assert future is scene.inner.calls[-1][1], "the future can be cancelled"
        scene.end(Result([Outcome.MISSING] * 2, TIMEOUT), TIMEOUT)
        scene.connector.match(KEYS)
        scene.end(0)
        scene.connector.store(KEYS, [0, 1], lease_s=1.0)
        scene.end(Result(UNAVAILABLE, 0.1))  # refused at once
        scene.connector.follow(KEYS, [0, 1], patience_s=0.1)
        scene.end(Result([Outcome.CANCELLED] * 2, 0.1))
    scene.connector.release(KEYS)
    scene.connector.prolong(KEYS, lease_s=1.0)
    assert scene.names == ["load", "match", "store", "follow"] * 3 + ["release", "prolong"]
    assert not scene.connector.stats().is_out and not scene.posted


def test_a_store_that_refuses_is_named_and_still_asked(scene: Scene) -> None:
    for _ in range(3):
        scene.connector.match(KEYS)
        scene.end(0)
        scene.connector.store(KEYS, [0, 1], lease_s=1.0)
        scene.end(Result(UNAVAILABLE, 0.1))
    assert scene.names == ["match", "store"] * 3
    assert scene.connector.stats().is_out and not scene.posted
    scene.connector.store(KEYS, [0, 1], lease_s=1.0)
    scene.end(Result([Outcome.OK] * 2, 0.1))
    assert not scene.connector.stats().is_out


def test_after_two_timeouts_calls_end_at_once_and_are_counted(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.hang()
    assert scene.names == ["match", "store", "match"], "the last one is the probe"
    for _ in range(3):
        assert scene.connector.match(KEYS).result(0) == 0
        assert scene.connector.store(KEYS, [0, 1], lease_s=1.0).result(0).outcomes == UNAVAILABLE
        assert scene.connector.load(KEYS, [0, 1]).result(0).outcomes == UNAVAILABLE
        assert scene.connector.follow(KEYS, [0, 1], patience_s=1.0).result(0).outcomes == UNAVAILABLE
        assert scene.connector.load([PROBE_KEY], [0]).result(0).outcomes == [Outcome.UNAVAILABLE]  # not counted
        scene.connector.release(KEYS)
        scene.connector.prolong(KEYS, lease_s=1.0)
    assert len(scene.names) == 3
    stats = scene.connector.stats()
    assert stats.is_out and stats.failures == {
        ("store", Outcome.UNAVAILABLE): 6,
        ("load", Outcome.UNAVAILABLE): 12,
    }
    assert list(stats.parts) == ["part"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "manual: does not answer; requests go on without the store until it does"
    ]


@pytest.mark.parametrize("probes", [1, 4])
def test_probes_bring_the_store_back(scene: Scene, probes: int) -> None:
    scene.hang()
    for _ in range(probes - 1):
        scene.end(0, TIMEOUT)
        assert scene.connector.stats().is_out
    assert scene.names == ["match", "store"] + ["match"] * probes
    scene.end(0, 0.2)
    assert not scene.connector.stats().is_out and not scene.posted
    assert scene.connector.load(KEYS, [0, 1]) is scene.inner.calls[-1][1]


def test_operations_that_began_before_share_one_probe(scene: Scene) -> None:
    for _ in range(5):
        scene.connector.match(KEYS)
    futures = [future for _, future in scene.inner.calls]
    scene.now += TIMEOUT
    for future in futures:
        future.set_result(0)
        scene.run_posted()
    assert scene.names == ["match"] * 6
    scene.end(0)
    assert not scene.connector.stats().is_out


def test_an_exception_is_passed_on_and_is_no_timeout(scene: Scene) -> None:
    scene.hang()
    scene.now += TIMEOUT
    scene.inner.calls[-1][1].set_exception(ValueError("a bug"))
    assert not scene.connector.stats().is_out
    future = scene.connector.match(KEYS)
    scene.inner.calls[-1][1].set_exception(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        future.result(0)


class Hanging(MemoryConnector):
    """Answers until it `hangs`, with a short time-out then: a busy machine makes no answer late."""

    scheme = "hanging"

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}?timeout={SHORT}&threads=1")
        self.answers = threading.Event()
        self.released: list[bytes] = []
        self.go_on()

    def hang(self) -> None:
        self.answers.clear()
        self.timeout = SHORT

    def go_on(self) -> None:
        self.timeout = 60.0
        self.answers.set()

    def contains(self, name: str) -> bool:
        assert self.answers.wait(60)
        return super().contains(name)

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        assert self.answers.wait(60)
        super().put(name, header, payload, lease_s)

    def release_many(self, keys: Sequence[bytes]) -> None:
        self.released += keys


class WithMatchOfItsOwn(Hanging):
    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return super().match(keys)


@pytest.mark.parametrize("kind", [Hanging, WithMatchOfItsOwn])
def test_the_breaker_of_a_batched_connector_does_as_one_around_it(
    kind: type[Hanging],
    layout_of: Callable[..., Layout],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, posted = kind(f"memory://{uuid.uuid4().hex}"), SimpleQueue[Callable[[], None]]()
    inner.attach(PoolMemory(np.ones((4, 4096), np.uint8), layout_of(4096)))
    inner.timeout = SHORT  # by which the breaker tells a time-out
    connector = guard(inner, posted.put)
    inner.go_on()
    assert (connector is inner) == (kind is Hanging), "one that replaces operations is wrapped"

    def run_posted() -> bool:
        while not posted.empty():
            posted.get()()
        return not connector.stats().is_out

    assert connector.store(KEYS, [0, 1], lease_s=1.0).result(60).leading == 2
    inner.hang()
    assert connector.match(KEYS).result(60) == 0 and not connector.stats().is_out
    assert connector.store([b"c" * 16, b"d" * 16], [0, 1], lease_s=1.0).result(60).outcomes == UNAVAILABLE
    wait_until(lambda: connector.stats().is_out)  # a breaker around it may hear of the end after this thread
    failed = connector.stats().failures.copy()
    for future in (connector.load(KEYS, [0, 1]), connector.follow(KEYS, [0, 1], patience_s=1.0)):
        assert future.done() and future.result().outcomes == UNAVAILABLE
    assert connector.load([PROBE_KEY], [0]).result(0).outcomes == [Outcome.UNAVAILABLE]
    assert connector.match(KEYS).result(0) == 0
    connector.release(KEYS)
    assert connector.stats().failures == failed | {("load", Outcome.UNAVAILABLE): 4}, "the probe is not counted"
    assert not connector.stats().seconds["load"]
    run_posted()
    inner.go_on()
    wait_until(run_posted)
    assert connector.match(KEYS).result(60) == 2 and not inner.released
    connector.release(KEYS)
    connector.close()
    assert inner.released == KEYS
    messages = [record.getMessage() for record in caplog.records if "answer" in record.getMessage()]
    assert [message.partition(": ")[2].partition(";")[0] for message in messages] == [
        "does not answer",
        "answers again",
    ]
