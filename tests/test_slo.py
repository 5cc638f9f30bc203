"""SLOs: one syntax for all commands."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.slo import Slo
from pdserve.tools.bench.slo import parse_goodput
from pdserve.tools.planner.targets import Target, parse_targets


@pytest.mark.parametrize(
    "text",
    [
        "ttft=500ms,itl=50ms",
        "ttft.p90=500ms,itl.p99=0.05s",
        "ttft:500,itl:50",
        "ttft:500 itl:5e1",
        "itl = 50 , ttft=0.5s",
    ],
)
def test_every_command_takes_every_form(text: str) -> None:
    assert Slo.parse(text) == Slo(0.5, 0.05)
    assert parse_goodput(text) == {"ttft": 0.5, "itl": 0.05}
    percentile = 90 if "p90" in text else 99
    assert set(parse_targets(text)) == {Target("ttft", percentile, 0.5), Target("itl", 99, 0.05)}


def test_the_loosest_of_several_percentiles_holds_for_single_requests() -> None:
    assert Slo.parse("ttft.p50=100ms,ttft.p99=2s") == Slo(2.0, math.inf)


def test_no_objective() -> None:
    assert Slo.parse("") == Slo()
    assert parse_goodput("") == {}
    with pytest.raises(ValueError, match="there is no target"):
        parse_targets("")


@pytest.mark.parametrize("parse", [Slo.parse, parse_goodput, parse_targets])
@pytest.mark.parametrize(
    "text",
    [
        "ttft",
        "ttft=0ms",
        "ttft=-1s",
        "tbt=1s",
        "ttft=1s,ttft=2s",
        "ttft=1s;itl=1s",
        "itl=1.2.3s",
        "ttft=1e999",
        "ttft=nan",
        "ttft.px=1s",
    ],
)
def test_malformed(text: str, parse: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"is no objective; write such as ttft|was given before"):
        parse(text)


def test_percentiles_that_are_not_measured() -> None:
    with pytest.raises(ValueError, match=r"p75 of ttft is not known; .* with one of p50, p90, p95, p99"):
        parse_targets("ttft.p75=1s")
    with pytest.raises(ValueError, match="names a target twice"):
        parse_targets("ttft.p99=1s,ttft=2s")


def test_metrics_that_admission_does_not_forecast() -> None:
    with pytest.raises(ValueError, match="of ttft, itl"):
        Slo.parse("tpot=1s")
