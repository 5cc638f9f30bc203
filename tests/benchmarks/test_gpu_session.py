"""scripts/gpu: a dry run of all parts on the CPU; what has a result is not run again, and what cannot run is named."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


QUICK = ("attention", "8b", "staging", "swap")
OURS = ("benchmarks", "kernels", "pdserve/engine", "kv_transfer", "scripts/gpu_session.py")


@pytest.mark.long
@pytest.mark.parametrize(
    "is_quick",
    [pytest.param(True, marks=pytest.mark.until_recorded(*OURS)), pytest.param(False, marks=pytest.mark.slow)],
)
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
    """A part that could exceed the time is left for the next call; one that failed is run again, after all others."""
    outcomes = iter(["passed", "failed", "passed", "passed"])
    ran: list[str] = []

    def outcome(group: list[Any], environment: dict[str, str]) -> dict[str, Any]:
        ran.extend(part.name for part in group)
        return {part.name: {"status": next(outcomes), "seconds": 1.0} for part in group}

    monkeypatch.setattr(session, "run", outcome)
    monkeypatch.setattr(session, "STARTED", time.monotonic() + 60)  # the time is counted from the start of the process
    parts = [session.Part(name, "x.py", limit_s, "") for name, limit_s in (("a", 90), ("b", 90), ("c", 200))]
    assert session.run_all(parts, options(tmp_path, 1), {}, {}) == 1 and ran == ["a", "b"]
    assert session.run_all(parts, options(tmp_path, 4), {}, {}) == 0 and ran == ["a", "b", "c", "b"]
    assert session.run_all(parts, options(tmp_path, 4), {}, {}) == 0 and ran == ["a", "b", "c", "b"]


def test_parts_that_cannot_run_or_take_too_long_are_named(session: ModuleType) -> None:
    environment = session.child_environment(dry_run=True)
    part = session.Part("pd", "gpu_transfers.py", 1, "", needs=("no_such_module",))
    assert session.run([part], environment)["pd"]["reason"] == "without no_such_module"
    stopped = session.run([session.Part("memory", "gpu_transfers.py", 0, "")], environment)["memory"]
    assert (stopped["status"], stopped["reason"]) == ("stopped", "took too long")


def requirements(name: str) -> set[str]:
    """Return what an installed distribution requires here, without extras."""
    found = (Requirement(line) for line in importlib.metadata.requires(name) or ())
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


def test_wheels_complete_what_torch_triton_and_transformers_bring(session: ModuleType) -> None:
    """A machine with these three and the wheels can serve."""
    there, new = set[str](), {"torch", "triton", "transformers"}
    while new:
        there |= new
        new = {other for name in new for other in requirements(name)} - there
    wheels = set(session.WHEELS)
    assert not {other for name in wheels - {"nixl", "nixl-cu13"} for other in requirements(name)} - there - wheels
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(line).name) for line in lines} <= there | wheels
    provided = {name.replace("-", "_") for name in there | wheels} | {"zmq", "google.protobuf"}
    assert set(session.SERVING) <= provided


def test_a_wheel_is_trimmed(session: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("nixl_cu13/_api.py", "nixl_ep_cu13/large.so", "nixl_cu13.libs/libucp.so"):
            file.writestr(name, name)
    session.trim(wheel)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == ["nixl_cu13/_api.py", "nixl_cu13.libs/libucp.so"]
        assert file.read("nixl_cu13/_api.py") == b"nixl_cu13/_api.py"
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.parametrize("end", ["raise ValueError('x')", "os.kill(os.getpid(), 15); time.sleep(600)"])
def test_a_part_that_fails_or_is_stopped_leaves_its_rows(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time, gpu_part\ndef part():\n    gpu_part.keep({{'ms': 7}}); {end}\n")
    with script.open("a") as file:
        file.write("gpu_part.main({'first': part, 'second': lambda: {'rows': [{'ms': 8}]}})\n")
    command = [sys.executable, str(script), "first,second", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "PDSERVE_GPU_DRY_RUN": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1, done.stderr
    first = json.loads((tmp_path / "first.json").read_text())
    is_stopped = "kill" in end
    assert first["status"] == ("stopped" if is_stopped else "failed") and first["result"]["rows"] == [{"ms": 7}]
    assert (tmp_path / "second.json").exists() is not is_stopped


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
    assert done.returncode == 2 and f"there is no part {part}; there are: smoke, rates, identity" in done.stderr
