"""Parsing of bodies: on the event loop while its turn has time, else in threads behind a bounded queue."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pdserve.errors import Overloaded
from pdserve.router.limits import body_budget
from pdserve.router.limits.body_budget import BodyBudget
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web import parse_queue
from pdserve.router.web.parse_queue import ParseQueue

WEIGHTS = {"a": 1.0, "b": 1.0}
BUDGET = BodyBudget(has_keys=True, largest=1, on_refusal=lambda key: None)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 600))


def slow_parse() -> int:
    """Take half of a turn's budget, and return the thread that ran it."""
    time.sleep(parse_queue.TURN_BUDGET_S / 2)
    return threading.get_ident()


def test_a_burst_leaves_the_event_loop_after_the_budget_of_a_turn(metrics: Metrics) -> None:
    async def scenario() -> None:
        queue, here = ParseQueue(1000, WEIGHTS, BUDGET, metrics), threading.get_ident()
        threads = await asyncio.gather(*(queue.run("a", b"{}", slow_parse) for _ in range(40)))
        assert threads.count(here) <= 2 and len(set(threads) - {here}) <= parse_queue.NUM_THREADS
        assert await queue.run("a", b"{}", threading.get_ident) == here, "a later turn has its own budget"

    run(scenario)


def test_keys_take_turns_at_the_threads(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_queue, "LARGE_BODY", 1)
    monkeypatch.setattr(parse_queue, "NUM_THREADS", 1)
    gate, order = threading.Event(), list[str]()

    def parse(name: str) -> None:
        gate.wait(600)
        order.append(name)

    async def scenario() -> None:
        queue = ParseQueue(1000, WEIGHTS, BUDGET, metrics)
        names = ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1"]
        tasks = [asyncio.create_task(queue.run(name[0], bytes(9), partial(parse, name))) for name in names]
        await asyncio.sleep(0)
        tasks[2].cancel()  # its turn passes to the next
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.run("a", bytes(9), partial(parse, "later"))

    run(scenario)
    assert order == ["a-0", "b-0", "a-1", "b-1", "a-3", "later"]


def test_a_body_whose_client_has_left_counts_until_its_thread_is_free(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that leaves at once, again and again, could have any number of bodies behind two slow ones."""
    monkeypatch.setattr(parse_queue, "LARGE_BODY", 1)
    gate, num_parsed = threading.Event(), 0

    def parse() -> None:
        nonlocal num_parsed
        num_parsed += 1
        gate.wait(600)
        raise ValueError("nobody reads this")

    async def scenario() -> None:
        budget = BodyBudget(has_keys=False, largest=1, on_refusal=lambda key: None)
        queue, most = ParseQueue(4, WEIGHTS, budget, metrics), parse_queue.NUM_THREADS
        for number in range(1, 10):
            task = asyncio.create_task(queue.run("a", bytes(9), parse))
            await asyncio.sleep(0)
            while num_parsed < min(most, number):
                await asyncio.sleep(0.001)
            task.cancel()
            assert [*await asyncio.gather(task, return_exceptions=True)] and budget.num_bytes <= 9 * most
        assert budget.num_bytes == 9 * most
        gate.set()
        while budget.num_bytes:
            await asyncio.sleep(0.001)
        assert await queue.run("a", bytes(9), lambda: 5) == 5 and num_parsed == most

    run(scenario)


def test_a_body_for_which_no_thread_can_be_started_holds_up_no_other(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as at a limit of the container."""
    monkeypatch.setattr(parse_queue, "LARGE_BODY", 1)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        budget = BodyBudget(has_keys=False, largest=1, on_refusal=lambda key: None)
        queue, most = ParseQueue(4, WEIGHTS, budget, metrics), parse_queue.NUM_THREADS
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            for _ in range(most + 1):
                async with asyncio.timeout(60):
                    with pytest.raises(RuntimeError, match="start new thread"):
                        await queue.run("a", bytes(9), lambda: 5)
        assert budget.num_bytes == 0
        assert await queue.run("a", bytes(9), lambda: 5) == 5

    run(scenario)


def test_bodies_beyond_the_limit_are_rejected_and_counted(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_queue, "LARGE_BODY", 1)
    gate = threading.Event()

    async def scenario() -> None:
        queue = ParseQueue(5, WEIGHTS, BUDGET, metrics)
        waiting = [asyncio.create_task(queue.run("a", b"{}", lambda: gate.wait(600))) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="5 requests wait to be tokenized"):
            await queue.run("a", b"{}", slow_parse)
        gate.set()
        assert all(await asyncio.gather(*waiting))
        await queue.run("a", b"{}", slow_parse)

    run(scenario)
    assert metrics.refusals.labels(reason="max_requests")._value.get() == 1


def test_bytes_that_wait_are_bounded(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_queue, "LARGE_BODY", 1)
    monkeypatch.setattr(body_budget, "MAX_BYTES", 400)  # 100 of each key

    refused = list[str]()
    budget = BodyBudget(has_keys=True, largest=1, on_refusal=refused.append)

    async def scenario() -> None:
        queue = ParseQueue(5, WEIGHTS, budget, metrics)
        with pytest.raises(Overloaded, match=r"the bodies of this API key .* would have 101 bytes, of at most 100"):
            await queue.run("a", bytes(60), slow_parse, more_bytes=41)
        assert refused == ["a"] and budget.num_bytes == 0
        await asyncio.gather(*(queue.run(key, bytes(100), slow_parse) for key in "ab"))
        assert budget.num_bytes == 0

    run(scenario)


class RecordingServer:
    """A parse server that runs functions in the calling thread, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def run(self, function: Callable[[], Any]) -> Any:
        self.count += 1
        return function()


def test_what_takes_long_to_decode_is_left_to_the_parse_server(metrics: Metrics) -> None:
    """Decoding JSON never releases the GIL, so a thread would stop the event loop."""

    async def scenario() -> None:
        server = RecordingServer()
        queue, here = ParseQueue(1000, WEIGHTS, BUDGET, metrics, server), threading.get_ident()  # type: ignore[arg-type]
        for raw in (b"{}", b" " * 30_000, b'{"a": [%s]}' % b"7, " * 500):
            assert await queue.run("a", raw, threading.get_ident) == here
            assert server.count == 0
        for raw in (b" " * parse_queue.LARGE_BODY, b'{"a": [%s]}' % (b"7," * 5000)):
            assert await queue.run("a", raw, threading.get_ident) != here
            assert server.count == 0, "a thread is quicker, and holds the GIL for a moment"
        many = [b'{"a": [%s]}' % (item * 10_000) for item in (b"7,", b"{},", b"[],")]
        for count, raw in enumerate([b" " * parse_queue.HUGE_BODY, *many], 1):
            assert await queue.run("a", raw, threading.get_ident) != here
            assert server.count == count
        await queue.run("a", b"{}", threading.get_ident, more_bytes=parse_queue.HUGE_BODY)
        assert server.count == 5

    run(scenario)
