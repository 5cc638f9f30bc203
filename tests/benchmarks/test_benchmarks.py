"""The benchmark scripts run, and their JSON says what is promised."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEAD = {"benchmark", "when", "note", "machine", "commit", "settings", "rows"}


while_benchmarks_change = pytest.mark.until_recorded("benchmarks")  # of scripts that no other test needs


@pytest.fixture
def run(pdserve: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """run("engine.py", "--peers", "transformers") → its JSON."""

    def finished(script: str, *arguments: str) -> dict[str, Any]:
        out = tmp_path / "out"
        done = pdserve(str(BENCHMARKS / script), "--quick", "--out", str(out), "--note", "smoke", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        (file,) = out.iterdir()
        assert file.name.endswith(f"-{script.removesuffix('.py')}-smoke.json")
        content: dict[str, Any] = json.loads(file.read_text())
        assert content.keys() >= HEAD
        assert {"cpu", "cores", "torch"} <= content["machine"].keys()
        assert str(out) not in file.read_text() and str(BENCHMARKS) not in file.read_text(), "a path of this machine"
        return content

    return finished


@while_benchmarks_change
def test_engine(run: Callable[..., Any]) -> None:
    content = run("engine.py", "--peers", "transformers")
    assert content["roofline"]["read_gb_per_s"] > 0 and content["roofline"]["gflops"] > 0
    rows = {(row["engine"], row["task"]): row for row in content["rows"]}
    assert rows.keys() == {(e, t) for e in ("pdserve", "transformers") for t in ("offline", "prefill", "decode")}
    for (engine, _), row in rows.items():
        assert row["tokens_per_s"] > 0 and 0 < row["ratio"] < 1
        assert len(row["seconds"]) == len(row["cpu_seconds"]) == content["settings"]["repeat"]
        assert (row["outside_model"] is None) == (engine != "pdserve")
        assert row["prefix_hits"] == ([0] if engine == "pdserve" else [None]), (
            "a prompt that an earlier task began with"
        )
    assert rows["pdserve", "offline"]["tokens"] == 4 * 8
    assert rows["pdserve", "prefill"]["tokens"] == 64
    assert rows["pdserve", "decode"]["tokens"] == 7, "the first of 8 comes from the prefill"


def test_a_peer_is_told_how_long_sequences_get(pdserve: Callable[..., Any], tmp_path: Path) -> None:
    """By an environment whose Python only says what it is started with."""
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >&2\n')
    python.chmod(0o755)
    peer = ("--peers", "vllm", "--peers-folder", str(tmp_path))
    done = pdserve(str(BENCHMARKS / "engine.py"), "--quick", "--prompt-tokens", "4096", "--output-tokens", "10", *peer)
    assert done.returncode != 0 and "bfloat16 cpu 4106 none\n" in done.stderr, done.stderr
    done = pdserve(str(BENCHMARKS / "engine.py"), "--quick", "--prefill-tokens", "5000", *peer)
    assert done.returncode != 0 and "bfloat16 cpu 5001 none\n" in done.stderr, done.stderr


def test_handover(run: Callable[..., Any]) -> None:
    content = run("handover.py", "--turns")
    assert content["skipped"] == {}
    assert [(row["connector"], row["prompt_tokens"]) for row in content["rows"]] == [("shm", 1), ("shm", 40)]
    block_bytes = content["rows"][0]["bytes"]
    for row, blocks in zip(content["rows"], [1, 3], strict=True):
        assert row["bytes"] == blocks * block_bytes > 0
        assert row["whole"] == row["requests"] == 1, "not all KV crossed"
        assert row["prefill_ms"] > 0 and row["memcpy_ms"] > 0
        assert row["store_gb_per_s"] > 0 and row["load_gb_per_s"] > 0
        assert row["second_token_gap_ms"] >= 0 and len(row["handover_ms_all"]) == 1
    for turn in content["turns"]:
        assert turn["bytes to decode"] == turn["forecast bytes"] == 3 * block_bytes < turn["whole bytes"]


@pytest.mark.slow
def test_structured(run: Callable[..., Any]) -> None:
    content = run("structured.py")
    assert [row["answers"] for row in content["rows"]] == ["new schemas", "again", "without"]
    assert content["valid"] == content["same_again"] == content["settings"]["requests"]
    assert len({row["tokens"] for row in content["rows"]}) == 1


@pytest.mark.slow
def test_loss(run: Callable[..., Any]) -> None:
    losses = {row["format"]: row["loss"] for row in run("loss.py")["rows"]}
    assert losses["int4 weights"] != losses["dense"] != losses["int8 KV"]
    assert all(abs(loss / losses["dense"] - 1) < 0.1 for loss in losses.values())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_links(run: Callable[..., Any]) -> None:
    rows = run("links.py")["rows"]
    assert [row["codec"] for row in rows] == ["none", "lz4", "zstd", "auto"]
    assert min(row["of the best"] for row in rows if row["codec"] != "auto") == 1


@pytest.mark.slow
def test_speculation(run: Callable[..., Any]) -> None:
    rows = {(row["task"], row["mode"]): row for row in run("speculation.py")["rows"]}
    assert {mode for task, mode in rows if task == "edit"} == {"off", "ngram", "suffix", "auto"}
    assert not rows["edit", "off"]["drafts"] and rows["edit", "ngram"]["drafts"] > 0


@pytest.mark.slow
def test_exactness(run: Callable[..., Any]) -> None:
    content = run("exactness.py")
    assert [row["requests"] for row in content["rows"]] == [8] * 8
    assert not any(row["differ in tokens"] or row["differ in log probabilities only"] for row in content["rows"])


@while_benchmarks_change
def test_forecast(run: Callable[..., Any]) -> None:
    """Paced instances answer the same requests that were simulated."""
    content = run("forecast.py")
    (row,) = content["rows"]
    assert row["fleet"] == "1P+1D" and row["measured_p50_itl_ms"] > 24, "a step of the profile takes as long"
    assert all(row[f"{kind}_p50_ttft_ms"] > 24 for kind in ("predicted", "measured"))
    assert content["errors"]["p50_ttft_ms"].keys() == {"median_error", "bias"}
    assert content["errors_by_load"] == {"0.5": content["errors"]} and row["measured_request_throughput"] > 0


@while_benchmarks_change
def test_tune(run: Callable[..., Any]) -> None:
    """A fifth of an exhaustive search's time, in a simulated fleet, beside its winner."""
    rows = run("tune.py")["rows"]
    assert [row["search"] for row in rows] == ["exhaustive", "tune, prompts x 1", "tune, prompts x 0.5"]
    assert all(row["beside_exhaustive"] <= 1.05 and row["seconds"] <= 0.3 * rows[0]["seconds"] for row in rows[1:])


@while_benchmarks_change
def test_autoscale(run: Callable[..., Any]) -> None:
    """The controller beside the plan that knows the load, in a window in which nothing has to change."""
    (row,) = run("autoscale.py")["rows"]
    assert row["good_ratio"] >= 0.9 and row["seconds_ratio"] <= 1.05 and row["controller"]["good"] > 0.9


def test_memory(run: Callable[..., Any]) -> None:
    content = run("memory.py")
    rows = {row["reservation"]: row for row in content["rows"]}
    assert rows.keys() == {"max", "power of two", "oracle", "paged"}
    assert (
        0 < rows["paged"]["wasted_percent"] < 4 < rows["oracle"]["wasted_percent"] < rows["max"]["wasted_percent"] < 100
    )
    fleets = [(row["fleet"], row["instances"]) for row in content["handed_over"]]
    assert fleets == [(fleet, role) for fleet in ("1P+1D", "8P+1D") for role in ("prefill", "decode")]
    assert all(0 < row["wasted_percent"] < 4 for row in content["handed_over"] if row["instances"] == "decode")


@while_benchmarks_change
def test_pd(run: Callable[..., Any]) -> None:
    content = run("pd.py")
    rows = {row["deployment"]: row for row in content["rows"]}
    assert list(rows) == [
        *("1P+1D, fixed", "1P+1D", "1P+1D, ITL 20 ms"),
        *("1 both", "2 both", "2 both, ITL 20 ms"),
    ]
    for row in rows.values():
        assert row["requests"] == 4 and row["output_tok_per_s"] > 0 and row["ttft_ms_p50"] > 0
    fixed, colocated = rows["1P+1D, fixed"], list(rows)[3:]
    assert rows["1 both"]["handed_over"] == 0 and fixed["handed_over"] == 4 and fixed["handover_ms_p50"] > 0
    for one in content["against_best"]:
        figure = one["figure"]
        best = (max if figure == "output_tok_per_s" else min)(rows[name][figure] for name in colocated)
        assert rows[one["best_colocated"]][figure] == best
        if best:  # several tokens of a stream may arrive at the same time
            assert one["ratio"] == pytest.approx(rows[one["deployment"]][figure] / best, abs=0.01)  # of one round
    assert {one["deployment"] for one in content["against_best"]} == set(list(rows)[:3])
    assert {"output_tok_per_s", "ttft_ms_p50", "itl_ms_p99"} <= {one["figure"] for one in content["against_best"]}


@while_benchmarks_change
def test_router(run: Callable[..., Any]) -> None:
    content = run("router.py")
    rows = content["rows"]
    kinds = {
        tuple(row[name] for name in ("fleet", "workers", "prompt_tokens", "stream", "output_tokens")) for row in rows
    }
    short = {
        (fleet, 1, 16, stream, tokens) for fleet in ("none", "split") for stream in (True, False) for tokens in (1, 4)
    }
    assert kinds == {*short, ("split", 1, 8192, True, 4)}
    assert {row["fleet"] for row in rows if row["added_ms_p50"] == 0} == {"none"}
    assert all(row["requests"] > 0 and row["requests_per_s"] > 0 and row["ms_p50"] > 0 for row in rows)
    assert content["per_token_cpu_us"].keys() == {"split, 2 connections"}
    timed = {(row["what"], row["instances"]) for row in content["decisions"]}
    assert {("auto", 8), ("auto", 256), ("open", 256), ("hash the prompt", 8)} <= timed
    assert all(row["us_p50"] > 0 for row in content["decisions"])


@while_benchmarks_change
def test_fleet(run: Callable[..., Any]) -> None:
    """64 mock instances: a router that is killed and started again has all of them and their block keys again."""
    content = run("fleet.py")
    (row,) = content["rows"]
    assert (row["routers"], row["instances"], row["keys"]) == (1, 64, 64 * 64)
    assert row["requests_per_s"] > 0 and row["bytes_per_key"] > 0 and row["heartbeats_per_s"] > 0
    restart = row["restart"]
    assert 0 < restart["alive_s"] <= restart["attached_s"] <= restart["whole_s"]
    outcomes = restart["killed_outcomes"]
    assert outcomes.keys() == {"exact", "broken"}, (
        "an answer was wrong, or refused by a router that says that it is ready"
    )
    assert outcomes["broken"] <= content["settings"]["connections"], "more than the requests under way"


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("handover.py", ["--connectors", "pigeon"], ("pigeon", "redis-tcp")),
        ("pd.py", ["--peers", "vllm", "--peers-folder", "/no/such/place"], ("vllm is not there", "peers/install")),
    ],
)
def test_a_mistake_is_one_line(
    script: str, arguments: list[str], said: tuple[str, ...], pdserve: Callable[..., Any]
) -> None:
    done = pdserve(str(BENCHMARKS / script), *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert all(part in done.stderr for part in said)


@while_benchmarks_change
def test_adapters(run: Callable[..., Any]) -> None:
    content = run("adapters.py")
    assert {row["task"] for row in content["rows"]} == {"prefill", "decode, 2 at once"}
    assert all(row[mode] > 0 for row in content["rows"] for mode in ("base ms", "loaded", "one", "all"))
    assert all(row["roofline"] > 1 for row in content["rows"]) and 0 < content["bookkeeping"] < 1
    cold = content["cold starts, ms"]
    assert 0 < cold["load"] < cold["cold 50"] <= cold["cold 99"] and cold["warm 99"] > 0
