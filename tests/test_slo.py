"""Parsing of SLOs."""

import pytest

from pdserve.slo import Slo


def test_parse() -> None:
    assert Slo.parse("") == Slo()
    assert Slo.parse("ttft=500ms,itl=50ms") == Slo(0.5, 0.05)
    assert Slo.parse("itl = 0.5s") == Slo(itl=0.5)
    for wrong in (
        "ttft",
        "ttft=500",
        "ttft=0ms",
        "ttft=-1s",
        "tpot=1s",
        "ttft=1s,ttft=2s",
        "ttft=1s;itl=1s",
        "itl=1.2.3s",
    ):
        with pytest.raises(ValueError, match="no valid SLO; give"):
            Slo.parse(wrong)
