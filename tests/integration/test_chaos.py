"""scripts/chaos, in short: instances die, freeze, drain, change roles and lose the network and the store under load."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.deployment import Deployment


@pytest.mark.parametrize("seconds", [30.0, pytest.param(180.0, marks=pytest.mark.slow)])
def test_whatever_happens_every_token_is_right_and_nothing_is_left(
    seconds: float, forked: type[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    chaos = importlib.import_module("chaos")

    def settle(self: Any, island: object) -> None:
        chaos.Chaotic.settle(self, island)
        self.child("router").arguments += ["--handover-timeout-seconds", "600"]  # no fault lasts for 3 s

    settings = chaos.Settings(**{**chaos.QUICK, "seconds": seconds, "deadline": 600.0})
    shown = chaos.play(settings, type("Forked", (chaos.Chaotic, forked), {"settle": settle}))
    broken = chaos.broken(shown["verdicts"])
    assert not broken, "\n".join(map(str, [*broken, *shown["defects"], *shown["fault_log"], *shown["log"]]))
    assert shown["ends"]["length"] > 0 and set(shown["left_out"]) <= {"cut"}
