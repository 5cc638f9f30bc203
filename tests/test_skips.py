"""The list of the tests that CI may skip, and the plugin that fails all others."""

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
    pytest.skip("known")

@pytest.mark.parametrize("some", [1])
def test_another(some):
    pytest.skip("unheard of")

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
def skips(load_beside: Any) -> Any:
    return load_beside("skips")


def test_the_list_is_short_and_names_what_there_is(skips: Any) -> None:
    assert len(skips.KNOWN) <= 10 and all(skips.KNOWN.values())
    sources = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    for name in skips.KNOWN:
        there = any(path.name == name or f"\ndef {name}(" in source for path, source in sources.items())
        assert there, f"there is no {name} any more"


def test_a_skip_that_is_not_listed_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOURCE)
    (tmp_path / "test_linear.py").write_text("import pytest\npytest.skip('no AMX', allow_module_level=True)")
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_package')")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skips", "--continue-on-collection-errors"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors" in done.stdout, done.stdout
    for reason in ("unheard of", "marked", "no_such_package"):
        assert reason in done.stdout
