"""Load or compute: the estimate follows what is measured, the decision follows the estimate, and none is for ever."""

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


def play(events: list[tuple[str, int, float, float]], scale: float = 1.0) -> tuple[BreakEven, float]:
    """What happens, pauses included, with loads that take `scale` times as long; and what time it is then."""
    one, now = BreakEven(), 0.0
    for kind, amount, seconds, pause in events:
        now += pause
        if kind == "load":
            one.loaded(amount, seconds * scale, now)
        else:
            one.decide(amount, seconds, now)
    return one, now


def test_the_first_is_loaded() -> None:
    one = BreakEven()
    assert one.decide(7, 0.0, 0.0) is Reason.UNMEASURED
    one.loaded(10, 5.0, 0.0)
    assert one.decide(7, 0.001, 0.5) is Reason.DEARER


def test_latency_and_bandwidth_are_told_apart() -> None:
    """A load takes 10 ms and 1 ms for each block, computing 3 ms a block: short prefixes are computed."""
    one = BreakEven()
    for i in range(200):
        blocks = 1 + i % 100
        one.loaded(blocks, 0.010 + 0.001 * blocks, now=i / 10)
    assert one.load_seconds(50) == pytest.approx(0.060, rel=0.1)
    assert one.decide(2, 0.006, 20.0) is Reason.DEARER
    assert one.decide(20, 0.060, 20.0) is Reason.CHEAPER


def test_an_answer_that_never_came_counts_against_loading() -> None:
    one = BreakEven()
    one.loaded(100, 0.001, 0.0)
    assert one.decide(100, 0.16, 0.0) is Reason.CHEAPER
    one.loaded(0, 5.0, 1.0)
    assert one.decide(100, 0.16, 1.0) is Reason.DEARER


@given(MEASURED, AMOUNTS, SECONDS)
def test_nothing_is_loaded_when_the_estimate_says_compute(
    events: list[tuple[str, int, float, float]], blocks: int, compute: float
) -> None:
    one, now = play(events)
    load = one.load_seconds(blocks)
    assert load >= 0
    assert (one.decide(blocks, compute, now) is Reason.CHEAPER) == (load <= compute)


@given(MEASURED, AMOUNTS, AMOUNTS)
def test_more_never_takes_less(events: list[tuple[str, int, float, float]], one: int, other: int) -> None:
    estimate, _ = play(events)
    few, more = sorted((one, other))
    assert estimate.load_seconds(few) <= estimate.load_seconds(more)


@given(MEASURED, AMOUNTS, SECONDS, st.floats(0.01, 0.9))
def test_a_faster_store_never_turns_loading_into_computing(
    events: list[tuple[str, int, float, float]], blocks: int, compute: float, scale: float
) -> None:
    slow, now = play(events)
    fast, _ = play(events, scale)
    if slow.load_seconds(blocks) <= compute:
        assert fast.decide(blocks, compute, now) is Reason.CHEAPER


class World:
    """A store with a speed of its own, and five requests a second for 100 known blocks, which take 170 ms to compute."""

    def __init__(self) -> None:
        self.one = BreakEven()
        self.now = 0.0
        self.probing = 0.0  # seconds spent in probes

    def live(self, seconds: float, load: Callable[[int], float]) -> list[Reason]:
        reasons, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.2
            reason = self.one.decide(100, 0.17, self.now)
            reasons.append(reason)
            if reason in LOADS:
                self.one.loaded(100, load(100), self.now + load(100))
                self.probing += load(100) if reason is Reason.PROBE else 0
        return reasons


@pytest.mark.parametrize("slow", [0.3, 5.0])
def test_it_follows_the_store_and_is_never_stuck(slow: float) -> None:
    world = World()
    reasons = world.live(100, lambda blocks: 0.0005 * blocks)
    assert reasons.count(Reason.CHEAPER) > 0.98 * len(reasons)

    reasons = world.live(300, lambda _: slow)
    assert reasons.count(Reason.DEARER) > 0.9 * len(reasons), "it learns soon that loading does not pay any more"
    assert 0 < world.probing <= 300 * max(PROBE_SHARE, slow / PROBE_S[1]) * 1.1

    reasons = world.live(10 * PROBE_S[1], lambda blocks: 0.0005 * blocks)
    assert reasons[-50:].count(Reason.CHEAPER) >= 49, "and that it does again"


def test_one_probe_at_a_time() -> None:
    one = BreakEven()
    one.loaded(100, 10.0, 0.0)
    later = PROBE_S[1] + 1
    assert [one.decide(100, 0.16, later) for _ in range(4)] == [Reason.PROBE] + [Reason.DEARER] * 3
