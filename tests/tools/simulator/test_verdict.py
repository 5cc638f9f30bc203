"""A run is given up only if its percentiles are beyond their limits whatever follows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.simulator.verdict import Limit, is_hopeless

TIMES = st.lists(st.floats(0.1, 2.0), min_size=1, max_size=40)


def run(ttfts: list[float]) -> tuple[list[Request], list[Sample]]:
    loads = [Request(n, 3, (), at=0.0) for n in range(len(ttfts))]
    samples = [Sample(n, 0.0, sent=0.0, token_times=[t, t + 0.5 * t, t + t], status=200) for n, t in enumerate(ttfts)]
    return loads, samples


@given(TIMES, st.sampled_from([50, 90, 95, 99]), st.sampled_from(["ttft", "itl"]), st.floats(0.1, 2.0))
def test_what_is_hopeless_misses_the_limit(ttfts: list[float], percentile: int, metric: str, seconds: float) -> None:
    loads, samples = run(ttfts)
    values = ttfts if metric == "ttft" else [gap for one in samples for gap in one.itls]
    exceeded = float(np.percentile(values, percentile)) > seconds
    hopeless = is_hopeless([Limit(metric, percentile, seconds)], loads, samples, 9.0)
    assert exceeded or not hopeless
    if min(values) > seconds:
        assert hopeless, "all are late"


def test_requests_that_wait_are_late_as_soon_as_they_have_waited_too_long() -> None:
    loads, samples = run([0.5] * 10)
    waiting = [Sample(n, 0.0, sent=0.0) for n in range(10, 13)]
    limit = Limit("ttft", 90, 1.0)
    loads += [Request(n, 3, (), at=0.0) for n in range(10, 13)]
    assert not is_hopeless([limit], loads, [*samples, *waiting], 1.0)
    assert is_hopeless([limit], loads, [*samples, *waiting], 1.1)
    assert not is_hopeless([limit], loads, [*samples, waiting[0]], 1.1), "the other two may still be in time"


def test_no_limit_is_never_exceeded() -> None:
    assert not is_hopeless([], *run([9.0]), 10.0)
    assert not is_hopeless([Limit("itl", 99, 0.1)], [Request(0, 1, (), at=0.0)], [], 10.0), "there are no gaps"
