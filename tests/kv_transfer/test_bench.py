"""Tests of the connector benchmark."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer import bench
from pdserve.kv_transfer.bench import figures, parse_counts
from pdserve.kv_transfer.rules import context


def test_bench_measures_and_writes_json(command: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = [
        "--block-bytes",
        "64KiB",
        "--blocks",
        "1,4",
        "--concurrency",
        "2",
        "--seconds",
        "0.05",
        "--json",
        str(file),
    ]
    done = command("bench", "memory://test-bench?size=64MiB", *options)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["block_bytes"] == 65536
    rows = report["figures"]
    assert [(row["operation"], row["blocks"], row["concurrency"]) for row in rows] == [
        (operation, blocks, 2) for blocks in (1, 4) for operation in ("store", "load")
    ]
    for row in rows:
        assert row["failed"] == 0 and row["gib_s"] > 0 and row["memcpy_gib_s"] > 0 and row["p50_ms"] <= row["p99_ms"]
        assert 0 < row["call_p50_ms"] <= row["call_max_ms"]
        assert row["of_memcpy"] == pytest.approx(row["gib_s"] / row["memcpy_gib_s"], rel=0.01)
    assert re.search(r"load\s+4\s+2\s", done.output)


def test_bench_counts_failed_blocks() -> None:
    rows = list(figures("memory://test-full?size=1MiB", 1 << 20, [4], [1], 0.02))
    assert rows[0].operation == "store" and rows[0].failed > 0 and rows[0].outcomes == {"full": rows[0].failed}


def test_a_bench_shows_what_it_needs_and_why_blocks_were_not_moved(command: Callable[..., Any]) -> None:
    options = ["--block-bytes", "1MiB", "--blocks", "1,2", "--concurrency", "2", "--seconds", "0.05"]
    done = command("bench", "memory://test-small?size=1MiB", *options)
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "needs room for 4 blocks in the store, 4 MiB, and twice as much memory in this process"
    assert lines[1] == "1 blocks per operation, 2 at once"
    assert re.fullmatch(r"store: 0.00 GiB/s; blocks that were not moved: \d+ full", lines[2])
    assert re.fullmatch(r"load: 0.00 GiB/s; blocks that were not moved: \d+ missing", lines[3])
    assert lines[4] == "2 blocks per operation, 2 at once"


@pytest.mark.usefixtures("broken_package")
def test_a_bench_of_a_connector_that_never_answers_ends(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "GRACE_S", 0.5)
    error = command("bench", "broken-nevercompletes://test-bench?timeout=0.1", "--blocks", "1").exception
    assert isinstance(error, SetupError)
    assert re.search(r"1 blocks per operation, 1 at once failed: expected the future of load to be done", str(error))


def test_json_on_standard_output_is_only_json(command: Callable[..., Any]) -> None:
    options = ["--block-bytes", "4KiB", "--blocks", "1", "--concurrency", "1", "--seconds", "0.05", "--json", "-"]
    assert json.loads(command("bench", "memory://test-out", *options).stdout)["figures"]


def test_a_file_that_cannot_be_written_is_told_before_the_measurement(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "figures", lambda *_: pytest.fail("it was measured"))
    error = command("bench", "memory://x", "--json", str(tmp_path / "none" / "x.json")).exception
    assert isinstance(error, SetupError) and str(error).endswith("x.json cannot be written: No such file or directory.")


def test_counts_are_parsed() -> None:
    assert parse_counts("1, 16,64", "blocks") == [1, 16, 64]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_needs_matplotlib(command: Callable[..., Any], tmp_path: Path) -> None:
    error = command("bench", "memory://x", "--plot", str(tmp_path / "plot.png")).exception
    assert isinstance(error, SetupError) and "pip install matplotlib" in str(error)
