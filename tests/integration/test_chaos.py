"""A short run of scripts/chaos: instances die, freeze, drain, change roles, lose the network and the store under load."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.deployment import Deployment


@pytest.mark.long
@pytest.mark.parametrize("seconds", [12.0, pytest.param(180.0, marks=pytest.mark.slow)])
def test_faults_change_no_token_and_leak_nothing(
    seconds: float, forked_deployment: type[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    chaos = importlib.import_module("chaos")

    def settle(self: Any, island: object) -> None:
        chaos.ChaosDeployment.settle(self, island)
        self.child("router").arguments += [
            "--handover-timeout-seconds",
            "600",
            "--no-instance-timeout",
            "600",
        ]  # far above the length of any fault (3 s)

    settings = chaos.Settings(
        **{**chaos.QUICK, "seconds": seconds, "clients": 2, "pause": 0.2, "deadline": 600.0, "adapters": 3}
    )
    shown = chaos.play(settings, type("Forked", (chaos.ChaosDeployment, forked_deployment), {"settle": settle}))
    broken = chaos.broken(shown["verdicts"])
    assert not broken, "\n".join(map(str, [*broken, *shown["defects"], *shown["fault_log"], *shown["log"]]))
    assert shown["ends"]["length"] > 0 and set(shown["left_out"]) <= {"cut", "rank"}
