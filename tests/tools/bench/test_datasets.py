"""Arrival times."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.tools.bench.datasets import arrival_times, ramp_times, replay, schedule
from pdserve.tools.bench.requests import Request

GAMMA = random.Random(1).gammavariate


@given(st.integers(1, 200), st.floats(0.1, 1000), st.sampled_from([0.3, 1.0, 5.0, math.inf]))
def test_the_mean_rate_is_exact_and_time_never_runs_back(count: int, rate: float, burstiness: float) -> None:
    times = arrival_times(count, rate, burstiness, GAMMA)
    assert len(times) == count and times == sorted(times)
    assert times[-1] == pytest.approx(count / rate)


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, GAMMA) == [0, 0, 0]


def test_infinite_burstiness_gives_constant_intervals() -> None:
    assert arrival_times(4, 2.0, math.inf, GAMMA) == [0.5, 1.0, 1.5, 2.0]


def test_burstiness_is_the_inverse_of_the_squared_variation() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = arrival_times(20_000, 1.0, burstiness, random.Random(3).gammavariate)
        gaps = [b - a for a, b in pairwise(times)]
        variance = sum((gap - 1) ** 2 for gap in gaps) / len(gaps)
        assert variance == pytest.approx(1 / burstiness, rel=0.1)


def test_ramps_begin_and_end_at_their_rates() -> None:
    for exponential, middle in ((False, 50.5), (True, 10.0)):
        times = ramp_times(101, 1.0, 100.0, exponential, math.inf, GAMMA)
        rates = [1 / (b - a) for a, b in zip([0.0, *times], times, strict=False)]
        assert [rates[0], rates[50], rates[-1]] == pytest.approx([1.0, middle, 100.0])


def test_a_trace_is_replayed_from_0_at_a_speed_or_at_a_rate() -> None:
    trace = [Request(index, 1, at=10.0 + index) for index in range(5)]
    assert [one.at for one in replay(trace, 2.0, math.inf)] == [0, 0.5, 1.0, 1.5, 2.0]
    assert [one.at for one in replay(trace, 2.0, 10.0)] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])
    assert [one.at for one in replay(trace[:1], 1.0, 10.0)] == [0]


def test_later_turns_take_no_arrival_time() -> None:
    requests = [Request(0, 1), Request(1, 1, after=0), Request(2, 1)]
    assert [one.at for one in schedule(requests, [0.1, 0.2])] == [0.1, 0.0, 0.2]
