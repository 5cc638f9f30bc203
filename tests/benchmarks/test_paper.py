"""The experiments of the PagedAttention paper, in virtual time and small: which memory serves a rate sooner."""

import importlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pdserve.errors import SetupError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper")


def test_at_one_rate_the_less_is_reserved_the_sooner_requests_are_served(paper: Any) -> None:
    """By normalized latency; a static batch is the slowest."""
    requests = paper.draw("sharegpt", 6.0, paper.Settings(requests=80))
    latencies = {name: fmean(serve(requests).latencies) for name, serve in paper.SERVERS.items()}
    assert list(latencies) == ["paged", "oracle", "power of two", "max", "static"]
    assert list(latencies.values()) == sorted(latencies.values()) and latencies["max"] > 2 * latencies["paged"]


def test_large_blocks_waste_more_and_choices_share_theirs(paper: Any) -> None:
    requests = paper.draw("alpaca", 40.0, paper.Settings(requests=20))
    wasted = [1 - one.used / one.held for one in (paper.paged(requests, block) for block in (16, 64))]
    assert 0 < wasted[0] < 0.15 < wasted[1]
    several, beams = (paper.paged(requests, choices=4, switch=switch) for switch in (0.0, paper.SWITCH))
    assert 0 < 1 - several.held / several.used < 1 - beams.held / beams.used, "beams share their answers too"


def test_a_limit_that_no_rate_meets_is_said(paper: Any) -> None:
    with pytest.raises(SetupError, match=r"--limit 0\.001 is less than a request alone takes"):
        paper.capacity("sharegpt", paper.paged, paper.Settings(requests=20, limit=0.001))
