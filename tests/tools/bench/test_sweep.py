"""SLOs of requests, confidence intervals, and the search for the highest rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import is_good, mean_interval, parse_goodput, wilson
from pdserve.tools.bench.sweep import Search, Trial, is_saturated, is_short


def sample(*times: float, sent: float = 0.0, status: int = 200) -> Sample:
    return Sample(0, sent, sent=sent, ended=times[-1], token_times=list(times), status=status, output_tokens=len(times))


def test_goodput_is_in_milliseconds() -> None:
    assert parse_goodput("ttft:500,itl:50 e2el:1e3") == {"ttft": 0.5, "itl": 0.05, "e2el": 1.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "ttft:0", "ttft:nan", "speed:1", "itl:1,itl:2"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--goodput: "):
        parse_goodput(text)


def test_each_objective_counts() -> None:
    one = sample(0.1, 0.2, 0.5)
    assert is_good(one, {"ttft": 0.1, "tpot": 0.2001, "itl": 0.3001, "e2el": 0.5})
    for objective in ({"ttft": 0.09}, {"tpot": 0.19}, {"itl": 0.29}, {"e2el": 0.49}):
        assert not is_good(one, objective)
    assert not is_good(sample(0.1, status=429), {"ttft": 1.0})


def test_one_late_gap_in_a_hundred_is_within_the_objective() -> None:
    assert is_good(sample(*range(101), 110), {"itl": 1.0}) and not is_good(sample(*range(50), 60), {"itl": 1.0})


@given(st.floats(0.1, 100), st.floats(1, 10))
def test_the_search_ends_within_its_tolerance_of_the_capacity(capacity: float, start: float) -> None:
    shares = (0.9, 0.99)
    limits = {0.9: capacity, 0.99: capacity / 2}
    search = Search(start, shares, 0.1)
    for _ in range(100):
        if (rate := search.next_rate()) is None:
            break
        good = 100 if rate <= limits[0.99] else 95 if rate <= limits[0.9] else 10
        search.add(Trial(rate, good, 100, saturated=rate > 1.5 * capacity))
    else:
        raise AssertionError("the search does not end")
    for share in shares:
        highest = search.highest(share)
        assert highest is not None and highest <= limits[share] <= highest * 1.1 * (1 + 1e-9)


def test_the_search_asks_for_no_rate_above_a_saturated_one() -> None:
    search = Search(8.0, (0.9,), 0.1)
    search.add(Trial(8.0, 100, 100, saturated=True))
    while (rate := search.next_rate()) is not None:
        assert rate < 8.0
        search.add(Trial(rate, 100, 100))
    assert search.highest(0.9) == pytest.approx(8.0, rel=0.1)


def test_the_search_ends_where_the_load_is_too_short_to_tell_rates_apart() -> None:
    search = Search(1.0, (0.9, 0.99), 0.1)
    while (rate := search.next_rate()) is not None:
        search.add(Trial(rate, 100, 100, short=rate > 6))
    assert search.highest(0.9) == 8.0 and search.is_open(0.9) and search.is_open(0.99)
    missing = Search(4.0, (0.9,), 0.1, [Trial(8.0, 10, 100, short=True), Trial(4.0, 100, 100)])
    assert not missing.is_open(0.9) and missing.next_rate() is not None


def test_a_load_is_short_if_half_of_it_is_under_way_at_its_end() -> None:
    assert not is_short([sample(i / 10 + 0.4, sent=i / 10) for i in range(10)])
    assert is_short([sample(i / 10 + 0.6, sent=i / 10) for i in range(10)]) and not is_short([])


def test_a_server_that_never_meets_the_slo_ends_the_search() -> None:
    search = Search(1.0, (0.9,), 0.1)
    while (rate := search.next_rate()) is not None:
        search.add(Trial(rate, 0, 100))
    assert search.highest(0.9) is None and len(search.trials) < 20


def test_saturation_is_a_growing_number_in_flight() -> None:
    steady = [sample(i / 10 + 1.0, sent=i / 10) for i in range(100)]
    growing = [sample(i / 10 + 1.0 + i / 10, sent=i / 10) for i in range(100)]
    assert not is_saturated(steady) and is_saturated(growing) and not is_saturated(growing[:5])


def test_a_load_that_grows_does_not_saturate_a_server_that_keeps_up() -> None:
    times = [100 * i**0.2 for i in range(1000)]  # at an ever higher rate
    keeping_up = [sample(at + 9.0, sent=at) for at in times]
    falling_behind = [sample(at + 9.0 + max(0.0, at - 350), sent=at) for at in times]
    assert not is_saturated(keeping_up) and is_saturated(falling_behind)


def test_a_server_that_falls_behind_slowly_is_saturated_once_chance_does_not_explain_it() -> None:
    slower = [sample(i / 10 + 4.0 + 0.015 * i, sent=i / 10) for i in range(400)]  # 1.3 times as many in flight
    assert is_saturated(slower) and not is_saturated(slower[:200])


def test_an_empty_server_that_fills_is_not_saturated_after_the_warm_up() -> None:
    filling = [sample(i / 10 + 6.0, sent=i / 10) for i in range(100)]  # 60 in flight from second 6 on
    assert is_saturated(filling[:70]) and not is_saturated(filling, 60) and not is_saturated(filling[:68], 60)


def test_confidence_intervals() -> None:
    assert wilson(90, 100) == pytest.approx((0.826, 0.945), abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0) and wilson(10, 10)[1] == 1.0
    assert mean_interval([5.0])[1] == math.inf
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.30 / math.sqrt(3)))
