"""Several routers on one port with the same instances."""

import json
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import trustme

from pdserve.cli.deployment import Deployment, free_port

PATIENT = ("--drain-seconds", "600", "--client-timeout-seconds", "600")


def test_routers_share_a_port_and_one_restarts(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    generate: Callable[[Path, list[list[int]], int], list[list[int]]],
    complete_all: Callable[..., list[list[int]]],
    wait_until: Callable[..., None],
    blocks_held: Callable[[Deployment], dict[str, float]],
    control_files: Callable[..., dict[str, str]],
) -> None:
    """The control ports use TLS, which is thereby tested in a whole deployment."""
    path, prompts = checkpoint("llama"), [[(i * i + k * i) % 256 for i in range(40)] for k in range(8)]
    expected = generate(path, prompts, 32)
    long = generate(path, prompts[:1], 300)[0]
    log_lines: list[str] = []
    tls = control_files(trustme.CA())
    with deploy(model=str(path), workers=2, num_blocks=200, log_lines=log_lines, **tls) as deployment:

        def served(before: tuple[float, ...] = (0, 0)) -> list[float]:
            """Return the number of requests that each router has served since the counts `before`."""
            return [_finished(url) - count for url, count in zip(deployment.routers, before, strict=True)]

        def all_serve(before: tuple[float, ...] = (0, 0)) -> bool:
            """Send all prompts; return True if each router served some (the kernel picks one per connection)."""
            assert complete_all(deployment, prompts) == expected
            return 0 not in served(before)

        wait_until(all_serve, "both routers serve")
        body = {"model": str(path), "prompt": prompts[0], "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        url, decode = f"{deployment.routers[1]}/v1/completions", deployment.child("decode-0").pid
        with ThreadPoolExecutor(1) as threads:
            os.kill(decode, signal.SIGSTOP)  # until router-0 has exited, so that the stream has not ended then
            try:
                streaming = threads.submit(_stream, url, {**body, "return_token_ids": True, "stream": True})
                wait_until(
                    lambda: any(one["requests"] for one in _instances(deployment.routers[1])), "the stream is running"
                )
                os.kill(deployment.child("router-0").pid, signal.SIGKILL)
                wait_until(lambda: not deployment.child("router-0").running, "router-0 has exited")
            finally:
                os.kill(decode, signal.SIGCONT)
            request_id, tokens = streaming.result()
        assert tokens == long, "the stream of the other router continues"
        assert complete_all(deployment, prompts) == expected, "new connections go to the remaining router"
        deployment.wait_ready(600)
        assert [line for line in log_lines if "[router-0] exited (SIGKILL); restarting" in line]
        wait_until(lambda: all_serve((0, _finished(deployment.routers[1]))), "both routers serve again")
        wait_until(lambda: not any(blocks_held(deployment).values()), "no block is held")
        own = httpx.get(f"{deployment.routers[1]}/debug/requests/{request_id}")
        assert own.status_code == 200
        unknown = httpx.get(f"{deployment.routers[0]}/debug/requests/{request_id}")
        assert unknown.status_code == 404 and "other routers have their own" in unknown.json()["error"]["message"]


def test_workers_finish_their_requests_on_sigterm(
    start: Callable[..., Any], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    port = free_port()
    control_port = next(one for one in iter(free_port, 0) if port not in (one, one + 1) and _is_free(one + 1))
    workers = start("router", "--workers", "2", "--port", str(port), "--control-port", str(control_port), *PATIENT)

    def serves() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(serves, "the workers serve")
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 100"), "the request has started"
        os.kill(workers.pid, signal.SIGTERM)
        wait_until(lambda: not serves(), "the workers accept no connections")
        output, waiting = tmp_path / "output", "shutting down: running requests may take 600 s"
        wait_until(lambda: output.read_text().count(waiting) == 2, "both workers wait for their requests")
        assert workers.poll() is None
        client.sendall(b"{}")
        assert client.recv(1000).startswith(b"HTTP/1.1 "), "the request is answered"
    assert workers.wait(600) == 0


def test_start_up_errors_of_workers(pdserve: Callable[..., Any]) -> None:
    port = free_port()
    flags = ["--port", str(port), "--control-port", str(free_port(exclude=port)), "--workers", "2"]
    result = pdserve("router", *flags, "--model", "/no/such/place")
    assert result.returncode == 2 and "[router-" in result.stdout and "no such model directory" in result.stdout
    assert "could not start; see its error above" in result.stderr
    result = pdserve("router", "--workers", "2", "--port", "0")
    assert result.returncode == 2 and "--workers needs a --port and a --control-port other than 0" in result.stderr


def _stream(url: str, body: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the id and the tokens of a streamed answer."""
    with httpx.stream("POST", url, json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    return events[0]["id"], [token for event in events for token in event["choices"][0]["token_ids"]]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _finished(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("pdserve_requests_total{"))


def _instances(url: str) -> list[dict[str, Any]]:
    instances: list[dict[str, Any]] = httpx.get(f"{url}/debug/instances").json()["instances"]
    return instances
