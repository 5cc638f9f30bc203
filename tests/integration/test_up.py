"""`pdserve up` and `pdserve demo` with the bundled model: OpenAI and LangChain clients, metrics, and a clean stop."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from pdserve.cli.deployment import free_port
from pdserve.lifetime import Stage
from tests.extras import BLOCK_EXTRAS, MAIN

# A busy machine leaves an instance silent for longer than a lease.
FLAGS = ["--num-blocks", "512", "--local-prefill-tokens", "0", "--instance-timeout-seconds", "600"]
SOURCES = "pdserve_prompt_tokens_by_source_total{"


@dataclass
class Up:
    """A running `pdserve up` on the demo model."""

    process: Any
    url: str
    log_lines: list[str]


@contextlib.contextmanager
def running_up(start: Callable[[list[str]], Any]) -> Iterator[Up]:
    """`start` takes the arguments of pdserve, and returns the process, whose `stdout` is all that it prints."""
    port = free_port()
    process = start(["up", "--port", str(port), *FLAGS])
    log_lines: list[str] = []
    for line in process.stdout:
        log_lines.append(line)
        if "ready on" in line:
            break
    assert process.poll() is None, "".join(log_lines)
    yield Up(process, f"http://127.0.0.1:{port}", log_lines)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(600)


@pytest.fixture(scope="module")
def up(fork_server: Any) -> Iterator[Up]:
    with running_up(lambda arguments: fork_server.spawn(arguments, os.environ)) as up:
        yield up


@pytest.fixture
def client(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)


def test_up_logs_the_instances_and_their_settings(up: Up) -> None:
    text = "".join(up.log_lines)
    assert "starting a router and 1 prefill + 1 decode on demo over shm://" in text
    for name in ("prefill-0", "decode-0"):
        line = rf"{name}: demo in bfloat16 on cpu, (cpu|reference) kernel, 512 blocks of 16 tokens"
        while not re.search(line, text):  # lines of different processes come in any order, also behind "ready"
            more = up.process.stdout.readline()
            assert more, f"no line {line!r} in {text}"
            text += more


def test_printed_curl_command_works(up: Up) -> None:
    body = '{"model":"demo","prompt":"The capital of France is","max_tokens":8,"temperature":0}'
    # the default content type of curl -d
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = httpx.post(f"{up.url}/v1/completions", content=body, headers=headers)
    assert "Paris" in reply.json()["choices"][0]["text"]


def test_openai_client(up: Up, client: openai.OpenAI) -> None:
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
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16, (
        "the second request is a prefix hit"
    )
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="x", temperature=-1)


def test_decode_answers_from_facts_far_back_in_the_prompt(up: Up, client: openai.OpenAI, demo_cases: Any) -> None:
    """Fifty facts absent from training, 300 to 1,500 tokens before the question: only transferred KV contains them."""
    cases = demo_cases["facts"]
    assert len(cases) == 50 and all(300 <= case["distance"] <= 1500 for case in cases)

    def answer(case: Any) -> str:
        message = f"{case['text']}\n\n{case['question']}"
        reply = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": message}], temperature=0, max_tokens=24
        )
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(answer, cases))
    num_correct = sum(case["expected"] in answer for case, answer in zip(cases, answers, strict=True))
    assert num_correct >= 45


def test_stop_strings_and_several_choices(client: openai.OpenAI) -> None:
    several = client.completions.create(model="demo", prompt="Once upon a time", n=3, max_tokens=30, seed=5, stop=["."])
    assert len({choice.text for choice in several.choices}) > 1
    assert all("." not in choice.text for choice in several.choices)


def test_openai_client_logprobs_json_schema_and_responses(client: openai.OpenAI) -> None:
    body: Any = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "Where is Paris?"}]}
    logprobs = client.chat.completions.create(**body, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 4
    for token in logprobs.content:
        best, second = token.top_logprobs
        assert (token.token, token.logprob) == (best.token, best.logprob), "greedy"
        assert 0 >= best.logprob >= second.logprob

    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    choice = client.chat.completions.create(**body, max_tokens=40, response_format=response_format).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content is not None
    assert isinstance(json.loads(choice.message.content)["rain"], bool)

    whole = client.responses.create(model="demo", input="Where is Paris?", temperature=0, max_output_tokens=8)
    body = {"model": "demo", "input": "Where is Paris?", "temperature": 0, "max_output_tokens": 8, "stream": True}
    deltas = [event.delta for event in client.responses.create(**body) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""


def test_langchain_client(up: Up) -> None:
    from langchain_openai import ChatOpenAI  # takes a second, which collecting the tests should not

    question = "What is the capital of France?"

    class Weather(BaseModel):
        rain: bool
        wind: bool

    def chat(**settings: Any) -> Any:
        defaults: Any = {
            "model": "demo",
            "base_url": f"{up.url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 40,
        }
        return ChatOpenAI(**{**defaults, **settings}, max_retries=0)

    answer = chat().invoke(question)
    tokens = answer.usage_metadata
    assert "Paris" in answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert tokens["total_tokens"] == tokens["input_tokens"] + tokens["output_tokens"] and tokens["output_tokens"] > 1
    pieces = list(chat(stream_usage=True).stream(question))
    assert "".join(piece.content for piece in pieces) == answer.content and len(pieces) > 2
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [tokens["output_tokens"]]
    assert [message.content for message in chat().batch([question] * 3)] == [answer.content] * 3

    async def stream_async() -> str:
        return "".join([piece.content async for piece in chat().astream(question)])

    assert asyncio.run(stream_async()) == answer.content
    logprobs = chat().bind(logprobs=True, top_logprobs=2).invoke(question).response_metadata["logprobs"]["content"]
    assert len(logprobs) == tokens["output_tokens"]
    assert isinstance(chat().with_structured_output(Weather, method="json_schema").invoke(question), Weather)
    responses = chat(use_responses_api=True)
    assert [part["text"] for part in responses.invoke(question).content] == [answer.content]
    parts = [part["text"] for piece in responses.stream(question) for part in piece.content if "text" in part]
    assert "".join(parts) == answer.content
    forecast = {"type": "object", "properties": {"location": {"type": "string"}}}
    tool = {"name": "get_weather", "description": "Get the weather", "parameters": forecast}
    [call] = chat(max_tokens=80).bind_tools([tool]).invoke("What is the weather like in Paris today?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"})


def test_the_demo_model_calls_functions_and_thinks(up: Up) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools: Any = [
        {"type": "function", "function": {"name": "add", "description": "Add numbers", "parameters": numbers}}
    ]
    body: Any = {"model": "demo", "temperature": 0, "max_tokens": 80, "tools": tools}
    question: Any = {"role": "user", "content": "What is 12 plus 30?"}
    choice = client.chat.completions.create(messages=[question], **body).choices[0]
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}
    pieces = [
        part
        for event in client.chat.completions.create(messages=[question], stream=True, **body)
        for part in event.choices
    ]
    streamed = [call for piece in pieces for call in piece.delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in streamed if call.function) == call.function.arguments
    body |= {"tools": openai.NOT_GIVEN, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    question = {"role": "user", "content": "What is the capital of Japan?"}
    message: Any = client.chat.completions.create(messages=[question], **body).choices[0].message
    assert "Tokyo" in message.content and "Tokyo" in message.reasoning_content and "think>" not in message.content


def test_vllm_bench_serve(up: Up) -> None:
    """Runs if vLLM is installed, in this environment or in that of the Python named by PDSERVE_VLLM."""
    python = os.environ.get("PDSERVE_VLLM") or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not python:
        pytest.skip("vLLM is not installed; set PDSERVE_VLLM to the Python of an environment that has it")
    script = Path(__file__).parents[2] / "scripts" / "vllm_bench_check.py"
    result = subprocess.run([python, script, up.url], capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("none failed") == 4


def test_timeline_has_every_stage_in_order(up: Up, client: openai.OpenAI) -> None:
    client.completions.create(
        model="demo",
        prompt="A prompt of its own. " * 20,
        max_tokens=4,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": "t1"},
    )
    timeline = _wait_for_timeline(up.url, "t1")
    stages = timeline["stages_ms"]
    assert set(stages) == {stage.value for stage in Stage}
    # Stamps include the latency of their messages, so only causally dependent stages are ordered on every machine:
    # decode follows prefill's store and may be ready before the report of its end arrives.
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


def test_metrics_of_one_request(up: Up, client: openai.OpenAI) -> None:
    before = _wait_for_metrics(up.url)
    prompt, extra = "Metrics, please. " * 10, {"ignore_eos": True}
    for _ in client.completions.create(model="demo", prompt=prompt, max_tokens=6, stream=True, extra_body=extra):
        pass
    after = _wait_for_metrics(up.url)
    name = 'pdserve_kv_transfer_blocks_total{connector="shm",direction="load",instance="decode-0",role="decode"}'
    delta = {key: after[key] - before.get(key, 0.0) for key in after}
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_handover_time", "request_prefill_time"):
        assert delta[f"pdserve_{histogram}_seconds_count"] == 1
    assert delta["pdserve_inter_token_latency_seconds_count"] == 5
    assert delta['pdserve_requests_total{finish_reason="length"}'] == 1
    assert delta[name] > 0
    assert delta[name.replace("blocks", "bytes")] > delta[name]
    if not _faults(after):
        assert sum(value for key, value in delta.items() if SOURCES in key) == 2 * delta["pdserve_prompt_tokens_total"]


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
    return [int(child) for child in listed.split()]


def test_up_needs_no_extra_and_ctrl_c_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_EXTRAS)  # which each Python imports first
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def run(arguments: list[str]) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "pdserve", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with running_up(run) as up:  # with processes of its own, and not of the tests' fork server
        body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        assert "Paris" in httpx.post(f"{up.url}/v1/completions", json=body).json()["choices"][0]["text"]
        (parent,) = children_of(up.process.pid)
        children = [parent, *children_of(parent)]
        assert len(children) == 4
        up.process.send_signal(signal.SIGINT)
        output, _ = up.process.communicate(timeout=600)
    assert up.process.returncode == 0
    assert not re.search(r"\d\d:\d\d:\d\d [WE] ", output), "a stop on purpose is no reason to warn"
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob(f"pdserve-up-{up.process.pid}*"))


def test_demo_needs_no_extra_prints_the_timeline_and_cleans_up(fork_server: Any, tmp_path: Path) -> None:
    script = tmp_path / "without.py"
    script.write_text(BLOCK_EXTRAS + MAIN)
    environment = os.environ | {"PDSERVE_API_KEY": "of a permanent deployment", "HTTP_PROXY": "http://127.0.0.1:9"}
    environment["http_proxy"] = environment["HTTP_PROXY"]  # that of a company does not know this machine's addresses
    with (tmp_path / "output").open("w+") as output, (tmp_path / "errors").open("w+") as errors:
        demo = fork_server.start([str(script), "demo"], environment, output.fileno(), errors.fileno())
        code = demo.wait(1200)
    printed = (tmp_path / "output").read_text()
    assert code == 0, (tmp_path / "errors").read_text()
    assert "Paris" in printed
    for stage in Stage:
        assert stage.value in printed
    for part in ("KV blocks", "MiB) crossed to decode-0", "GB/s", "curl http://127.0.0.1:8000/v1/completions"):
        assert part in printed
    assert not list(Path("/dev/shm").glob(f"pdserve-up-{demo.pid}*"))


def _wait_for_timeline(url: str, request_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 600
    while True:
        timeline: dict[str, Any] = httpx.get(f"{url}/debug/requests/{request_id}").json()
        # Decode may finish before prefill reports that all is stored.
        if {"finished", "kv_stored"} <= timeline["stages_ms"].keys() or time.monotonic() > deadline:
            return timeline
        time.sleep(0.02)


def _wait_for_metrics(url: str) -> dict[str, float]:
    """Return the metrics once the instances' heartbeats have reported the sources of all prompt tokens.

    On a machine so slow that the router has taken prefill for lost, decode has computed some prompts alone.
    """
    deadline = time.monotonic() + 600
    while True:
        metrics = _metrics(url)
        reported = {
            role: sum(value for name, value in metrics.items() if SOURCES in name and f'role="{role}"' in name)
            for role in ("prefill", "decode")
        }
        total = metrics["pdserve_prompt_tokens_total"]
        if reported["decode"] == total and (reported["prefill"] == total or _faults(metrics)):
            return metrics
        assert time.monotonic() < deadline, (reported, total, _faults(metrics))
        time.sleep(0.05)


def _faults(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if re.search("fallbacks|migrations|lost", name))


def _metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
