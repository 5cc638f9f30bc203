"""Instances that are started and stopped while a deployment serves: no stream ends or changes."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from pdserve.launchers.launcher import Launcher

PROMPTS = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(9)]
TOKENS = 300


def test_instances_start_and_stop_while_streams_run(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    path, lines = checkpoint("llama"), list[str]()
    expected = generate(path, PROMPTS, TOKENS)
    with (
        deploy(model=str(path), num_blocks=512, policy="round_robin", log_lines=lines) as deployment,
        ThreadPoolExecutor(1) as thread,
    ):
        launcher: Launcher = deployment

        def instances() -> dict[str, dict[str, Any]]:
            found = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
            return {instance["instance_id"]: instance for instance in found}

        def is_gone(name: str) -> bool:
            deployment.check_children()
            return name not in [child.name for child in deployment.children]

        streams = thread.submit(complete_all, deployment, PROMPTS, max_tokens=TOKENS)
        for role in ("prefill", "decode"):
            launcher.start(role)
        assert not deployment.poll_ready(), "the new instances have not registered yet"
        deployment.wait_ready(600)
        assert set(instances()) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
        assert streams.result(600) == expected

        send = lambda: [thread.submit(complete_all, deployment, PROMPTS, max_tokens=TOKENS)]  # noqa: E731
        [streams] = stop_busy(deployment, "decode-0", send)
        stopped = deployment.child("decode-0").pid
        for name in ("prefill-0", "decode-0"):
            launcher.stop(name)
        deployment.check_children()
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: is_gone("prefill-0") and is_gone("decode-0"), "both have drained and ended")
        assert streams.result(600) == expected
        deployment.wait_ready(600)
        assert set(instances()) == {"prefill-1", "decode-1"}
        assert complete_all(deployment, PROMPTS[:2], max_tokens=8) == [tokens[:8] for tokens in expected[:2]]
        assert metric(deployment, "migrations_total", kind="drained") >= 2
    assert not [line for line in lines if "restarting" in line or "killed" in line], lines
