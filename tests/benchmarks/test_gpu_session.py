"""scripts/gpu: a dry run of all parts on the CPU; what has a result is not run again, and what cannot run is named."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module scripts/gpu_session.py; scripts/ is not a package."""
    spec = importlib.util.spec_from_file_location("gpu_session", ROOT / "scripts" / "gpu_session.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_session", module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1500)


def dry_run(folder: Path, *parts: str) -> dict[str, Any]:
    done = run("--dry-run", "--out", str(folder), *parts)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.slow
def test_dry_run_of_the_part_that_serves(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "pd")["gpu-pd.json"]["result"]
    assert len(result["rows"]) == 5 and not any(row["unfinished"] for row in result["rows"])


QUICK = ("attention", "graphs", "8b", "memory", "staging", "swap", "handover")


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dry_run_of_the_other_parts(is_quick: bool, session: ModuleType, tmp_path: Path) -> None:
    parts = QUICK if is_quick else [part.name for part in session.PARTS if part.name != "pd"]
    contents = dry_run(tmp_path, *parts)
    assert contents.keys() == {f"gpu-{part}.json" for part in parts}
    for content in contents.values():
        assert content["dry_run"] and "torch" in content["device"]["versions"]
        assert content["status"] == "passed" or (content["status"] == "skipped" and content["reason"]), content
    assert sum(content["status"] == "passed" for content in contents.values()) >= len(contents) - 2
    throughput = contents["gpu-8b.json"]["result"]
    assert throughput["roofline"].keys() == {"copy", "flops"}
    assert {row["engine"].partition(",")[0] for row in throughput["rows"]} == {"pdserve", "transformers"}
    assert all(
        row["ms"] > 0 for row in throughput["rows"] if row["engine"] != "transformers"
    )  # a difference of two times
    again = run("--dry-run", "--out", str(tmp_path), "staging", "swap")
    assert again.returncode == 0 and again.stdout.count("passed before") == 2 and "==" not in again.stdout


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "scripts" / "gpu"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and done.stderr == "scripts/gpu: torch finds no GPU; nothing was run\n"
    assert not list(tmp_path.iterdir())


def options(folder: Path, minutes: float) -> argparse.Namespace:
    return argparse.Namespace(out=folder, minutes=minutes, again=False, dry_run=False)


def test_parts_resume(session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that could exceed the time is left for the next call; one that failed is run again."""
    outcomes = iter(["passed", "failed", "passed"])
    ran: list[str] = []

    def outcome(group: list[Any], environment: dict[str, str]) -> dict[str, Any]:
        ran.extend(part.name for part in group)
        return {part.name: {"status": next(outcomes), "seconds": 1.0} for part in group}

    monkeypatch.setattr(session, "run", outcome)
    parts = [session.Part(name, "x.py", limit_s, "") for name, limit_s in (("a", 60), ("b", 60), ("c", 600))]
    assert session.run_all(parts, options(tmp_path, 2), {}, {}) == 1 and ran == ["a", "b"]
    assert session.run_all(parts, options(tmp_path, 2), {}, {}) == 3 and ran == ["a", "b", "b"]


def test_parts_that_cannot_run_or_take_too_long_are_named(session: ModuleType) -> None:
    environment = session.child_environment(dry_run=True)
    part = session.Part("pd", "gpu_transfers.py", 1, "", needs=("no_such_module",))
    assert session.run([part], environment)["pd"]["reason"] == "without no_such_module"
    stopped = session.run([session.Part("memory", "gpu_transfers.py", 0, "")], environment)["memory"]
    assert (stopped["status"], stopped["reason"]) == ("stopped", "took too long")


def test_connectors_are_found_without_an_installation(session: ModuleType) -> None:
    folder = session.register()
    code = (
        "from importlib.metadata import entry_points as e; print(sorted(x.name for x in e(group='pdserve.connectors')))"
    )
    command = [sys.executable, "-S", "-c", code]
    found = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(sorted(entry.name for entry in entry_points(group="pdserve.connectors")))


@pytest.mark.parametrize("part", ["all", "8b,x"])
def test_unknown_parts_are_refused(part: str) -> None:
    done = run(part)
    assert done.returncode == 2 and f"there is no part {part}; there are: rates, attention" in done.stderr
