"""`pdserve bench serve` against a real deployment of the demo model."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdserve.cli.deployment import free_port
from pdserve.errors import SetupError
from pdserve.tools.bench.command import run
from pdserve.tools.load_config import BenchServeConfig

Deploy = Callable[..., Any]
SMALL: dict[str, Any] = {"random_input_len": 40, "random_output_len": 12, "ignore_eos": True}


def measure(url: str, folder: Path, **settings: Any) -> dict[str, Any]:
    run(BenchServeConfig(base_url=url, save_result=True, result_dir=str(folder), result_filename="r.json", **settings))
    content: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return content


class IndependentClient:
    """A second opinion that shares no code with the first: a thread per request, and the standard library's HTTP."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.tokens: list[int] = []
        self.ttfts: list[float] = []
        self.latencies: list[float] = []

    def play(self, prompts: list[str], rate: float, max_tokens: int) -> None:
        threads = [threading.Thread(target=self._ask, args=(prompt, max_tokens)) for prompt in prompts]
        for thread in threads:
            thread.start()
            time.sleep(1 / rate)
        for thread in threads:
            thread.join()

    def _ask(self, prompt: str, max_tokens: int) -> None:
        connection = http.client.HTTPConnection(self._host)
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        first = 0.0
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event["choices"] and not first:
                first = time.perf_counter()
            if event.get("usage"):
                self.tokens.append(event["usage"]["completion_tokens"])
        self.ttfts.append(first - sent)
        self.latencies.append(time.perf_counter() - sent)


@pytest.mark.slow
def test_it_agrees_with_an_independent_client_on_the_same_server(deploy: Deploy, tmp_path: Path) -> None:
    with deploy(model="demo", prefill=1, decode=1) as deployment:
        other = IndependentClient(deployment.url)
        ours = []
        for repetition in range(3):
            settings = {"num_prompts": 10, "request_rate": 5.0, "burstiness": float("inf"), "seed": repetition}
            ours.append(measure(deployment.url, tmp_path, save_detailed=True, **settings, **SMALL))
            other.play([f"{repetition} {number}" + " the" * 36 for number in range(10)], 5.0, 12)
    assert sum(one["total_output_tokens"] for one in ours) == sum(other.tokens) == 30 * 12
    assert all(one["failed"] == 0 for one in ours) and all(one["total_input_tokens"] == 400 for one in ours)
    for name, theirs in (("ttfts", other.ttfts), ("latencies", other.latencies)):
        values = [value for one in ours for value in one[name]]
        assert min(values) < max(theirs) and min(theirs) < max(values), f"{name}: two ranges that do not overlap"


def test_ttft_has_parts_and_chat_sessions_continue(deploy: Deploy, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}] * 3
    sharegpt, mooncake = tmp_path / "s.json", tmp_path / "m.jsonl"
    sharegpt.write_text(json.dumps([{"conversations": turns}] * 2))
    rows = [{"timestamp": 0, "input_length": 5120, "output_length": 300, "hash_ids": list(range(10))}] * 2
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    with deploy(model="demo", prefill=1, decode=1) as deployment:
        random = measure(
            deployment.url,
            tmp_path,
            num_prompts=6,
            warmup_requests=2,
            csv=str(tmp_path / "r.csv"),
            goodput="ttft:1e9",
            **SMALL,
        )
        chat = measure(
            deployment.url,
            tmp_path,
            backend="openai-chat",
            dataset_name="sharegpt",
            dataset_path=str(sharegpt),
            multi_turn=True,
            client_processes=2,
            save_detailed=True,
        )
        replayed = measure(
            deployment.url, tmp_path, dataset_name="mooncake", dataset_path=str(mooncake), trace_length_scale=0.03125
        )
    parts = random["ttft_breakdown"]
    assert (
        parts["requests"] == random["completed"] == 4
        and parts["mean_prefill_ms"] > 0
        and parts["mean_hand_over_ms"] > 0
    )
    assert random["good_request_fraction"] == 1.0 and len((tmp_path / "r.csv").read_text().splitlines()) == 5
    assert chat["completed"] == 6 and chat["input_lens"][0] < chat["input_lens"][1] < chat["input_lens"][2]
    assert replayed["completed"] == 2 and replayed["total_input_tokens"] == 2 * 160


@pytest.mark.slow
def test_an_slo_sweep_finds_a_rate(deploy: Deploy, tmp_path: Path) -> None:
    with deploy(model="demo", both=1, prefill=0, decode=0) as deployment:
        settings = {"num_prompts": 9, "request_rate": 2.0, "sweep_repetitions": 2, "sweep_tolerance": 1.0}
        found = measure(deployment.url, tmp_path, slo_sweep=True, goodput="ttft:2000", **settings, **SMALL)
    highest = found["highest_rates"]
    assert [one["attainment"] for one in highest] == [0.9, 0.95, 0.99] and len(found["sweep"]) >= 2
    assert highest[0]["rates"][0] is None or highest[0]["rates"][0] >= (highest[2]["rates"][0] or 0)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pdserve", "bench", "serve", *arguments]


def test_ctrl_c_keeps_what_was_measured(deploy: Deploy, tmp_path: Path) -> None:
    with deploy(model="demo", prefill=1, decode=1) as deployment:
        arguments = [
            "--base-url",
            deployment.url,
            "--request-rate",
            "2",
            "--num-prompts",
            "100000",
            "--random-output-len",
            "4",
        ]
        arguments += [
            "--random-input-len",
            "10",
            "--save-result",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "r.json",
        ]
        process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("requests: ") and not line.startswith("requests: 0 "):
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=600)
    figures = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == 0 and "Successful requests:" in out
    assert figures["completed"] > 0 and figures["failed"] == 0


def test_wrong_settings_and_servers_are_one_line(deploy: Deploy) -> None:
    def error(**settings: Any) -> str:
        with pytest.raises(SetupError) as caught:
            run(BenchServeConfig(**settings))
        return str(caught.value)

    nobody = f"http://127.0.0.1:{free_port()}"
    assert "does not respond" in error(base_url=nobody)
    assert "--goodput: 'speed:1'" in error(goodput="speed:1")
    assert "is not a URL; write http" in error(base_url="localhost:8000")
    with pytest.raises(ValueError, match="--request-rate must be at least 1e-06"):
        BenchServeConfig(request_rate=-1.0)
    with deploy(model="demo", both=1, prefill=0, decode=0) as deployment:
        assert "has no model 'gpt-9'; it has demo" in error(base_url=deployment.url, model="gpt-9")
        assert "--slo-sweep needs --goodput" in error(base_url=deployment.url, slo_sweep=True)
        wrong = error(base_url=deployment.url, endpoint="/v1/nothing")
        assert "does not answer the warm-up request" in wrong and "\n" not in wrong
