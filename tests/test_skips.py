"""The plugin that fails skipped tests in CI, and its list of exceptions."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SOURCE = """
import pytest

def test_vllm_bench_serve():
    pytest.skip("listed")

@pytest.mark.parametrize("some", [1])
def test_another(some):
    pytest.skip("not listed")

@pytest.mark.skipif("True", reason="marked")
def test_marked():
    pass

@pytest.mark.xfail
def test_expected():
    assert False

def test_that_runs():
    pass
"""


@pytest.fixture(scope="session")
def skips(load_test_module: Any) -> Any:
    return load_test_module("skips")


def test_list_is_short_and_names_existing_tests(skips: Any) -> None:
    assert len(skips.ALLOWED) <= 10 and all(skips.ALLOWED.values())
    sources = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    for name in skips.ALLOWED:
        exists = any(path.name == name or f"\ndef {name}(" in source for path, source in sources.items())
        assert exists, f"{name} does not exist"


def test_unlisted_skips_fail(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOURCE)
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_package')")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skips", "--continue-on-collection-errors"],
        cwd=tmp_path,
        # Imports of plug-ins that it does not need take ten times as long as the tests.
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in result.stdout, result.stdout
    for reason in ("not listed", "marked", "no_such_package"):
        assert reason in result.stdout
