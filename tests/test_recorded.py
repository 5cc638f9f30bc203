"""The plugin that leaves slow tests out while the files that they depend on are as recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SOURCE = """
import os

import pytest

@pytest.mark.slow
@pytest.mark.until_recorded("code", "keys.txt")
@pytest.mark.parametrize("part", ["good", "bad"])
def test_all(part):
    assert part == "good" or "PASSES" in os.environ

@pytest.mark.slow
def test_slow():
    pass

def test_some():
    pass
"""
CONFTEST = f"""
import os
import sys
from pathlib import Path

sys.path.insert(0, {str(TESTS)!r})
from recorded import Recorded

def pytest_configure(config):
    for marker in ("slow", "until_recorded(names)"):
        config.addinivalue_line("markers", marker)
    here = Path(__file__).parent
    recorded = Recorded("GPU" in os.environ, here / "recorded.json", here)
    config.pluginmanager.register(recorded, "recorded")

def pytest_collection_modifyitems(config, items):
    recorded = config.pluginmanager.get_plugin("recorded")
    items[:] = [item for item in items if not item.get_closest_marker("slow") or recorded.is_due(item)]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a folder `code`, and slow tests of it."""
    for folder in ("code", "tests/code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("a = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # else pytest looks for settings in the folders above
    (tmp_path / "keys.txt").write_text("1\n")
    (tmp_path / "constraints.txt").write_text("torch==2.9\n")
    (tmp_path / "tests" / "code" / "test_a.py").write_text(SOURCE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def run(project: Path, *arguments: str, **environment: str) -> str:
    """Return the last line of pytest's output: how many tests passed and failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whose imports take ten times as long as the tests
    done = subprocess.run(
        command, cwd=project, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    return done.stdout.splitlines()[-1].rpartition(" in ")[0]


def test_a_slow_test_runs_until_it_has_passed_and_again_after_a_change(project: Path) -> None:
    assert run(project) == "1 failed, 2 passed"
    assert run(project, PASSES="1") == "2 passed", "of the slow ones, that which has not passed"
    assert run(project) == "1 passed"
    (project / "code" / "b.py").write_text("b = 2\n")
    assert run(project, PASSES="1") == "3 passed", "a new file"
    (project / "tests" / "code" / "test_a.py").write_text(SOURCE + "\n")
    assert run(project, PASSES="1") == "3 passed", "a changed test"


@pytest.mark.parametrize("name", ["keys.txt", "constraints.txt"])
def test_they_run_again_after_a_change_of_a_file_and_of_dependencies(name: str, project: Path) -> None:
    assert run(project, PASSES="1") == "3 passed"
    (project / name).write_text("2\n")
    assert run(project, PASSES="1") == "3 passed"
    assert run(project) == "1 passed"


def test_what_passes_in_workers_is_recorded(project: Path) -> None:
    workers = ("-p", "xdist", "-n", "2")
    assert run(project, *workers, PASSES="1") == "3 passed"
    assert len(json.loads((project / "recorded.json").read_text())) == 2
    assert run(project, *workers) == "1 passed"


def test_a_gpu_runs_all_of_them_and_records_none(project: Path) -> None:
    for _ in range(2):
        assert run(project, PASSES="1", GPU="1") == "3 passed"
    assert not (project / "recorded.json").exists()


def test_what_is_not_there_is_an_error(project: Path, load_test_module: Any) -> None:
    said = "until_recorded names kernels/old, which is no file, and no folder with a Python file"
    with pytest.raises(pytest.UsageError, match=said):
        load_test_module("recorded").digest("code", "kernels/old", root=project)
