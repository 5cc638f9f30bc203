"""Tests of what commands write and draw: files are checked before the work starts, and no thread draws while it forks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pdserve.errors import SetupError
from pdserve.tools import offline_bench
from pdserve.tools.bench import command as bench
from pdserve.tools.bench.report import check_writable
from pdserve.tools.load_config import (
    BenchLatencyConfig,
    BenchServeConfig,
    BenchTuneConfig,
    PlanConfig,
    ProfileConfig,
    SimulateConfig,
)
from pdserve.tools.planner import command as planner
from pdserve.tools.profiling import command as profiling
from pdserve.tools.simulator import command as simulator
from pdserve.tools.tuner import command as tuner

SLO = "ttft.p90=1s"


def work(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("it worked before it looked at the file")


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (planner.run, lambda file: PlanConfig(slo=SLO, json=file)),
        (planner.run, lambda file: PlanConfig(slo=SLO, html=file)),
        (planner.run, lambda file: PlanConfig(slo=SLO, apply=file)),
        (simulator.run, lambda file: SimulateConfig(json=file)),
        (simulator.run, lambda file: SimulateConfig(csv=file)),
        (lambda config: profiling.run(config, work), lambda file: ProfileConfig(output=file)),
        (offline_bench.run, lambda file: BenchLatencyConfig(output_json=file)),
        (bench.run, lambda file: BenchServeConfig(csv=file)),
        (bench.run, lambda file: BenchServeConfig(html=file)),
        (bench.run, lambda file: BenchServeConfig(save_result=True, result_dir=file)),
        (tuner.run, lambda file: BenchTuneConfig(slo=SLO, state=file)),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(
    run: Callable[[Any], object],
    settings: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in (
        (planner, "Planner"),
        (simulator, "simulate_all"),
        (profiling, "_measure"),
        (bench, "prepare"),
    ):
        monkeypatch.setattr(module, name, work)
    for module in (planner, simulator):
        monkeypatch.setattr(module, "load_profile", lambda _: None)
    monkeypatch.setattr("pdserve.offline.llm.LLM", work)
    monkeypatch.setattr(tuner, "load_profile", work)
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/below.* cannot be written: "):
        run(settings(str(tmp_path / "file" / "below")))


def test_a_look_at_a_file_leaves_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("content")
    check_writable(tmp_path / "old", tmp_path / "folder" / "new", "", "/dev/null")
    assert (tmp_path / "old").read_text() == "content" and not (tmp_path / "folder" / "new").exists()
    with pytest.raises(SetupError, match="cannot be written: Is a directory"):
        check_writable(tmp_path)


class Simulated(Exception):
    """The work has begun."""


@pytest.mark.parametrize(
    ("run", "settings"),
    [(planner.run, PlanConfig(slo=SLO)), (simulator.run, SimulateConfig())],
    ids=["plan", "simulate"],
)
def test_no_thread_shows_progress_while_simulations_fork(
    run: Callable[[Any], object], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork while it draws would leave its locks held in the new process, which then hangs at its first line."""
    before = {*threading.enumerate()}

    def simulate(*_: Any) -> NoReturn:
        assert {*threading.enumerate()} <= before
        raise Simulated

    for module, name in ((planner, "Planner"), (simulator, "simulate_all")):
        monkeypatch.setattr(module, name, simulate)
    for module in (planner, simulator):
        monkeypatch.setattr(module, "load_profile", lambda _: None)
    with pytest.raises(Simulated):
        run(settings)
