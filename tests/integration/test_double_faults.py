"""Two faults at once: while no instance is attached, running streams wait and new requests queue, and none loses a token."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PROMPTS = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(6)]
TOKENS = 300
WAITING = "pdserve_requests_waiting_for_instance "


def test_streams_wait_for_an_instance_and_go_on_with_the_same_tokens(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    blocks_held: Callable[..., dict[str, float]],
    wait_until: Callable[..., None],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    """Prefill is frozen and then killed, decode is frozen and comes back."""
    path = checkpoint("llama")
    expected = generate(path, PROMPTS, TOKENS)
    flags = {"router": ["--no-instance-timeout", "600", "--instance-timeout-seconds", "2"]}
    with (
        deploy(model=str(path), num_blocks=512, flags=flags) as deployment,
        ThreadPoolExecutor(2 * len(PROMPTS)) as threads,
    ):
        url = deployment.url
        left = threading.Event()

        def ask(prompt: list[int]) -> list[int]:
            reply = complete(deployment, prompt=prompt, max_tokens=TOKENS, ignore_eos=True)
            ids: list[int] = reply["choices"][0]["token_ids"]
            return ids

        def leave() -> None:
            body = {"prompt": PROMPTS[0], "max_tokens": TOKENS, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=0.5):
                pass

        def waiting() -> float:
            lines = httpx.get(f"{url}/metrics", timeout=600).text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith(WAITING))

        running = stop_busy(deployment, "decode-0", lambda: [threads.submit(ask, prompt) for prompt in PROMPTS])
        pids = {name: deployment.child(name).pid for name in ("prefill-0", "decode-0")}
        os.kill(pids["prefill-0"], signal.SIGSTOP)
        try:
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503 and not _attached(url))
            num_waiting = waiting()
            assert num_waiting == sum(not one.done() for one in running) > 0
            queued = [threads.submit(ask, prompt) for prompt in PROMPTS]
            wait_until(lambda: waiting() == num_waiting + len(queued))
            for _ in itertools.repeat(None, 2):
                try:
                    leave()
                except httpx.TimeoutException:
                    left.set()
            assert left.is_set()
            wait_until(lambda: waiting() == num_waiting + len(queued))
            assert not any(one.done() for one in queued)
            os.kill(pids["prefill-0"], signal.SIGKILL)
        finally:
            os.kill(pids["decode-0"], signal.SIGCONT)
        assert [one.result(600) for one in (*running, *queued)] == [*expected, *expected]
        assert waiting() == 0
        assert metric(deployment, "instance_waits_total", outcome="cancelled") == 2
        assert metric(deployment, "instance_waits_total", outcome="expired") == 0
        wait_until(lambda: not any(blocks_held(deployment).values()))


def test_without_an_instance_in_time_requests_end_with_a_503(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], complete: Callable[..., dict[str, Any]]
) -> None:
    flags = {"router": ["--no-instance-timeout", "0.5", "--instance-timeout-seconds", "2"]}
    settings = {"prefill": 0, "decode": 0, "both": 1, "flags": flags}
    with deploy(model=str(checkpoint("llama")), num_blocks=64, **settings) as deployment:
        os.kill(deployment.child("both-0").pid, signal.SIGSTOP)
        try:
            while _attached(deployment.url):
                time.sleep(0.05)
            reply = httpx.post(f"{deployment.url}/v1/completions", json={"prompt": [1, 2]}, timeout=600)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert "is available, and none has come within 0.5 s" in reply.json()["error"]["message"]
            assert reply.json()["error"]["code"] == "no_instance"
        finally:
            os.kill(deployment.child("both-0").pid, signal.SIGCONT)


def _attached(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/debug/instances", timeout=600).json()["instances"]
    return found
