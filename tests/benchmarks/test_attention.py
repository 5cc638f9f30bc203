"""Micro-benchmark of attention kernels: it runs, and its JSON has the documented fields."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.kernels import native

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


@pytest.mark.skipif(not native.is_available(), reason="no C++ kernels")
def test_quick_run(pdserve: Callable[..., Any], tmp_path: Path) -> None:
    done = pdserve(str(SCRIPT), "--quick", "--out", str(tmp_path), "--note", "smoke")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert content["read_gb_per_s"] > 0
    names = ("reference", "cpu", "contiguous", "torch")
    assert [(row["sequences"], row["kernel"]) for row in content["rows"]] == [
        (n, name) for n in (1, 2) for name in names
    ]
    for row in content["rows"]:
        assert row["kv_bytes"] == row["sequences"] * 160 * 8 * 128 * 2 * 2
        assert row["us"] > 0 and row["ratio"] > 0
