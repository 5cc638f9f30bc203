"""`pdserve up` and `pdserve demo` as a newcomer meets them: the bundled model, the official client, a clean end."""

import asyncio
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import transformers
from pydantic import BaseModel

from pdserve.cli.deployment import free_port
from pdserve.lifetime import Stage
from pdserve.model_path import DEMO

SOURCES = "pdserve_prompt_tokens_by_source_total{"


@dataclass
class Up:
    """A running `pdserve up` on the demo model."""

    process: "subprocess.Popen[str]"
    url: str
    said: list[str]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    port = free_port()
    flags = ["--port", str(port), "--num-blocks", "512", "--local-prefill-tokens", "0"]
    command = [sys.executable, "-m", "pdserve", "up", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if "ready on" in line:
            break
    assert process.poll() is None, "".join(said)
    yield Up(process, f"http://127.0.0.1:{port}", said)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(600)


@pytest.fixture
def client(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)


def test_it_says_what_runs_where(up: Up) -> None:
    text = "".join(up.said)
    assert "starting a router and 1 prefill + 1 decode on demo over shm://" in text
    for name in ("prefill-0", "decode-0"):
        assert re.search(rf"{name}: demo in bfloat16 on cpu, (cpu|reference) kernel, 512 blocks of 16 tokens", text)


def test_the_curl_line(up: Up) -> None:
    body = '{"model":"demo","prompt":"The capital of France is","max_tokens":8,"temperature":0}'
    # curl -d sends this content type unless told otherwise
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = httpx.post(f"{up.url}/v1/completions", content=body, headers=headers)
    assert "Paris" in reply.json()["choices"][0]["text"]


def test_official_client(up: Up, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        temperature=0,
        max_tokens=40,
    )
    text = whole.choices[0].message.content
    assert text and "Tokyo" in text and whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16, "the second time is a hit"
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="x", temperature=-1)


def test_facts_from_far_back_in_the_prompt_are_known_to_decode(
    up: Up, client: openai.OpenAI, demo_text: ModuleType
) -> None:
    """Fifty facts that training never saw, 300 to 1,500 tokens before the question: the KV really crossed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    cases = demo_text.retrieval_cases(11, 50, lambda text: len(tokenizer(text)["input_ids"]), 300, 1500)
    assert len(cases) == 50

    def answer(case: Any) -> str:
        reply = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": case.message()}], temperature=0, max_tokens=24
        )
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(answer, cases))
    right = sum(case.expected in answer for case, answer in zip(cases, answers, strict=True))
    assert right >= 45


def test_stop_strings_and_choices(client: openai.OpenAI) -> None:
    several = client.completions.create(model="demo", prompt="Once upon a time", n=3, max_tokens=30, seed=5, stop=["."])
    assert len({choice.text for choice in several.choices}) > 1
    assert all("." not in choice.text for choice in several.choices)


def test_official_client_asks_for_more_than_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "Where is Paris?"}]}
    told = client.chat.completions.create(**asked, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 4
    for one in told.content:
        best, second = one.top_logprobs
        assert (one.token, one.logprob) == (best.token, best.logprob) and 0 >= best.logprob >= second.logprob, "greedy"

    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    followed = client.chat.completions.create(**asked, max_tokens=40, response_format=form).choices[0]
    assert followed.finish_reason == "stop" and followed.message.content is not None
    assert isinstance(json.loads(followed.message.content)["rain"], bool)

    whole = client.responses.create(model="demo", input="Where is Paris?", temperature=0, max_output_tokens=8)
    asked = {"model": "demo", "input": "Where is Paris?", "temperature": 0, "max_output_tokens": 8, "stream": True}
    deltas = [event.delta for event in client.responses.create(**asked) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""


def test_langchain(up: Up) -> None:
    from langchain_openai import ChatOpenAI  # takes a second, and modules are imported to collect tests

    question = "What is the capital of France?"

    class Weather(BaseModel):
        rain: bool
        wind: bool

    def chat(**settings: Any) -> Any:
        asked: Any = {
            "model": "demo",
            "base_url": f"{up.url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 40,
        }
        return ChatOpenAI(**asked, max_retries=0, **settings)

    answer = chat().invoke(question)
    tokens = answer.usage_metadata
    assert "Paris" in answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert tokens["total_tokens"] == tokens["input_tokens"] + tokens["output_tokens"] and tokens["output_tokens"] > 1
    pieces = list(chat(stream_usage=True).stream(question))
    assert "".join(piece.content for piece in pieces) == answer.content and len(pieces) > 2
    told = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert [one["output_tokens"] for one in told] == [tokens["output_tokens"]]
    assert [one.content for one in chat().batch([question] * 3)] == [answer.content] * 3

    async def asked() -> str:
        return "".join([piece.content async for piece in chat().astream(question)])

    assert asyncio.run(asked()) == answer.content
    likely = chat().bind(logprobs=True, top_logprobs=2).invoke(question).response_metadata["logprobs"]["content"]
    assert len(likely) == tokens["output_tokens"]
    assert isinstance(chat().with_structured_output(Weather, method="json_schema").invoke(question), Weather)
    responses = chat(use_responses_api=True)
    assert [part["text"] for part in responses.invoke(question).content] == [answer.content]
    parts = [part["text"] for piece in responses.stream(question) for part in piece.content if "text" in part]
    assert "".join(parts) == answer.content
    with pytest.raises(openai.BadRequestError, match="teaches no tool calls"):
        chat().bind_tools([Weather]).invoke(question)


def test_vllm_bench_serve(up: Up) -> None:
    """Where there is a vLLM: here, or in the environment whose Python is in PDSERVE_VLLM."""
    python = os.environ.get("PDSERVE_VLLM") or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not python:
        pytest.skip("there is no vLLM; PDSERVE_VLLM names the Python of an environment that has it")
    script = Path(__file__).parents[2] / "scripts" / "vllm_bench_check.py"
    done = subprocess.run([python, script, up.url], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("none failed") == 4


def test_the_timeline_has_every_stage_in_order(up: Up, client: openai.OpenAI) -> None:
    client.completions.create(
        model="demo",
        prompt="A prompt of its own. " * 20,
        max_tokens=4,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": "t1"},
    )
    timeline = _finished(up.url, "t1")
    stages = timeline["stages_ms"]
    assert set(stages) == {stage.value for stage in Stage}
    # What one instance stamps is late by its message's way, so only what one waits for comes before it on any machine:
    # decode follows prefill's store, and need not hear of its end.
    for order in (
        ["received", "admitted", "routed", "prefill_started", "first_token", "finished"],
        ["prefill_started", "kv_stored"],
        ["routed", "kv_ready", "finished"],
    ):
        for before, after in itertools.pairwise(order):
            assert stages[before] <= stages[after] + 0.1, (before, after, stages)
    assert timeline["prefill_instance"] == "prefill-0" and timeline["decode_instance"] == "decode-0"
    prompt_blocks = -(-timeline["prompt_tokens"] // 16)
    assert timeline["stored"]["blocks"] == prompt_blocks
    assert timeline["loaded"]["bytes"] == timeline["stored"]["bytes"] > 0


def test_metrics_tell_the_story(up: Up, client: openai.OpenAI) -> None:
    before = _settled(up.url)
    prompt, extra = "Metrics, please. " * 10, {"ignore_eos": True}
    for _ in client.completions.create(model="demo", prompt=prompt, max_tokens=6, stream=True, extra_body=extra):
        pass
    after = _settled(up.url)
    name = 'pdserve_kv_transfer_blocks_total{connector="shm",direction="load",instance="decode-0",role="decode"}'
    gained = {key: after[key] - before.get(key, 0.0) for key in after}
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_handover_time", "request_prefill_time"):
        assert gained[f"pdserve_{histogram}_seconds_count"] == 1
    assert gained["pdserve_inter_token_latency_seconds_count"] == 5
    assert gained['pdserve_requests_total{finish_reason="length"}'] == 1
    assert gained[name] > 0
    assert gained[name.replace("blocks", "bytes")] > gained[name]
    assert sum(value for key, value in gained.items() if SOURCES in key) == 2 * gained["pdserve_prompt_tokens_total"]


def test_ctrl_c_leaves_nothing(up: Up) -> None:
    children = subprocess.run(["pgrep", "-P", str(up.process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(600) == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob(f"pdserve-up-{up.process.pid}*"))


def test_demo() -> None:
    command = [sys.executable, "-m", "pdserve", "demo"]
    environment = os.environ | {"PDSERVE_API_KEY": "of a router that stays"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    for stage in Stage:
        assert stage.value in done.stdout
    for part in ("KV blocks", "MiB) crossed to decode-0", "GB/s", "curl http://127.0.0.1:8000/v1/completions"):
        assert part in done.stdout
    assert not _left_behind()


def _left_behind() -> list[str]:
    """Segments of deployments that have ended."""
    names = [path.name for path in Path("/dev/shm").glob("pdserve-up-*")]
    return [name for name in names if not Path(f"/proc/{name.removeprefix('pdserve-up-').partition('@')[0]}").exists()]


def _finished(url: str, request_id: str) -> dict[str, Any]:
    give_up = time.monotonic() + 600
    while True:
        timeline: dict[str, Any] = httpx.get(f"{url}/debug/requests/{request_id}").json()
        if "finished" in timeline["stages_ms"] or time.monotonic() > give_up:
            return timeline
        time.sleep(0.02)


def _settled(url: str) -> dict[str, float]:
    """The metrics, once instances have told where the tokens of all prompts came from: that comes with heartbeats."""
    give_up = time.monotonic() + 600
    while True:
        metrics = _metrics(url)
        told = {
            role: sum(value for name, value in metrics.items() if SOURCES in name and f'role="{role}"' in name)
            for role in ("prefill", "decode")
        }
        if set(told.values()) == {metrics["pdserve_prompt_tokens_total"]}:
            return metrics
        assert time.monotonic() < give_up, told
        time.sleep(0.05)


def _metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
