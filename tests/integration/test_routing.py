"""Routing: load and cache reports of instances, and identical tokens under every policy."""

import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.config import InstanceConfig
from pdserve.costs import Costs
from pdserve.instance.instance import Instance
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.scheduling.policy import POLICIES
from tests.outputs import is_stored, outputs_of


def test_instances_report_the_load_from_other_routers(checkpoint: Callable[..., Path]) -> None:
    config = InstanceConfig(
        model=str(checkpoint("llama")),
        connector=f"memory://{uuid.uuid4().hex}?timeout=600",
        num_blocks=64,
        max_num_batched_tokens=32,
    )
    outputs: list[Output] = []
    instance = Instance(config, lambda link, frame: outputs.extend(outputs_of(frame)))

    def run_until(done: Callable[[], bool]) -> None:
        while not done():
            instance.run_once(wait=not instance.engine.has_work)
        instance.reporter.costs_updated_at = 0.0
        instance.reporter.update(instance._by_sequence.values(), 0, instance.now())

    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    def submit(link: str, phase: "pb.Phase", length: int) -> None:
        request = Request(prompt=[1] * length, sampling=sampling).pack()
        message = pb.Submit(request_id=str(phase), phase=phase, request=request)
        instance.submit(link, message)

    submit("a", pb.PREFILL, 100)
    run_until(lambda: "engine_steps" in instance.reporter.counts)
    assert instance.reporter.other_load("b") == pb.Load(
        requests=1, prefills=1, prefill_tokens=68, attended_tokens=68 * (32 + 34)
    ), "32 tokens are computed"
    assert instance.reporter.other_load("a") == pb.Load(), "a router's own requests are excluded"
    submit("b", pb.BOTH, 20)
    submit("b", pb.DECODE, 10)
    run_until(lambda: any(output.token_ids and output.request_id == str(pb.BOTH) for output in outputs))
    assert instance.reporter.other_load("a") == pb.Load(requests=2, output_tokens=8 + 9, context_tokens=21 + 10), (
        "one request has its first token, the other waits for KV"
    )
    assert instance.reporter.other_load("c").requests == 3
    run_until(lambda: any(is_stored(output) for output in outputs))
    instance.cancel("b", str(pb.DECODE))
    run_until(lambda: instance.num_jobs == 0)
    heartbeat = instance.reporter.heartbeat
    assert instance.reporter.other_load("c") == pb.Load(), "all requests have ended"
    costs = instance.reporter.meter.costs(instance.reporter.costs_updated_at)
    assert costs.prefill_seconds(100) > 0 and costs.step_seconds(1, 10) > 0
    assert costs.transfer != Costs().transfer, "measured on the stored prompt"
    assert list(heartbeat.costs.prefill) == pytest.approx(costs.prefill, rel=1e-3)
    assert list(heartbeat.costs.transfer) == pytest.approx(costs.transfer, rel=1e-3)
    instance.connector.close()


PAIRS = [("round_robin", "session", 0), ("power_of_two", "prefix_aware", 32), ("least_loaded", "auto", None)]
assert {policy for pair in PAIRS for policy in pair[:2]} == set(POLICIES)


@pytest.mark.parametrize(("prefill_policy", "decode_policy", "local_prefill_tokens"), PAIRS)
def test_tokens_are_the_same_under_every_policy(
    prefill_policy: str,
    decode_policy: str,
    local_prefill_tokens: int | None,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, prompts, 16)
    with (
        deploy(
            model=str(path),
            num_blocks=256,
            prefill=2,
            decode=2,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            local_prefill_tokens=local_prefill_tokens,
        ) as deployment,
        ThreadPoolExecutor(8) as threads,
    ):

        def send(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "user": f"user {len(prompt)}"}
            ids: list[int] = complete(deployment, **body)["choices"][0]["token_ids"]
            return ids

        assert list(threads.map(send, prompts)) == expected
        if local_prefill_tokens is not None:
            short = sum(len(prompt) <= local_prefill_tokens for prompt in prompts)
            assert metric(deployment, "placements_total", way="decode", reason="threshold") == short
            assert metric(deployment, "placements_total", way="split", reason="threshold") == len(prompts) - short
        assert list(threads.map(send, prompts)) == expected, "with warm caches"
        reason = "forecast" if local_prefill_tokens is None else "threshold"
        assert metric(deployment, "placements_total", reason=reason) == 2 * len(prompts)
        requests = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
    decisions = [decision for request in requests for decision in request["decisions"]]
    policies = {("prefill", prefill_policy), ("decode", decode_policy)}
    assert {(decision["role"], decision["policy"]) for decision in decisions} == policies
    local = [request for request in requests if request["placement"]["way"] == "decode"]
    assert all(request["prefill_instance"] == request["decode_instance"] for request in local)
    assert all(len(request["decisions"]) == (1 if request in local else 2) for request in requests)
    used = {decision["chosen"] for decision in decisions}
    assert local_prefill_tokens is None or used >= {"prefill-0", "prefill-1"}
    assert decode_policy == "auto" or used >= {"decode-0", "decode-1"}


LAST = """
def last(candidates, request):
    names = sorted(candidate.instance_id for candidate in candidates)
    return [(-names.index(candidate.instance_id), candidate) for candidate in candidates]
"""


def test_a_policy_of_another_package(
    tmp_path: Path,
    install_connectors: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    pdserve: Callable[..., Any],
) -> None:
    module = tmp_path / "source.py"
    module.write_text(LAST)
    install_connectors(tmp_path, "last_package", module, {"last": "last", "lost": "lost"}, group="pdserve.policies")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with deploy(decode=3, flags={"router": ["--decode-policy", "last"]}) as deployment:
        for number in range(4):
            complete(deployment, prompt=[number, 1, 2], max_tokens=2)
        requests = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
    assert {request["decode_instance"] for request in requests} == {"decode-2"}
    [reason] = {d["why"] for request in requests for d in request["decisions"] if d["role"] == "decode"}
    assert reason == "the lowest score by last"
    failed = pdserve("router", "--policy", "lost", "--port", "0", "--control-port", "0")
    assert failed.returncode != 0 and "pdserve.policies: lost (last_package:lost) cannot be imported" in failed.stderr
    assert "Traceback" not in failed.stderr


def indexed_blocks(url: str) -> dict[str, float]:
    """Return the number of each instance's blocks in the router's prefix index, or {} while the index is incomplete."""
    found: dict[str, dict[str, float]] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        match = re.fullmatch(r'pdserve_prefix_index_(\w+)\{instance="([^"]+)"\} (.*)', line)
        if match:
            found.setdefault(match[1], {})[match[2]] = float(match[3])
    assert all(0 <= age < 600 for age in found.get("age_seconds", {}).values())
    return found.get("blocks", {}) if not any(found.get("untold_blocks", {}).values()) else {}


def wait_for_blocks(deployment: Any, **expected: int) -> None:
    deadline = time.monotonic() + 600
    while indexed_blocks(deployment.url) != {name.replace("_", "-"): count for name, count in expected.items()}:
        assert time.monotonic() < deadline, indexed_blocks(deployment.url)
        time.sleep(0.05)


def test_prefix_index_is_rebuilt_after_a_router_restart(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
) -> None:
    settings = {"prefill": 2, "prefill_policy": "prefix_aware", "slo": "ttft=0.001ms"}
    with deploy(model=str(checkpoint("llama")), num_blocks=64, **settings) as deployment:

        def send(prompt: list[int], **body: Any) -> dict[str, Any]:
            reply = complete(deployment, prompt=prompt, ignore_eos=True, **body)
            timeline: dict[str, Any] = httpx.get(f"{deployment.url}/debug/requests/{reply['id']}").json()
            return timeline

        wait_for_blocks(deployment, prefill_0=0, prefill_1=0, decode_0=0)
        first = send([1] * 100, max_tokens=33)["prefill_instance"]
        other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[first]
        blocks = {first.replace("-", "_"): 6, other.replace("-", "_"): 0, "decode_0": 8}  # 132 of 133 have KV
        wait_for_blocks(deployment, **blocks)
        for cached in (80, 112):
            (decode, prefill) = send([1] * 90 + [2] * 30, max_tokens=2)["decisions"]
            assert prefill["chosen"] == first
            assert {candidate["instance"]: candidate["cached_tokens"] for candidate in prefill["candidates"]} == {
                first: cached,
                other: 0,
            }
            assert [candidate["cached_tokens"] for candidate in decode["candidates"]] == [cached]
            blocks = {first.replace("-", "_"): 8, other.replace("-", "_"): 0, "decode_0": 10}
            wait_for_blocks(deployment, **blocks)
            os.kill(deployment.child("router").pid, signal.SIGKILL)
            deployment.child("router").process.wait(600)
            deployment.wait_ready(600)
            wait_for_blocks(deployment, **blocks)
        os.kill(deployment.child(first).pid, signal.SIGKILL)
        wait_for_blocks(deployment, decode_0=10, **{other.replace("-", "_"): 0})
        # An idle instance accepts a request that misses its target anyway, but no request may queue behind it.
        body = {"model": deployment.config.name, "prompt": [3] * 40, "max_tokens": 2, "ignore_eos": True}
        reply = httpx.post(f"{deployment.url}/v1/completions", json={**body, "prompt": [[3] * 40, [4] * 40]})
        assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1, reply.text
        assert reply.json()["error"]["code"] == "slo_ttft" and reply.json()["error"]["type"] == "rate_limit_error"
        assert metric(deployment, "refusals_total", reason="slo_ttft") == 1
        assert complete(deployment, **body)["usage"]["completion_tokens"] == 2
