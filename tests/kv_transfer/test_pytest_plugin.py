"""Tests of the pytest plugin, in separate pytest processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

USES_FIXTURE = """
pytest_plugins = ["pdserve.kv_transfer.pytest_plugin"]

def test_conformance(connector_rule):
    connector_rule("broken-countspastgap://test-fixture")
"""


@pytest.mark.slow
def test_pytest_with_a_url(tmp_path: Path, broken_package: Path) -> None:
    selection = "missing or leading or between"
    options = ["-p", "pdserve.kv_transfer.pytest_plugin", "--connector", "broken-countspastgap://x", "-k", selection]
    result = run_pytest(tmp_path, broken_package, *options)
    assert "1 failed, 1 passed, 1 skipped, 33 deselected" in result.stdout, result.stdout + result.stderr
    assert "leading-match: expected 3 leading keys, the fourth being missing, saw 5" in result.stdout
    assert "Traceback" not in result.stdout and "each process has a store of its own" in result.stdout


def test_pytest_with_the_fixture(tmp_path: Path, broken_package: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USES_FIXTURE)
    result = run_pytest(tmp_path, broken_package, "-k", "missing or leading")
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "leading-match: expected 3 leading keys" in result.stdout


def test_a_store_that_cannot_be_used_is_no_skipped_test(tmp_path: Path, broken_package: Path) -> None:
    options = ["-p", "pdserve.kv_transfer.pytest_plugin", "--connector", "redis://127.0.0.1:1", "-k", "missing"]
    result = run_pytest(tmp_path, broken_package, *options)
    assert "1 failed" in result.stdout and "No Redis answers at redis://127.0.0.1:1" in result.stdout, result.stdout


@pytest.mark.slow
def test_the_example_package_passes(tmp_path: Path, fsspec_package: Path) -> None:
    """Installed by pip in a folder of its own, and found by its entry points."""
    shutil.copytree(ROOT / "examples" / "connector_fsspec" / "tests", tmp_path / "tests")
    result = run_pytest(
        tmp_path, fsspec_package, "-p", "pdserve.kv_transfer.pytest_plugin", "--connector-seconds", "0.5"
    )
    # Not checked, in both stores: its limit, and connections. In memory, also other processes, which do not share it.
    assert "66 passed, 12 skipped" in result.stdout, result.stdout + result.stderr


def run_pytest(folder: Path, site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *arguments],
        cwd=folder,
        # Imports of the other plug-ins that are installed take longer than the tests.
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
