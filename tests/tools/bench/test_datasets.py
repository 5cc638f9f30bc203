"""Arrival times."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import SetupError
from pdserve.tools.bench.datasets import arrival_times, draw_load, ramp_times, replay, schedule
from pdserve.tools.bench.requests import Request
from pdserve.tools.load_config import LoadConfig

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


def drawn(rate: float, **settings: Any) -> list[Request]:
    return draw_load(LoadConfig(**settings), rate, random.Random(0), len)


def test_a_trace_without_times_is_sent_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    """And not all at once, as if there were none."""
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 100, "output_length": 5, "hash_ids": [1]}
    path.write_text("".join(f"{json.dumps(row)}\n" for _ in range(20)))
    own = {"dataset_name": "mooncake", "dataset_path": str(path)}
    times = [one.at or 0.0 for one in drawn(5.0, **own)]
    assert times == sorted(times) and times[-1] == pytest.approx(20 / 5) and len(set(times)) == 20
    assert {one.at for one in drawn(math.inf, **own)} == {0.0}


def test_burstiness_has_no_effect_beside_the_times_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * at, "input_length": 100, "output_length": 5, "hash_ids": [1]} for at in range(3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = {"dataset_name": "mooncake", "dataset_path": str(path), "request_rate": 5.0}
    assert len(drawn(5.0, **own)) == 3
    with pytest.raises(SetupError, match=r"--burstiness has no effect beside the times in .*: leave it out"):
        drawn(5.0, **own, burstiness=2.0)
