"""The micro-benchmark runs, and its JSON says what is promised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


@pytest.mark.usefixtures("cpu_kernel")
def test_quick(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path), "--note", "smoke"]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert content["read_gb_per_s"] > 0
    assert [(row["sequences"], row["kernel"]) for row in content["rows"]] == [
        (1, "reference"),
        (1, "cpu"),
        (2, "reference"),
        (2, "cpu"),
    ]
    for row in content["rows"]:
        assert row["kv_bytes"] == row["sequences"] * 160 * 8 * 128 * 2 * 2
        assert row["us"] > 0 and row["ratio"] > 0
