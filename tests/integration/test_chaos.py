"""scripts/chaos for a minute: instances die, freeze, drain, change roles and lose the network and the store under load."""

import importlib
from pathlib import Path

import pytest

from pdserve.cli.deployment import Deployment


@pytest.mark.timeout(900)  # as long as it takes until each kind of fault has come and all is over
def test_whatever_happens_every_token_is_right_and_nothing_is_left(
    forked: type[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    chaos = importlib.import_module("chaos")
    shown = chaos.play(chaos.Settings(**{**chaos.QUICK, "seconds": 60.0}), type("Forked", (chaos.Chaotic, forked), {}))
    broken = chaos.broken(shown["verdicts"])
    assert not broken, "\n".join(map(str, [*broken, *shown["defects"], *shown["fault_log"], *shown["log"]]))
    assert shown["ends"]["length"] > 0 and set(shown["left_out"]) <= {"cut"}
