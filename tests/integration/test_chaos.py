"""scripts/chaos, in short: instances die, freeze, drain, change roles and lose the network and the store under load."""

import importlib
from pathlib import Path

import pytest

from pdserve.cli.deployment import Deployment


@pytest.mark.timeout(900)  # as long as it takes until each kind of fault has come and all is over
@pytest.mark.parametrize("seconds", [30.0, pytest.param(180.0, marks=pytest.mark.slow)])
def test_whatever_happens_every_token_is_right_and_nothing_is_left(
    seconds: float, forked: type[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    chaos = importlib.import_module("chaos")
    shown = chaos.play(
        chaos.Settings(**{**chaos.QUICK, "seconds": seconds}), type("Forked", (chaos.Chaotic, forked), {})
    )
    broken = chaos.broken(shown["verdicts"])
    assert not broken, "\n".join(map(str, [*broken, *shown["defects"], *shown["fault_log"], *shown["log"]]))
    assert shown["ends"]["length"] > 0 and set(shown["left_out"]) <= {"cut"}
