"""The load that forecasts are made for."""

import math
from dataclasses import replace
from random import Random

import pytest

from pdserve.tools.autoscaler.load import (
    MAX_TREND,
    answer_lengths,
    answer_seconds,
    expected_load,
    expected_rate,
    replayed,
    since_change,
)
from pdserve.tools.autoscaler.observation import Seen, merge_traffic, parse_traffic
from pdserve.tools.bench.requests import Request
from pdserve.tools.planner.targets import Group, parse_targets


def seen(at: float, output: int, ttft: float | None = 1.0, e2e: float | None = None) -> Seen:
    request = Request(0, output, ((f"own-{at}", 100),), input_tokens=100, at=at)
    return Seen(request, ttft, 0.1 if e2e else None, e2e, "length" if e2e else "")


def test_the_rate_is_that_of_the_window_unless_there_is_a_trend() -> None:
    steady = [float(second) for second in range(100)]
    assert expected_rate(steady, 100.0, 80.0, 40.0) == pytest.approx(1.0, abs=0.02)
    rising = [100 * math.sqrt(n / 1000) for n in range(1000)]  # from 0 to 20 per second
    assert 20 < expected_rate(rising, 100.0, 80.0, 40.0) < 26  # 24 in the middle of the next 40 s
    falling = [100 - time for time in reversed(rising)]
    assert expected_rate(falling, 100.0, 80.0, 40.0) == pytest.approx(4 / MAX_TREND, rel=0.2)
    step = [n / 10 for n in range(500)] + [50 + n / 40 for n in range(2000)]
    assert expected_rate(step, 100.0, 80.0, 40.0) == pytest.approx(40, rel=0.05)
    assert expected_rate([], 100.0, 80.0, 40.0) == 0
    counts = enumerate(
        [523, 600, 599, 651]
    )  # of Azure's conversations in quarters of a minute: 2.6 standard deviations
    bursts = [15 * (quarter + (n + 1) / count) for quarter, count in counts for n in range(count)]
    assert expected_rate(bursts, 60.0, 60.0, 40.0) == pytest.approx(2373 / 60, rel=0.01)


def test_answers_that_still_run_are_as_long_as_longer_ones_were() -> None:
    requests = [seen(0, 10, e2e=2), seen(1, 50, e2e=2), seen(2, 90, e2e=3), seen(3, 20), seen(4, 95), seen(5, 0, None)]
    assert answer_lengths(requests, 0.0, 6.0) == [10, 50, 90, 90, 190, 50]
    assert answer_lengths([seen(0, 0, None)], 0.0, 6.0) == [1]


@pytest.mark.parametrize("began_at", [0, 30])
def test_answers_are_neither_taken_to_be_short_as_those_that_ended_nor_long_as_those_that_run(began_at: float) -> None:
    """Of the requests before the window there are only those that ran on in it: long ones."""
    random = Random(5)
    requests, lengths = list[Seen](), list[int]()
    for number in range(1200):  # 20 arrive per second, and have two tokens per second: now is 60
        at, tokens = number / 20, random.randint(1, 100)
        so_far = int(2 * (60 - at))
        if at + tokens / 2 >= began_at:
            requests.append(seen(at, tokens, 0.0, tokens / 2) if tokens <= so_far else seen(at, so_far, 0.0))
            lengths.append(tokens)
    ended = [one.request.output_tokens for one in requests if one.finish_reason]
    found = answer_lengths(requests, began_at, 60.0)
    assert sum(ended) / len(ended) < 0.85 * sum(lengths) / len(lengths)
    newest = [pair for one, *pair in zip(requests, found, lengths, strict=True) if one.at > 50]
    assert sum(a for a, _ in newest) == pytest.approx(50.5 * len(newest), rel=0.03)
    assert sum(found) == pytest.approx(sum(lengths), rel=0.03)
    assert sorted(found)[len(found) * 9 // 10] == pytest.approx(sorted(lengths)[len(found) * 9 // 10], abs=5)


def test_answers_that_still_run_go_on_at_their_speed() -> None:
    requests = [(seen(0, 10, 1.0, 6.0), 10), (seen(1, 20, 1.0), 80), (seen(5, 0, None), 50), (seen(9, 0, 1.0), 5)]
    assert answer_seconds(requests, 12.0) == [5.0, 10.0 * 80 / 20, 2.0 * 5]


def test_a_change_of_the_prompts_is_seen_after_a_few_seconds() -> None:
    random = Random(7)
    long, short = ([round(tokens * random.uniform(0.7, 1.3)) for _ in range(200)] for tokens in (1000, 100))
    assert since_change(long[:200] + short[:10]) == 0, "too few to tell"
    assert since_change(long[:200] + short[:30]) == pytest.approx(200, abs=6)
    assert since_change(long[:60] + short[:150]) == pytest.approx(60, abs=15)
    mixed = [random.choice((long[n], short[n])) for n in range(200)]
    assert since_change(mixed) == since_change(long) == since_change([100] * 200) == since_change([]) == 0
    drift = [round(random.lognormvariate(6 + 0.5 * (n > 2000), 1)) for n in range(3000)]
    assert since_change(drift) == 0, "more than chance, but no other mix"
    assert sum(since_change([round(random.lognormvariate(6, 1)) for _ in range(250)]) > 0 for _ in range(100)) <= 2


def test_refused_requests_are_demand_for_whole_answers() -> None:
    finished, refused = seen(0, 80, 1.0, 10.0), replace(seen(1, 0, None), finish_reason="refused")
    assert answer_lengths([finished, refused], 0.0, 12.0) == [80, 80]


def test_requests_that_ran_already_go_on_with_the_rest_of_their_answer() -> None:
    finished, running, waiting = seen(0, 80, 2.0, 10.0), seen(1, 30, 1.0), seen(2, 0, None)
    load = replayed([(finished, 80), (running, 80), (waiting, 80)], 6.0, 8.0)
    assert [(one.index, one.at) for one in load] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert [one.input_tokens for one in load] == [1, 1, 100]
    assert [one.output_tokens for one in load] == [40, 60, 80]  # 80 × 4/8, and 80 − 30 × 4/6


def test_expected_prompts_share_what_several_prompts_shared() -> None:
    received = [Request(n, 5, (("system", 64), (f"own-{n}", 36)), input_tokens=100, at=float(n)) for n in range(20)]
    load = expected_load(received, 20.0, 3.0, 50.0, first_index=20)
    assert len(load) == pytest.approx(150, abs=40) and [one.index for one in load] == list(range(20, 20 + len(load)))
    assert all(20.0 < (one.at or 0) < 70.0 and one.blocks[0] == ("system", 64) for one in load)
    assert len({one.blocks[1][0] for one in load} | {one.blocks[1][0] for one in received}) == 20 + len(load)
    assert load == expected_load(received, 20.0, 3.0, 50.0, first_index=20) and not expected_load(
        [], 20.0, 3.0, 50.0, 0
    )


def test_traffic_of_several_routers_is_one() -> None:
    line = (
        '{{"request_id": "{0}", "timestamp": {1}, "input_length": 70, "output_length": 5, "hash_ids": [7], "block_size": 64, '
        '"ttft_ms": 20, "itl_p99_ms": null, "e2e_ms": null, "finish_reason": ""}}'
    )
    first = parse_traffic(f"{line.format('a', 1000)}\n{line.format('c', 3000)}\n")
    merged = merge_traffic([first, parse_traffic(line.format("b", 2000))])
    assert [(one.request.index, one.at) for one in merged] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert merged[1].request.blocks == (("7", 64), ("own-b", 6)) and merged[1].ttft_s == 0.02
    waiting = replace(merged[1], ttft_s=None).sample(2.5)
    assert waiting is not None and waiting.ttft == 0.5, "it has waited for so long"
    assert replace(merged[1], finish_reason="cancelled").sample(9.0) is None
    refused = replace(merged[1], finish_reason="refused", ttft_s=None, e2e_s=0.0).sample(9.0)
    assert refused is not None and not refused.ok
    sample = merged[1].sample(9.0)
    assert sample is not None and sample.ok and sample.ttft == pytest.approx(0.02)


def test_what_was_seen_counts_for_targets_by_prompt_length() -> None:
    (target,) = parse_targets("ttft.p90=500ms", Group(50, 200))
    late = seen(0.0, 10, ttft=2.0, e2e=3.0).sample(10.0)
    assert late is not None and target.measure({}, [late]) == 2.0
