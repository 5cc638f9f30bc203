"""Failing instances and clients: each request ends with the correct tokens or a clear error, and all blocks are freed."""

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import wait_until

PROMPTS = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(9)]
LONG = [[i, 7, 9, 4] * 150 for i in range(9)]  # with a small token budget, prefill takes many steps
TOKENS = 120


def stream(url: str, model: str, prompt: list[int], tokens: int = TOKENS) -> tuple[list[int], str]:
    """Return the token ids of a streamed completion, and the error that ended the stream, or ""."""
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


def instances(url: str) -> dict[str, dict[str, Any]]:
    """Return the router's view of each instance, by instance id."""
    found = httpx.get(f"{url}/debug/instances").json()["instances"]
    return {instance["instance_id"]: instance for instance in found}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_killed_instance_fails_no_request(
    victim: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, LONG, TOKENS)
    with (
        deploy(model=str(path), num_blocks=512, max_num_batched_tokens=32) as deployment,
        ThreadPoolExecutor(len(LONG)) as threads,
    ):
        url, model = deployment.url, deployment.config.name
        send = lambda: [threads.submit(stream, url, model, prompt) for prompt in LONG]  # noqa: E731
        futures = stop_busy(deployment, victim, send)
        os.kill(deployment.child(victim).pid, signal.SIGKILL)
        results = [future.result(600) for future in futures]
        assert results == [(tokens, "") for tokens in expected], "the other instance serves both roles meanwhile"

        wait_until(lambda: _is_ready_again(deployment, victim), f"{victim} is restarted and serves again")
        assert stream(url, model, LONG[3], 8) == (expected[3][:8], "")
        wait_until(lambda: not any(blocks_held(deployment).values()), "all blocks are freed")


def test_streams_of_a_killed_decode_migrate(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "temperature": i % 2, "seed": i, "logprobs": 0}
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
        futures = stop_busy(deployment, "decode-1", lambda: [threads.submit(send, body) for body in bodies])
        os.kill(deployment.child("decode-1").pid, signal.SIGKILL)
        for choice, reference in zip([future.result(600) for future in futures], expected, strict=True):
            assert choice["token_ids"] == reference["token_ids"]
            expected_logprobs = pytest.approx(reference["logprobs"]["token_logprobs"], abs=1e-4)
            assert choice["logprobs"]["token_logprobs"] == expected_logprobs
        assert metric(deployment, "migrations_total", kind="instance_lost") >= 2


def test_drained_decode_fails_no_request(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    log_lines: list[str] = []
    with (
        deploy(
            log_lines=log_lines, model=str(checkpoint("llama")), num_blocks=512, decode=2, policy="round_robin"
        ) as deployment,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):

        def send(prompt: list[int]) -> list[int]:
            reply = complete(deployment, prompt=prompt, max_tokens=300, ignore_eos=True)
            ids: list[int] = reply["choices"][0]["token_ids"]
            return ids

        expected = list(threads.map(send, PROMPTS))
        futures = stop_busy(deployment, "decode-1", lambda: [threads.submit(send, prompt) for prompt in PROMPTS])
        draining = deployment.child("decode-1")
        os.kill(draining.pid, signal.SIGTERM)
        os.kill(draining.pid, signal.SIGCONT)
        assert [future.result(600) for future in futures] == expected
        assert draining.process.wait(600) == 0
        assert metric(deployment, "migrations_total", kind="drained") >= 2
        for name, signum in (("prefill-0", signal.SIGTERM), ("router", signal.SIGINT)):
            child = deployment.child(name)
            os.kill(child.pid, signum)
            assert child.process.wait(600) == 0
            child.reader.join(600)
    assert log_lines and not [line for line in log_lines if "Traceback" in line], "\n".join(log_lines)


def test_restarts_and_role_changes_under_load_fail_no_request(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    pdserve: Callable[..., Any],
    metric: Callable[..., float],
) -> None:
    path, prompts = checkpoint("llama"), PROMPTS[:3]
    expected = generate(path, prompts, TOKENS)
    stop = threading.Event()
    drain_flags = ["--drain-seconds", "600"]
    flags = {"prefill": drain_flags, "decode": drain_flags}

    def client(prompt: list[int], tokens: list[int]) -> int:
        """Send the request repeatedly until `stop` is set, and return the number of requests."""
        for num_requests in itertools.count():
            if stop.wait(0.05):
                return num_requests
            assert stream(url, model, prompt) == (tokens, "")
        raise AssertionError

    with (
        deploy(model=str(path), num_blocks=512, decode=2, policy="round_robin", flags=flags) as deployment,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        url, model = deployment.url, deployment.config.name
        clients = [threads.submit(client, *pair) for pair in zip(prompts, expected, strict=True)]

        def change_role(role: str) -> None:
            httpx.post(f"{url}/admin/instances/decode-1/role", json={"role": role}).raise_for_status()
            wait_until(lambda: instances(url)["decode-1"]["role"] == role, f"decode-1 serves as {role}")

        def migrates_a_stream() -> bool:
            """Change the role of decode-1 while it has requests; return True once any stream has migrated."""
            wait_until(lambda: instances(url)["decode-1"]["requests"] > 0, "decode-1 has requests")
            change_role("prefill")
            change_role("decode")
            return metric(deployment, "migrations_total") > 0

        def command(*arguments: str) -> str:
            result = pdserve(*arguments, "--router", url)
            return str(result.stdout) if result.returncode == 0 else str(result.stderr)

        try:
            wait_until(migrates_a_stream, "a stream migrates")
            refused = command("drain", "prefill-0")
            assert refused.startswith("pdserve: no prefill instance would be available while prefill-0 drains"), refused
            assert command("role", "decode-1", "prefill") == "decode-1 serves as prefill\n"
            assert command("drain", "prefill-0") == "prefill-0 is drained and gone\n"
            wait_until(lambda: _is_ready_again(deployment, "prefill-0"), "prefill-0 serves again")
            assert command("role", "decode-1", "decode") == "decode-1 serves as decode\n"
            assert command("drain", "decode-0") == "decode-0 is drained and gone\n"
        finally:
            stop.set()
        assert all(future.result(600) > 1 for future in clients)
        migrations, drained = (metric(deployment, "migrations_total", **labels) for labels in ({}, {"kind": "drained"}))
        assert migrations == drained > 0 == metric(deployment, "handover_fallbacks_total"), "no request was interrupted"


def _is_ready_again(deployment: Any, name: str) -> bool:
    deployment.check_children()
    return name in instances(deployment.url)


def test_frozen_instance_is_removed_and_reconnects(checkpoint: Callable[..., Path], deploy: Callable[..., Any]) -> None:
    flags = {"router": ["--instance-timeout-seconds", "5"]}  # the other, nearly idle instances do not exceed it
    with deploy(model=str(checkpoint("llama")), num_blocks=512, decode=2, flags=flags) as deployment:
        url, model = deployment.url, deployment.config.name
        frozen = deployment.child("decode-1").pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: "decode-1" not in instances(url), "the frozen instance is removed")
            for prompt in PROMPTS[:4]:
                ids, error = stream(url, model, prompt, 4)
                assert len(ids) == 4 and not error
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: "decode-1" in instances(url), "it has reconnected")


def test_disconnected_clients_are_cancelled_on_every_instance(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
    metric: Callable[..., float],
) -> None:
    """One instance is frozen while the client disconnects, so it cannot finish before the cancellation reaches it."""
    cases = list(itertools.product((True, False), ("prefill-0", "decode-0")))
    with deploy(model=str(checkpoint("llama")), num_blocks=512, max_num_batched_tokens=8) as deployment:
        url, model = deployment.url, deployment.config.name
        cancelled = partial(metric, deployment, "requests_total", finish_reason="cancelled")
        for number, (streaming, frozen) in enumerate(cases, 1):
            body = {"model": model, "prompt": [number] * 600, "max_tokens": 400, "ignore_eos": True}
            text = json.dumps({**body, "stream": streaming})
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
            )
            os.kill(deployment.child(frozen).pid, signal.SIGSTOP)
            try:
                with socket.create_connection(("127.0.0.1", deployment.config.port)) as client:
                    client.sendall(f"{head} {len(text)}\r\n\r\n{text}".encode())
                    wait_until(lambda name=frozen: instances(url)[name]["requests"] == 1, "it is routed")  # type: ignore[misc]  # a lambda with a default
                wait_until(lambda count=number: cancelled() == count, "it is cancelled")  # type: ignore[misc]  # likewise
            finally:
                os.kill(deployment.child(frozen).pid, signal.SIGCONT)
        assert stream(url, model, [9] * 40, 4)[1] == "", "both have processed all earlier frames"
        computed = partial(metric, deployment, "prompt_tokens_by_source_total", role="prefill")
        wait_until(lambda: computed() % 600 == 40, "the counters are up to date")
        wait_until(lambda: not any(blocks_held(deployment).values()), "all blocks are freed")
        assert computed() <= 2 * 600 + 40, "prefill computed at most the prompts of the cases with a frozen decode"
        assert metric(deployment, "generation_tokens_total", role="decode") < 400, "decode stopped early"
        assert not any(instance["requests"] for instance in instances(url).values())

        def num_released() -> int:
            requests = httpx.get(f"{url}/debug/requests").json()["requests"]
            return sum("decode-0" in request["released_ms"] for request in requests)

        wait_until(lambda: num_released() == len(cases), "decode has reported the release of every request")


def test_200_requests_with_40_cancelled_leak_no_block(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    blocks_held: Callable[..., dict[str, float]],
    metric: Callable[..., float],
) -> None:
    def send(i: int) -> str:
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
        ends = list(threads.map(send, range(200)))
        assert set(ends) == {"cancelled", "done"} and ends.count("cancelled") == 40
        wait_until(lambda: not any(blocks_held(deployment).values()), "all blocks are freed")
        # An instance checks its whole pool when it becomes idle, and exits if a block is neither free nor cached.
        time.sleep(1.1)
        for i in range(1, 9):
            send(i)
        names = [child.name for child in deployment.children if child.name != "router"]
        checks = partial(metric, deployment, "integrity_checks_total")
        wait_until(lambda: all(checks(instance=name) >= 1 for name in names), "each has checked its pool")
        assert all(child.running for child in deployment.children)


def test_instance_that_joins_later_is_used_at_once(checkpoint: Callable[..., Path], deploy: Callable[..., Any]) -> None:
    with deploy(model=str(checkpoint("llama")), num_blocks=128, policy="round_robin") as deployment:
        first = deployment.child("decode-0")
        arguments = [a if a != "decode-0" else "decode-9" for a in first.arguments]
        late = type(first)("decode-9", arguments, first.environment)
        deployment.children.append(late)
        deployment._start(late)
        deployment.wait_ready(600)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda p: stream(deployment.url, deployment.config.name, p, 8), PROMPTS[:8]))
        log = httpx.get(f"{deployment.url}/debug/requests").json()
        used = {request["decode_instance"] for request in log["requests"]}
        assert used == {"decode-0", "decode-9"}
