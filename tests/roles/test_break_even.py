"""Load or compute: the estimate follows the measurements, the decision the estimate, and no decision is permanent."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.roles.break_even import PROBE_S, PROBE_SHARE, BreakEven, Reason

AMOUNTS = st.integers(1, 10_000)
SECONDS = st.floats(1e-6, 60)
PAUSES = st.floats(0, 300)
EVENTS = st.lists(st.tuples(st.sampled_from(["load", "ask"]), AMOUNTS, SECONDS, PAUSES), max_size=60)
MEASURED = EVENTS.map(lambda events: [("load", 3, 0.1, 0.0), *events])
LOADS = (Reason.CHEAPER, Reason.UNMEASURED, Reason.PROBE)


def replay(events: list[tuple[str, int, float, float]], scale: float = 1.0) -> tuple[BreakEven, float]:
    """Replay events with load times multiplied by `scale`. Return the estimator and the time at the end."""
    estimate, now = BreakEven(), 0.0
    for kind, amount, seconds, pause in events:
        now += pause
        if kind == "load":
            estimate.record_load(amount, seconds * scale, now)
        else:
            estimate.decide(amount, seconds, now)
    return estimate, now


def test_the_first_prefix_is_loaded() -> None:
    estimate = BreakEven()
    assert estimate.decide(7, 0.0, 0.0) is Reason.UNMEASURED
    estimate.record_load(10, 5.0, 0.0)
    assert estimate.decide(7, 0.001, 0.5) is Reason.DEARER


def test_latency_and_bandwidth_are_estimated_separately() -> None:
    """A load takes 10 ms and 1 ms for each block, computing 3 ms a block: short prefixes are computed."""
    estimate = BreakEven()
    for i in range(200):
        blocks = 1 + i % 100
        estimate.record_load(blocks, 0.010 + 0.001 * blocks, now=i / 10)
    assert estimate.load_seconds(50) == pytest.approx(0.060, rel=0.1)
    assert estimate.decide(2, 0.006, 20.0) is Reason.DEARER
    assert estimate.decide(20, 0.060, 20.0) is Reason.CHEAPER


def test_a_timeout_counts_against_loading() -> None:
    estimate = BreakEven()
    estimate.record_load(100, 0.001, 0.0)
    assert estimate.decide(100, 0.16, 0.0) is Reason.CHEAPER
    estimate.record_load(0, 5.0, 1.0)
    assert estimate.decide(100, 0.16, 1.0) is Reason.DEARER


@given(MEASURED, AMOUNTS, SECONDS)
def test_the_decision_follows_the_estimate(
    events: list[tuple[str, int, float, float]], blocks: int, compute: float
) -> None:
    estimate, now = replay(events)
    load = estimate.load_seconds(blocks)
    assert load >= 0
    assert (estimate.decide(blocks, compute, now) is Reason.CHEAPER) == (load <= compute)


@given(MEASURED, AMOUNTS, AMOUNTS)
def test_more_blocks_never_take_less_time(events: list[tuple[str, int, float, float]], one: int, other: int) -> None:
    estimate, _ = replay(events)
    few, more = sorted((one, other))
    assert estimate.load_seconds(few) <= estimate.load_seconds(more)


@given(MEASURED, AMOUNTS, SECONDS, st.floats(0.01, 0.9))
def test_a_faster_store_never_turns_loading_into_computing(
    events: list[tuple[str, int, float, float]], blocks: int, compute: float, scale: float
) -> None:
    slow, now = replay(events)
    fast, _ = replay(events, scale)
    if slow.load_seconds(blocks) <= compute:
        assert fast.decide(blocks, compute, now) is Reason.CHEAPER


class Simulation:
    """Five requests a second for 100 stored blocks, which take 170 ms to compute, from a store of a given speed."""

    def __init__(self) -> None:
        self.estimate = BreakEven()
        self.now = 0.0
        self.probing = 0.0  # seconds spent in probes

    def run(self, seconds: float, load: Callable[[int], float]) -> list[Reason]:
        reasons, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.2
            reason = self.estimate.decide(100, 0.17, self.now)
            reasons.append(reason)
            if reason in LOADS:
                self.estimate.record_load(100, load(100), self.now + load(100))
                self.probing += load(100) if reason is Reason.PROBE else 0
        return reasons


@pytest.mark.parametrize("slow", [0.3, 5.0])
def test_decisions_follow_a_store_that_slows_down_and_recovers(slow: float) -> None:
    simulation = Simulation()
    reasons = simulation.run(100, lambda blocks: 0.0005 * blocks)
    assert reasons.count(Reason.CHEAPER) > 0.98 * len(reasons)

    reasons = simulation.run(300, lambda _: slow)
    assert reasons.count(Reason.DEARER) > 0.9 * len(reasons), "it soon learns that loading has become dearer"
    assert 0 < simulation.probing <= 300 * max(PROBE_SHARE, slow / PROBE_S[1]) * 1.1

    reasons = simulation.run(10 * PROBE_S[1], lambda blocks: 0.0005 * blocks)
    assert reasons[-50:].count(Reason.CHEAPER) >= 49, "and that it has become cheaper again"


def test_probes_are_rate_limited() -> None:
    estimate = BreakEven()
    estimate.record_load(100, 10.0, 0.0)
    later = PROBE_S[1] + 1
    assert [estimate.decide(100, 0.16, later) for _ in range(4)] == [Reason.PROBE] + [Reason.DEARER] * 3
