"""Where requests go: what instances tell their routers, and the same tokens whatever the policy."""

import asyncio
import importlib
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
from pdserve.instance.engine_loop import Instance
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.scheduling.policy import POLICIES


def test_a_router_is_told_what_others_have_sent(checkpoint: Callable[..., Path]) -> None:
    config = InstanceConfig(
        model=str(checkpoint("llama")),
        connector=f"memory://{uuid.uuid4().hex}?timeout=600",
        num_blocks=64,
        max_num_batched_tokens=32,
    )
    outputs: list[pb.Output] = []
    instance = Instance(config, lambda link, frame: outputs.extend(frame.step.outputs))

    def turns(done: Callable[[], bool]) -> None:
        while not done():
            instance.run_once(wait=not instance.engine.has_work)
        instance._costs_updated_at = 0.0
        instance._update_heartbeat()

    sampling = pb.Sampling(max_tokens=9, top_p=1, ignore_eos=True)

    def submit(link: str, phase: "pb.Phase", length: int) -> None:
        message = pb.Submit(request_id=str(phase), phase=phase, prompt=[1] * length, sampling=sampling)
        instance.submit(link, message)

    submit("a", pb.PREFILL, 100)
    turns(lambda: "engine_steps" in instance._counts)
    assert instance.other_load("b") == pb.Load(requests=1, prefills=1, prefill_tokens=68, attended_tokens=68 * (32 + 34)), (
        "32 tokens are computed"
    )
    assert instance.other_load("a") == pb.Load(), "what it has sent itself it knows"
    submit("b", pb.BOTH, 20)
    submit("b", pb.DECODE, 10)
    turns(lambda: any(output.token_ids and output.request_id == str(pb.BOTH) for output in outputs))
    assert instance.other_load("a") == pb.Load(requests=2, output_tokens=8 + 9, context_tokens=21 + 10), (
        "one has its first token, the other waits for KV"
    )
    assert instance.other_load("c").requests == 3
    turns(lambda: any(output.stored.final for output in outputs))
    instance.cancel("b", str(pb.DECODE))
    turns(lambda: instance.num_jobs == 0)
    beat = instance.heartbeat
    assert instance.other_load("c") == pb.Load(), "all is over"
    costs = instance.meter.costs(instance._costs_updated_at)
    assert costs.prefill_seconds(100) > 0 and costs.step_seconds(1, 10) > 0
    assert costs.transfer != Costs().transfer, "it has stored a prompt"
    assert list(beat.costs.prefill) == pytest.approx(costs.prefill, rel=1e-3)
    assert list(beat.costs.transfer) == pytest.approx(costs.transfer, rel=1e-3)
    instance.connector.close()


PAIRS = [("round_robin", "session", 0), ("power_of_two", "prefix_aware", 32), ("least_loaded", "auto", None)]
assert {policy for pair in PAIRS for policy in pair[:2]} == set(POLICIES)


@pytest.mark.parametrize(("prefill_policy", "decode_policy", "local_prefill_tokens"), PAIRS)
def test_the_tokens_are_the_same_under_every_policy(
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
        told = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
    decisions = [one for request in told for one in request["decisions"]]
    asked = {("prefill", prefill_policy), ("decode", decode_policy)}
    assert {(one["role"], one["policy"]) for one in decisions} == asked
    local = [request for request in told if request["placement"]["way"] == "decode"]
    assert all(request["prefill_instance"] == request["decode_instance"] for request in local)
    assert all(len(request["decisions"]) == (1 if request in local else 2) for request in told)
    used = {one["chosen"] for one in decisions}
    assert local_prefill_tokens is None or used >= {"prefill-0", "prefill-1"}
    assert decode_policy == "auto" or used >= {"decode-0", "decode-1"}


def known_blocks(url: str) -> dict[str, float]:
    """Instance → blocks of it in the router's prefix index, as soon as the index is complete."""
    found: dict[str, dict[str, float]] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        match = re.fullmatch(r'pdserve_prefix_index_(\w+)\{instance="([^"]+)"\} (.*)', line)
        if match:
            found.setdefault(match[1], {})[match[2]] = float(match[3])
    assert all(0 <= age < 600 for age in found.get("age_seconds", {}).values())
    return found.get("blocks", {}) if not any(found.get("untold_blocks", {}).values()) else {}


def wait_for_blocks(deployment: Any, **expected: int) -> None:
    deadline = time.monotonic() + 600
    while known_blocks(deployment.url) != {name.replace("_", "-"): count for name, count in expected.items()}:
        assert time.monotonic() < deadline, known_blocks(deployment.url)
        time.sleep(0.05)


def test_the_router_knows_what_is_cached_where_and_learns_it_again_after_a_restart(
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
            assert {one["instance"]: one["cached_tokens"] for one in prefill["candidates"]} == {
                first: cached,
                other: 0,
            }
            assert [one["cached_tokens"] for one in decode["candidates"]] == [cached]
            blocks = {first.replace("-", "_"): 8, other.replace("-", "_"): 0, "decode_0": 10}
            wait_for_blocks(deployment, **blocks)
            os.kill(deployment.child("router").pid, signal.SIGKILL)
            deployment.child("router").process.wait(600)
            deployment.wait_ready(600)
            wait_for_blocks(deployment, **blocks)
        os.kill(deployment.child(first).pid, signal.SIGKILL)
        wait_for_blocks(deployment, decode_0=10, **{other.replace("-", "_"): 0})
        # An idle instance takes what is late anyhow, but nobody else may wait for that.
        body = {"model": deployment.config.name, "prompt": [3] * 40, "max_tokens": 2, "ignore_eos": True}
        reply = httpx.post(f"{deployment.url}/v1/completions", json={**body, "n": 2})
        assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1, reply.text
        assert reply.json()["error"]["code"] == "slo_ttft" and reply.json()["error"]["type"] == "rate_limit_error"
        assert metric(deployment, "refusals_total", reason="slo_ttft") == 1
        assert complete(deployment, **body)["usage"]["completion_tokens"] == 2


def test_the_benchmark_finds_what_there_is_to_find(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    routing = importlib.import_module("routing")
    turns = routing.read(routing.Settings(requests=30), vocabulary=256)
    with deploy(model=str(checkpoint("llama")), num_blocks=512, prefill=2, policy="prefix_aware") as deployment:
        rounds = [asyncio.run(routing.play(deployment, turns, 2, salt)) for salt in ("a", "b")]
    tokens = sum(len(turn.prompt) for turn in turns)
    for each in rounds:
        assert len(each.ttfts) == 30 and each.tokens == tokens
        hits = each.sources["local_hit"] + each.sources["loaded"]
        assert 0 < hits <= routing.most_hits(turns) * tokens + 1e-6, "more would be another round's"
