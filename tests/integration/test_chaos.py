"""A short run of scripts/chaos: instances die, freeze, drain, change roles and lose the network and the store under load."""

import importlib
from pathlib import Path

import pytest

from pdserve.deployment import Deployment


def test_whatever_happens_every_token_is_right_and_nothing_is_left(
    forked: type[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    chaos = importlib.import_module("chaos")
    settings = chaos.Settings(**{**chaos.QUICK, "seconds": 20.0})
    shown = chaos.play(settings, type("Forked", (chaos.Chaotic, forked), {}))
    broken = [verdict for verdict in shown["verdicts"] if verdict["is"] > verdict["may be"]]
    assert not broken, "\n".join(map(str, [*broken, *shown["defects"], *shown["fault_log"], *shown["log"]]))
    assert len(shown["fault_log"]) > 3 and shown["ends"]["length"] > 0
