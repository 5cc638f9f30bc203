"""`/health` and `/ready` of instances: alone, registered, draining, of another version of the model, and hanging."""

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import free_port
from pdserve.instance.metrics_port import serve_metrics
from pdserve.instance.router_link import RouterLinks
from pdserve.profile.profile import EngineFacts, Profile, StepModel

READY = (200, {"status": "ready", "routers": 1})


def probe(port: int, path: str) -> tuple[int, Any]:
    """Return status and JSON of a probe, or its error message in place of the JSON; status 0 if nothing listens."""
    try:
        reply = httpx.get(f"http://127.0.0.1:{port}{path}")
    except httpx.TransportError:
        return 0, ""
    return reply.status_code, reply.json()["error"]["message"] if reply.is_error else reply.json()


@pytest.fixture
def slow_profile(tmp_path: Path) -> Path:
    """A profile with which a token takes 0.3 s."""
    engine = EngineFacts(block_bytes=4096, num_blocks=64, max_model_len=1024, dtype="float32")
    path = tmp_path / "slow.json"
    Profile(model="tiny", engine=engine, step=StepModel(decode=((1, 0.3),))).save(path)
    return path


class Processes:
    """A router for the model `tiny`, and instances with the role `both`."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start
        self.port, self.control_port = free_port(), free_port()
        self._store = f"memory://{uuid.uuid4().hex}"

    def start_router(self, model: Path) -> Any:
        ports = ("--port", str(self.port), "--control-port", str(self.control_port))
        # On a busy machine an instance may be silent for longer than a lease, and would lose its streams and its place.
        patience = ("--instance-timeout-seconds", "600")
        return self._start("router", *ports, *patience, "--model", str(model), "--served-model-name", "tiny")

    def start_instance(self, model: Path, *flags: str) -> tuple[Any, int]:
        """Return the process and its metrics port."""
        port = free_port()
        flags = ("--metrics-port", str(port), "--router", f"127.0.0.1:{self.control_port}", *flags)
        flags = ("--connector", self._store, "--threads", "1", "--drain-seconds", "600", *flags)
        return self._start("both", *flags, "--model", str(model), "--served-model-name", "tiny"), port

    def complete(self, **body: Any) -> Any:
        body = {"model": "tiny", "prompt": [1, 2, 3], "temperature": 0, "return_token_ids": True} | body
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body)


@pytest.fixture
def processes(start: Callable[..., Any]) -> Processes:
    return Processes(start)


def test_an_instance_is_alive_once_loaded_and_ready_while_registered_and_not_draining(
    processes: Processes, checkpoint: Callable[..., Path], slow_profile: Path, wait_until: Callable[..., None]
) -> None:
    process, port = processes.start_instance(checkpoint("llama"), "--paced", str(slow_profile))
    wait_until(lambda: probe(port, "/health")[0] == 200, "the model is loaded")
    assert probe(port, "/ready") == (503, "not ready: it is registered with no router")
    router = processes.start_router(checkpoint("llama"))
    wait_until(lambda: probe(port, "/ready") == READY, "it is registered")
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{processes.port}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # the connection is closed with this iterator
        assert next(lines)
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: probe(port, "/ready") == (503, "not ready: the instance drains"), "it drains")
        assert probe(port, "/health") == (200, {"status": "alive"})
        metrics = f"http://127.0.0.1:{port}/metrics"
        wait_until(lambda: "pdserve_num_requests_running 1.0" in httpx.get(metrics).text, "its request runs")
    del lines
    assert process.wait(600) == 0, "it ends when its last request has"
    router.kill()


def test_an_instance_of_another_version_of_the_model_waits_until_the_last_of_this_one_has_left(
    processes: Processes, checkpoint: Callable[..., Path], generate: Any, wait_until: Callable[..., None]
) -> None:
    versions = [checkpoint("llama", seed=seed) for seed in (0, 1)]
    expected = [generate(version, [[1, 2, 3]], 8)[0] for version in versions]
    assert expected[0] != expected[1]
    processes.start_router(versions[0])
    old, old_port = processes.start_instance(versions[0])
    wait_until(lambda: probe(old_port, "/ready") == READY, "the old version is registered")
    _, new_port = processes.start_instance(versions[1])
    wait_until(lambda: probe(new_port, "/health")[0] == 200, "the new version is loaded")
    for _ in range(20):
        assert processes.complete(max_tokens=8, ignore_eos=True).json()["choices"][0]["token_ids"] == expected[0]
        assert probe(new_port, "/ready") == (503, "not ready: it is registered with no router")
    os.kill(old.pid, signal.SIGTERM)
    assert old.wait(600) == 0
    wait_until(lambda: probe(new_port, "/ready") == READY, "the new version is registered")
    assert processes.complete(max_tokens=8, ignore_eos=True).json()["choices"][0]["token_ids"] == expected[1]


def test_threads_that_hang_fail_the_health_check(
    make_instance: Callable[..., Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.instance.metrics_port.MAX_TURN_S", 0.0)
    port = free_port()
    instance = make_instance(model=str(checkpoint("llama")), connector=f"memory://{uuid.uuid4().hex}").instance

    async def scenario() -> None:
        serve_metrics(port, instance, RouterLinks([]))
        status, reason = await asyncio.to_thread(probe, port, "/health")  # no thread runs the engine's turns
        assert status == 503 and reason.startswith("the engine thread has been busy with one step for ")
        monkeypatch.setattr("pdserve.instance.metrics_port.MAX_TURN_S", 600.0)
        assert await asyncio.to_thread(probe, port, "/health") == (200, {"status": "alive"})
        monkeypatch.setattr("pdserve.instance.metrics_port.LOOP_TIMEOUT_S", 0.05)
        answers: list[tuple[int, Any]] = []
        client = threading.Thread(target=lambda: answers.append(probe(port, "/health")))
        client.start()
        client.join()  # which keeps the event loop from running
        assert answers == [(503, "the event loop has not answered for 0.05 s")]

    asyncio.run(scenario())
