"""The HTML report, its charts, and what it says of a run."""

import re
from collections.abc import Sequence

import pytest

from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.page import format_ratio, heat_map, page, ratios, shares, significant, table
from pdserve.tools.bench.plot import Curve, axis, plot
from pdserve.tools.bench.requests import Sample, failures
from pdserve.tools.bench.run_page import run_charts, run_page, sweep_page
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.bench.sweep import Trial

SAMPLES = [Sample(i, i, sent=i, ended=i + 2, token_times=[i + 1, i + 1.5], status=200) for i in range(5)]


def report_of(samples: Sequence[Sample], objectives: dict[str, float]) -> str:
    figures = summarize(samples, objectives, METRICS, (50, 99), [])
    figures["warnings"] = ["<b> & more"]
    return run_page("a </script> b", figures, samples, objectives, METRICS, (50, 99))


def test_a_report_needs_no_other_host_no_script_and_little_room() -> None:
    text = report_of(SAMPLES, {"itl": 0.6})
    assert not re.search(r"(?:src|href|url\()=?", text) and "://" not in text and "<script" not in text
    assert "&lt;b&gt; &amp; more" in text and "width=device-width" in text
    assert "@media screen and (prefers-color-scheme: dark)" in text and len(text) < 60_000
    assert text.count("<figure") == 4


def test_a_report_begins_with_its_verdict_and_its_figures() -> None:
    text = report_of(SAMPLES, {"itl": 0.6})
    order = [text.index(part) for part in ("100.0% of requests within ITL 600 ms", "<table", "<figure")]
    assert order == sorted(order) and "verdict good" in text
    assert "verdict bad" in report_of(SAMPLES, {"itl": 0.4})
    text = page("t", ["it <holds>"], [("Shown", ["<p>more</p>"]), ("Empty", ["", ""])])
    assert "it &lt;holds&gt;" in text and "Shown" in text and "Empty" not in text


def test_tokens_that_came_together_are_said_in_the_verdict() -> None:
    together = [Sample(0, 0, sent=0, ended=2, token_times=[1, 1, 1, 2], status=200)]
    assert "67% of tokens came together" in report_of(together, {})
    assert "came together" not in report_of(SAMPLES, {})


def test_a_search_of_rates_is_a_table_and_a_chart() -> None:
    text = sweep_page("t", ["99 % good: 3"], [Trial(1, 9, 10), Trial(2, 1, 10, True)], [0.9], [])
    assert "90.0%" in text and "saturated" in text and text.count("<figure") == 1


def test_long_times_have_no_powers_of_ten() -> None:
    slow = [Sample(i, i, sent=i, ended=i + 99, token_times=[i + 13.1512, i + 98.5], status=200) for i in range(5)]
    text = report_of(slow, {"ttft": 1.0})
    assert "e+0" not in text and "<td>13150</td>" in text and '<li class="dashed">target</li>' in text
    assert (significant(999.96, 4), significant(0.01234, 3), significant(-12345.0, 3)) == ("1000", "0.0123", "-12300")


def test_errors_that_differ_in_numbers_are_one_warning() -> None:
    refused = [Sample(i, i, status=429, error=f"the forecast TTFT of 0.7{i} s exceeds the SLO") for i in range(5)]
    told = ["the forecast TTFT of 0.70 s exceeds the SLO (status 429; requests: 5)", "gone (status 0; requests: 1)"]
    assert failures([*SAMPLES, *refused, Sample(9, 9, error="gone")]) == told


def test_a_single_point_is_not_drawn() -> None:
    assert not plot("", [Curve([1, 1], [2, 2]), Curve([], [])], "x")
    assert plot("", [Curve([1, 2], [2, 2])], "x") and plot("", [Curve([1, 1], [2, 3])], "x")
    assert not heat_map("", ["1D", "2D"], {"1P": [0.5, None]}) and heat_map("", ["1D", "2D"], {"1P": [0.5, 0.6]})
    assert not ratios("", {"one": (1.0, "")}) and ratios("", {"one": (1.0, ""), "two": (2.0, "")})
    assert not table((), []) and not shares("", {"a": "prefill"}, {"row": {"a": 0.0}}, "ms")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 97], (0, 20, 40, 60, 80, 100)),
        ([10.78, 10.79], (10.78, 10.782, 10.784, 10.786, 10.788, 10.79)),
        ([0.5, 0.5], (0.5, 0.505, 0.51, 0.515, 0.52, 0.525, 0.53)),
        ([-3, 4], (-2, 0, 2, 4)),
        ([1, 2], (0, 1, 2)),
        ([1.0, 2.5], (0, 0.5, 1, 1.5, 2, 2.5)),
    ],
)
def test_axes_have_round_ticks(values: list[float], ticks: tuple[float, ...]) -> None:
    found = axis(values)
    assert found.low <= min(values) and found.high >= max(values) and found.ticks == pytest.approx(ticks)


def test_names_that_would_cover_others_are_left_out() -> None:
    names = ["first", "second", "covers a dot", "last"]
    crowd = Curve([0, 1, 50, 55, 100], [1, 2, 50, 53, 100], labels=[*names[:3], "dot", names[3]], is_named=True)
    text = plot("", [crowd], "x")
    assert re.findall(r'class="name"[^>]*>(\w+)', text) == ["second", "dot", "last"]
    assert re.findall(r"<title>(\w+)", text) == ["first", "second", "covers", "dot", "last"]


def test_a_ratio_is_1_only_if_the_target_is_met() -> None:
    assert [format_ratio(one) for one in (0.996, 1.0, 1.001, 12.3, 100.0)] == ["1.00", "1.00", "1.01", "12", "fails"]


def test_a_run_without_answers_has_no_charts() -> None:
    assert not any(run_charts([Sample(0, 0, error="refused")], {}))
