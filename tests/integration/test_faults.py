"""Instances die, freeze, come late; clients leave. Every request ends, with its right tokens or a clear error."""

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPTS = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(9)]
LONG = [[i, 7, 9, 4] * 150 for i in range(9)]  # many steps of a small budget: prefill is busy for a while
TOKENS = 120


def stream(url: str, model: str, prompt: list[int], tokens: int = TOKENS) -> tuple[list[int], str]:
    """The token ids that a streaming client got, and the error that ended the stream, if one did."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    ids: list[int] = []
    body |= {"stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return ids, f"{reply.status_code}: {reply.read().decode()}"
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return ids, event["error"]["message"]
                ids += event["choices"][0].get("token_ids") or []
    return ids, ""


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def instances(url: str) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{url}/debug/instances").json()["instances"]
    return {one["instance_id"]: one for one in found}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_instance_costs_time_and_nothing_else(
    victim: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, LONG, TOKENS)
    with (
        deploy(model=str(path), num_blocks=512, max_num_batched_tokens=32) as deployment,
        ThreadPoolExecutor(len(LONG)) as threads,
    ):
        url, model = deployment.url, deployment.config.name
        futures = [threads.submit(stream, url, model, prompt) for prompt in LONG]
        busy = lambda: instances(url).get(victim, {}).get("requests", 0) >= 2  # noqa: E731
        wait_until(busy, 600, f"{victim} is in the middle of it")
        os.kill(deployment.child(victim).pid, signal.SIGKILL)
        results = [future.result(600) for future in futures]
        assert results == [(tokens, "") for tokens in expected], "the other one does everything meanwhile"

        wait_until(lambda: _is_ready_again(deployment, victim), 600, f"{victim} is restarted and serves again")
        assert stream(url, model, LONG[3], 8) == (expected[3][:8], "")
        wait_until(lambda: not any(blocks_held(deployment).values()), 600, "all blocks are back")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_of_a_killed_decode_go_on_elsewhere(
    temperature: float,
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "temperature": temperature, "seed": i, "logprobs": 0}
        for i, prompt in enumerate(PROMPTS)
    ]
    with (
        deploy(model=str(checkpoint("llama")), num_blocks=512, decode=2, policy="round_robin") as deployment,
        ThreadPoolExecutor(len(bodies)) as threads,
    ):

        def send(body: dict[str, Any]) -> dict[str, Any]:
            choice: dict[str, Any] = complete(deployment, **body)["choices"][0]
            return choice

        expected = list(threads.map(send, bodies))
        futures = [threads.submit(send, body) for body in bodies]
        wait_until(lambda: instances(deployment.url)["decode-1"]["requests"] >= 2, 600, "decode-1 is busy")
        os.kill(deployment.child("decode-1").pid, signal.SIGKILL)
        for choice, right in zip([future.result(600) for future in futures], expected, strict=True):
            assert choice["token_ids"] == right["token_ids"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(right["logprobs"]["token_logprobs"], abs=1e-4)
        metrics = httpx.get(f"{deployment.url}/metrics").text
        assert 'pdserve_migrations_total{kind="instance_lost"}' in metrics


def test_a_drained_decode_fails_no_request(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], complete: Callable[..., dict[str, Any]]
) -> None:
    said: list[str] = []
    with (
        deploy(said=said, model=str(checkpoint("llama")), num_blocks=512, decode=2, policy="round_robin") as deployment,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):

        def send(prompt: list[int]) -> list[int]:
            reply = complete(deployment, prompt=prompt, max_tokens=300, ignore_eos=True)
            ids: list[int] = reply["choices"][0]["token_ids"]
            return ids

        expected = list(threads.map(send, PROMPTS))
        futures = [threads.submit(send, prompt) for prompt in PROMPTS]
        wait_until(lambda: instances(deployment.url)["decode-1"]["requests"] >= 2, 600, "decode-1 is busy")
        leaving = deployment.child("decode-1")
        os.kill(leaving.pid, signal.SIGTERM)
        assert [future.result(600) for future in futures] == expected
        assert leaving.process.wait(600) == 0
        assert 'pdserve_migrations_total{kind="drained"}' in httpx.get(f"{deployment.url}/metrics").text
        for name, number in (("prefill-0", signal.SIGTERM), ("router", signal.SIGINT)):
            child = deployment.child(name)
            os.kill(child.pid, number)
            assert child.process.wait(600) == 0
            child.reader.join(600)
    assert said and not [line for line in said if "Traceback" in line], "\n".join(said)


def test_instances_restart_and_change_roles_under_load_and_no_request_fails(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    pdserve: Callable[..., Any],
    metric: Callable[..., float],
) -> None:
    path, prompts = checkpoint("llama"), PROMPTS[:3]
    expected = generate(path, prompts, TOKENS)
    stop = threading.Event()
    patient = ["--drain-seconds", "600"]
    flags = {"prefill": patient, "decode": patient}

    def client(prompt: list[int], tokens: list[int]) -> int:
        """Asks again and again, and how often."""
        for asked in itertools.count():
            if stop.wait(0.05):
                return asked
            assert stream(url, model, prompt) == (tokens, "")
        raise AssertionError

    with (
        deploy(model=str(path), num_blocks=512, decode=2, policy="round_robin", flags=flags) as deployment,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        url, model = deployment.url, deployment.config.name
        clients = [threads.submit(client, *pair) for pair in zip(prompts, expected, strict=True)]

        def flip(role: str) -> None:
            httpx.post(f"{url}/admin/instances/decode-1/role", json={"role": role}).raise_for_status()
            wait_until(lambda: instances(url)["decode-1"]["role"] == role, 600, "it serves as that")

        def moves() -> bool:
            """Flips decode-1 while it has work, unless that ends meanwhile."""
            wait_until(lambda: instances(url)["decode-1"]["requests"] > 0, 600, "there is work")
            flip("prefill")
            flip("decode")
            return metric(deployment, "migrations_total") > 0

        def order(*words: str) -> str:
            done = pdserve(*words, "--router", url)
            return str(done.stdout) if done.returncode == 0 else str(done.stderr)

        try:
            wait_until(moves, 600, "a stream moves")
            refused = order("drain", "prefill-0")
            assert refused.startswith("pdserve: no prefill instance would be available while prefill-0 drains"), refused
            assert order("role", "decode-1", "prefill") == "decode-1 serves as prefill\n"
            assert order("drain", "prefill-0") == "prefill-0 is drained and gone\n"
            wait_until(lambda: _is_ready_again(deployment, "prefill-0"), 600, "it serves again")
            assert order("role", "decode-1", "decode") == "decode-1 serves as decode\n"
            assert order("drain", "decode-0") == "decode-0 is drained and gone\n"
        finally:
            stop.set()
        assert all(future.result(600) > 1 for future in clients)
        moved, drained = (metric(deployment, "migrations_total", **labels) for labels in ({}, {"kind": "drained"}))
        assert moved == drained > 0 == metric(deployment, "handover_fallbacks_total"), "nothing was cut off"


def _is_ready_again(deployment: Any, name: str) -> bool:
    deployment.tend()
    return name in instances(deployment.url)


def test_a_frozen_instance_is_out_and_comes_back(checkpoint: Callable[..., Path], deploy: Callable[..., Any]) -> None:
    flags = {"router": ["--lease-seconds", "5"]}  # the others have little to do, and are not silent for so long
    with deploy(model=str(checkpoint("llama")), num_blocks=512, decode=2, flags=flags) as deployment:
        url, model = deployment.url, deployment.config.name
        frozen = deployment.child("decode-1").pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: "decode-1" not in instances(url), 600, "the frozen instance is out")
            for prompt in PROMPTS[:4]:
                ids, error = stream(url, model, prompt, 4)
                assert len(ids) == 4 and not error
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: "decode-1" in instances(url), 600, "it has attached again")


def test_a_second_prefill_helps_where_the_first_is_late(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    blocks_held: Callable[..., dict[str, float]],
    metric: Callable[..., float],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, LONG, TOKENS)
    flags = {"router": ["--hedge-prefill-after", "0.1", "--prefill-policy", "round_robin"]}
    with deploy(model=str(path), num_blocks=512, prefill=2, flags=flags) as deployment:
        frozen = deployment.child("prefill-1").pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert complete_all(deployment, LONG[:8], max_tokens=20) == [tokens[:20] for tokens in expected[:8]]
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert metric(deployment, "prefill_hedges_total", outcome="preferred") == 4, "every second one"
        assert complete_all(deployment, LONG[8:], max_tokens=4) == [expected[8][:4]]
        wait_until(lambda: not any(blocks_held(deployment).values()), 600, "all blocks are back")


def test_nobody_works_on_for_a_client_that_has_left(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
    metric: Callable[..., float],
) -> None:
    """One of the two is frozen when the client leaves, so that it cannot have been done before it hears of that."""
    cases = list(itertools.product((True, False), ("prefill-0", "decode-0")))
    with deploy(model=str(checkpoint("llama")), num_blocks=512, max_num_batched_tokens=8) as deployment:
        url, model = deployment.url, deployment.config.name
        cancelled = partial(metric, deployment, "requests_total", finish_reason="cancelled")
        for number, (streaming, frozen) in enumerate(cases, 1):
            body = {"model": model, "prompt": [number] * 600, "max_tokens": 400, "ignore_eos": True}
            text = json.dumps({**body, "stream": streaming})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length:"
            os.kill(deployment.child(frozen).pid, signal.SIGSTOP)
            try:
                with socket.create_connection(("127.0.0.1", deployment.config.port)) as client:
                    client.sendall(f"{head} {len(text)}\r\n\r\n{text}".encode())
                    wait_until(lambda name=frozen: instances(url)[name]["requests"] == 1, 600, "it is on its way")  # type: ignore[misc]  # a lambda with a default
                wait_until(lambda count=number: cancelled() == count, 600, "it is cut short")  # type: ignore[misc]  # likewise
            finally:
                os.kill(deployment.child(frozen).pid, signal.SIGCONT)
        assert stream(url, model, [9] * 40, 4)[1] == "", "both have read all that was sent before"
        computed = partial(metric, deployment, "prompt_tokens_by_source_total", role="prefill")
        wait_until(lambda: computed() % 600 == 40, 600, "the counters are of now")
        wait_until(lambda: not any(blocks_held(deployment).values()), 600, "all blocks are back")
        assert computed() <= 2 * 600 + 40, "prefill has computed what decode was too frozen for, at most"
        assert metric(deployment, "generation_tokens_total", role="decode") < 400, "and decode next to nothing"
        assert not any(one["requests"] for one in instances(url).values())

        def told() -> int:
            found = httpx.get(f"{url}/debug/requests").json()["requests"]
            return sum("decode-0" in one["released_ms"] for one in found)

        wait_until(lambda: told() == len(cases), 600, "decode holds nothing any more, and has said so")


def test_two_hundred_requests_with_a_fifth_cancelled_leave_nothing(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
    metric: Callable[..., float],
) -> None:
    def one(i: int) -> str:
        prompt = [(i * 31 + j) % 256 for j in range(1 + (i * 37) % 200)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1 + i % 40 + 30 * (i % 5 == 0),
            "ignore_eos": i % 5 == 0,
            "seed": i,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
                for events, line in enumerate(reply.iter_lines()):
                    if i % 5 == 0 and events >= i % 7:
                        return "cancelled"
                    if line == "data: [DONE]":
                        return "done"
            return f"ended without [DONE], status {reply.status_code}"
        except httpx.HTTPError as error:
            return repr(error)

    with (
        deploy(
            model=str(checkpoint("llama")),
            num_blocks=96,
            max_model_len=512,
            prefill=2,
            decode=2,
            max_num_batched_tokens=64,
        ) as deployment,
        ThreadPoolExecutor(16) as threads,
    ):
        url, model = deployment.url, deployment.config.name
        ends = list(threads.map(one, range(200)))
        assert set(ends) == {"cancelled", "done"} and ends.count("cancelled") == 40
        wait_until(lambda: not any(blocks_held(deployment).values()), 600, "all blocks are back")
        # Each instance looks at its whole pool when it falls idle, and ends itself if a block is out of place.
        time.sleep(1.1)
        for i in range(1, 9):
            one(i)
        names = [child.name for child in deployment.children if child.name != "router"]
        checks = partial(metric, deployment, "integrity_checks_total")
        wait_until(lambda: all(checks(instance=name) >= 1 for name in names), 600, "each has looked at its pool")
        assert all(child.running for child in deployment.children)


def test_an_instance_that_joins_later_is_used_at_once(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any]
) -> None:
    with deploy(model=str(checkpoint("llama")), num_blocks=128, policy="round_robin") as deployment:
        late = deployment.child("decode-0")
        twin = type(late)("decode-9", [a if a != "decode-0" else "decode-9" for a in late.arguments])
        deployment.children.append(twin)
        deployment._start(twin)
        deployment.wait_ready(600)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda p: stream(deployment.url, deployment.config.name, p, 8), PROMPTS[:8]))
        log = httpx.get(f"{deployment.url}/debug/requests").json()
        used = {one["decode_instance"] for one in log["requests"]}
        assert used == {"decode-0", "decode-9"}
