"""The simulated router's thread: work waits for earlier work, also where it becomes known late."""

import random
import time

import pytest

from pdserve.tools.simulator.router import MAX_SLOTS, SLOT_S, RouterThread


def test_work_waits_for_what_arrived_before_it() -> None:
    thread = RouterThread()
    assert thread.add(1.0, 0.02) == pytest.approx(1.02)
    assert thread.add(1.0, 0.01) == pytest.approx(1.03)
    assert thread.add(1.015, 0.01) == pytest.approx(1.04)
    assert thread.add(1.5, 0.01) == pytest.approx(1.51)


def test_late_work_fills_idle_time_and_delays_what_comes_after_it_only() -> None:
    thread = RouterThread()
    thread.add(1.0, 0.001)
    for step in range(40):
        assert thread.add(0.6 + step * 0.01, 0.004) < 0.6 + step * 0.01 + 0.006
    assert thread.add(1.0, 0.001) < 1.006, "the thread was idle for more than half of the time"
    for step in range(40):
        thread.add(0.8 + step * 0.005, 0.01)
    assert thread.add(1.0, 0.0) == pytest.approx(1.28, abs=0.02), "0.2 s passed, and 0.48 s of work arrived"


def test_backlogs_are_those_of_a_queue_in_order() -> None:
    drawn, at, free_at, arrivals = random.Random(1), 0.0, 0.0, []
    for _ in range(2000):
        at += drawn.expovariate(200)
        seconds = drawn.uniform(0, 0.009)
        free_at = max(free_at, at) + seconds
        arrivals.append((at, seconds, free_at))
    thread = RouterThread()
    errors = [abs(thread.add(at, seconds) - done_at) for at, seconds, done_at in arrivals]
    assert max(errors) <= SLOT_S and sum(errors) / len(errors) < SLOT_S / 2


def test_work_that_is_known_far_too_late_counts_in_the_earliest_slot() -> None:
    thread = RouterThread()
    thread.add(10.0, 0.0)
    thread.add(1.0, 0.5)
    assert thread.add(10.0, 0.0) == 10.0
    thread.add(1.0, MAX_SLOTS * SLOT_S)
    assert thread.add(10.0, 0.0) > 10.0


def test_idle_time_costs_nothing() -> None:
    """A day had 17 million slots, which were appended one by one."""
    thread, began_at = RouterThread(), time.process_time()
    assert thread.add(1.0, 0.5) == 1.5
    assert thread.add(86_400.0, 0.5) == 86_400.5
    assert thread.add(86_400.0, 0.5) == pytest.approx(86_401, abs=SLOT_S)
    assert time.process_time() - began_at < 1
