"""Load or compute: the estimates follow what is measured, the decision follows the estimates, and none is for ever."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.break_even import LONG_STEP, PROBE_S, PROBE_SHARE, BreakEven, Reason

BLOCK = 16  # tokens
AMOUNTS = st.integers(1, 10_000)
SECONDS = st.floats(1e-6, 60)
PAUSES = st.floats(0, 300)
EVENTS = st.lists(st.tuples(st.sampled_from(["load", "step", "ask"]), AMOUNTS, SECONDS, PAUSES), max_size=60)
MEASURED = EVENTS.map(lambda events: [("load", 3, 0.1, 0.0), ("step", 3, 0.1, 0.0), *events])


def play(events: list[tuple[str, int, float, float]], scale: float = 1.0) -> tuple[BreakEven, float]:
    """What happens, pauses included, with loads that take `scale` times as long; and what time it is then."""
    one, now = BreakEven(BLOCK), 0.0
    for kind, amount, seconds, pause in events:
        now += pause
        if kind == "load":
            one.loaded(amount, seconds * scale, now)
        elif kind == "step":
            one.computed(amount + 1, 1, seconds, now)
        else:
            one.decide(amount, now)
    return one, now


def test_before_both_are_measured_everything_is_loaded() -> None:
    one = BreakEven(BLOCK)
    assert one.decide(7, 0.0) == (7, Reason.UNMEASURED)
    one.loaded(10, 5.0, 0.0)
    assert one.decide(7, 0.0) == (7, Reason.UNMEASURED)
    one.computed(100, 1, 0.001, 0.0)
    assert one.decide(7, 0.5) == (0, Reason.DEARER)


def test_latency_and_bandwidth_are_told_apart() -> None:
    """A load takes 10 ms and 1 ms for each block, a token 0.2 ms in a step of 5 ms: short prefixes are computed."""
    one = BreakEven(BLOCK)
    for i in range(200):
        blocks = 1 + i % 100
        one.loaded(blocks, 0.010 + 0.001 * blocks, now=i / 10)
        one.computed(BLOCK * blocks, 1, 0.005 + 0.0002 * BLOCK * blocks, now=i / 10)
    assert one.load_seconds(50) == pytest.approx(0.060, rel=0.1)
    assert one.compute_seconds(50) == pytest.approx(0.160, rel=0.1)
    assert one.decide(2, 20.0) == (0, Reason.DEARER)
    assert one.decide(20, 20.0) == (20, Reason.CHEAPER)


def test_a_step_counts_with_those_that_a_gpu_had_only_begun_with() -> None:
    one, whole = BreakEven(BLOCK), BreakEven(BLOCK)
    for _ in range(7):
        one.computed(2048, 0, 0.001, 0.0)
    one.computed(664, 1, 0.993, 0.0)
    one.computed(3, 3, 0.5, 0.0)  # decoding only
    one.computed(0, 0, 0.0, 0.0)  # nothing to do
    whole.computed(15000, 1, 1.0, 0.0)
    assert one.compute_seconds(100) == pytest.approx(whole.compute_seconds(100))


def test_an_answer_that_never_came_counts_against_loading() -> None:
    one = BreakEven(BLOCK)
    one.computed(1000, 1, 0.1, 0.0)
    one.loaded(100, 0.001, 0.0)
    assert one.decide(100, 0.0) == (100, Reason.CHEAPER)
    one.loaded(0, 5.0, 1.0)
    assert one.decide(100, 1.0) == (0, Reason.DEARER)


def test_the_end_is_computed_where_no_long_step_was_measured() -> None:
    one = BreakEven(BLOCK)
    one.loaded(100, 0.001, 0.0)
    one.computed(40, 1, 0.1, 0.0)
    assert one.decide(100, 1.0) == (100 - LONG_STEP // BLOCK, Reason.LONG_STEP)
    assert one.decide(10, 1.0) == (0, Reason.LONG_STEP)
    assert one.decide(4, 1.0) == (4, Reason.CHEAPER), "40 tokens are more than half of it"
    one.computed(LONG_STEP, 1, 1.0, 2.0)
    assert one.decide(100, 2.0) == (100, Reason.CHEAPER)
    assert one.decide(100, 1000.0)[1] is Reason.LONG_STEP, "that was long ago"


@given(MEASURED, AMOUNTS)
def test_nothing_is_loaded_when_the_estimate_says_compute(
    events: list[tuple[str, int, float, float]], blocks: int
) -> None:
    one, now = play(events)
    load, compute = one.load_seconds(blocks), one.compute_seconds(blocks)
    assert load >= 0 and compute >= 0
    count, reason = one.decide(blocks, now)
    assert 0 <= count <= blocks
    assert (reason in (Reason.CHEAPER, Reason.LONG_STEP)) == (load <= compute)
    assert (reason in (Reason.DEARER, Reason.PROBE)) == (load > compute)
    assert reason is not Reason.DEARER or count == 0


@given(MEASURED, AMOUNTS, AMOUNTS)
def test_more_never_takes_less(events: list[tuple[str, int, float, float]], one: int, other: int) -> None:
    estimate, _ = play(events)
    few, more = sorted((one, other))
    assert estimate.load_seconds(few) <= estimate.load_seconds(more)
    assert estimate.compute_seconds(few) <= estimate.compute_seconds(more)


@given(MEASURED, AMOUNTS, st.floats(0.01, 0.9))
def test_a_faster_store_never_turns_loading_into_computing(
    events: list[tuple[str, int, float, float]], blocks: int, scale: float
) -> None:
    slow, now = play(events)
    fast, _ = play(events, scale)
    if slow.load_seconds(blocks) <= slow.compute_seconds(blocks):
        assert fast.decide(blocks, now)[0] >= slow.decide(blocks, now)[0]
        assert fast.decide(blocks, now)[1] in (Reason.CHEAPER, Reason.LONG_STEP)


class World:
    """A store and an engine with speeds of their own, and five requests a second: 100 known blocks, 40 new tokens."""

    def __init__(self) -> None:
        self.one = BreakEven(BLOCK)
        self.now = 0.0
        self.probing = 0.0  # seconds spent in probes

    def live(self, seconds: float, load: Callable[[int], float], step: Callable[[int], float]) -> list[Reason]:
        reasons, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.2
            count, reason = self.one.decide(100, self.now)
            reasons.append(reason)
            if count:
                self.one.loaded(count, load(count), self.now + load(count))
                self.probing += load(count) if reason is Reason.PROBE else 0
            tokens = 40 + BLOCK * (100 - count)
            self.one.computed(tokens, 1, step(tokens), self.now + step(tokens))
        return reasons


@pytest.mark.parametrize("slow", [0.3, 5.0])
def test_it_follows_the_store_and_is_never_stuck(slow: float) -> None:
    """Computing takes 170 ms. The short steps alone would let it seem to take 0.6 s."""
    world = World()
    step: Callable[[int], float] = lambda tokens: 0.01 + 0.0001 * tokens  # noqa: E731
    reasons = world.live(100, lambda blocks: 0.0005 * blocks, step)
    assert reasons.count(Reason.CHEAPER) > 0.98 * len(reasons)

    reasons = world.live(300, lambda _: slow, step)
    assert reasons.count(Reason.DEARER) > 0.9 * len(reasons), "it learns soon that loading does not pay any more"
    assert 0 < world.probing <= 300 * max(PROBE_SHARE, slow / PROBE_S[1]) * 1.1

    reasons = world.live(10 * PROBE_S[1], lambda blocks: 0.0005 * blocks, step)
    assert reasons[-50:].count(Reason.CHEAPER) >= 49, "and that it does again"


def test_one_probe_at_a_time() -> None:
    one = BreakEven(BLOCK)
    one.computed(1000, 1, 0.1, 0.0)
    one.loaded(100, 10.0, 0.0)
    later = PROBE_S[1] + 1
    assert [one.decide(100, later)[1] for _ in range(4)] == [Reason.PROBE] + [Reason.DEARER] * 3
