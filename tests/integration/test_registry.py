"""Two routers and two instances that find each other through a Redis registry, while routers and the Redis restart."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import httpx
import pytest
import redis

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.supervisor import Child
from pdserve.config import UpConfig

PROMPTS = [[(i * i + k * i) % 256 for i in range(40)] for k in range(4)]
TOKENS = 24
KEYS = '[alice]\nkey = "a"\n[bob]\nkey = "b"\nrequests = "4/h"\n[operator]\nkey = "o"\n'


class Fleet:
    """A deployment whose instances have a registry's URL and no router addresses."""

    def __init__(
        self, deployment: Deployment, redis_server: Any, log_lines: list[str], expected: list[list[int]]
    ) -> None:
        self.deployment, self.redis, self.log_lines, self.expected = deployment, redis_server, log_lines, expected
        self.urls = deployment.routers

    def child(self, name: str) -> Child:
        return self.deployment.child(name)

    def stream(self, router: int, prompt: int = 0, key: str = "a", first: Event | None = None) -> tuple[list[int], str]:
        """Return the tokens of a stream through one router, and the error that ended it, or "".

        `first` is set when the first token arrives, or when the stream ends without one.
        """
        body = {"model": self.deployment.config.name, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        url, headers, ids = f"{self.urls[router]}/v1/completions", {"Authorization": f"Bearer {key}"}, list[int]()
        try:
            with httpx.stream("POST", url, json=body, headers=headers) as reply:
                if reply.status_code != 200:
                    return ids, str(json.loads(reply.read())["error"]["code"])
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        return ids, ""
                    if line:
                        ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    if ids and first is not None:
                        first.set()
        except httpx.TransportError as error:
            return ids, repr(error)
        finally:
            if first is not None:
                first.set()
        return ids, "the stream ended without [DONE]"

    def metric(self, router: int, name: str, label: str = "") -> float:
        """Return the sum of a metric over all label values, or over those that contain a text."""
        lines = httpx.get(f"{self.urls[router]}/metrics").text.splitlines()
        own = [one for one in lines if one.startswith((f"pdserve_{name} ", f"pdserve_{name}{{")) and label in one]
        return sum(float(line.split()[-1]) for line in own)

    def registered(self) -> list[str]:
        """Return the control addresses of the registered routers."""
        with closing(redis.Redis.from_url(self.redis.url, decode_responses=True)) as client:
            entries: Any = client.zrange(f"pdserve:routers:{self.deployment.config.name}", 0, -1)
        return [entry.partition(" ")[0] for entry in entries]

    @contextmanager
    def paused_streams(self, *routers: int) -> Iterator[list[Future[tuple[list[int], str]]]]:
        """Open a stream through each router and freeze decode after the first tokens, until the end of the block."""
        frozen = self.child("decode-0").pid
        first = [Event() for _ in routers]
        with ThreadPoolExecutor(len(routers)) as threads:
            os.kill(frozen, signal.SIGSTOP)
            try:
                streams = [
                    threads.submit(self.stream, *args) for args in zip(routers, (0, 1), "aa", first, strict=False)
                ]
                assert all(event.wait(600) for event in first)
                assert not any(stream.done() for stream in streams), [stream.result() for stream in streams]
                yield streams
            finally:
                os.kill(frozen, signal.SIGCONT)


@pytest.fixture(scope="module")
def fleet(
    forked_deployment: type[Deployment],
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    redis_servers: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    path, folder = checkpoint("llama"), tmp_path_factory.mktemp("registry")
    keys_file = folder / "keys.toml"
    keys_file.write_text(KEYS)
    settings: dict[str, Any] = {
        "workers": 2,
        "num_blocks": 200,
        "threads": 1,
        "local_prefill_tokens": 0,
        "keys_file": str(keys_file),
    }
    config = UpConfig(model=str(path), port=free_port(), **settings)
    with closing(redis_servers.RedisServer(folder)) as redis_server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CONTROL_TOKEN", "secret")
        patch.setattr("pdserve.cli.deployment.quota_file", lambda config: nullcontext(""))  # the registry shares quotas

        class RegisteredDeployment(forked_deployment):  # type: ignore[misc, valid-type]  # the class comes from a fixture
            flags: ClassVar = {
                "router": [
                    "--registry",
                    redis_server.url,
                    "--instance-timeout-seconds",
                    "600",
                    "--drain-seconds",
                    "600",
                ]
            }

            def _instance_child(self, role: str) -> Child:
                child: Child = super()._instance_child(role)
                at = child.arguments.index("--router")
                child.arguments[at : at + 2] = ["--registry", redis_server.url]
                return child

        log_lines: list[str] = []
        with RegisteredDeployment(config, on_line=log_lines.append) as deployment:
            try:
                deployment.wait_ready(600)
                yield Fleet(deployment, redis_server, log_lines, generate(path, PROMPTS, TOKENS))
            except BaseException:
                print("\n".join(log_lines))
                raise


def test_instances_find_all_routers(fleet: Fleet, wait_until: Callable[..., None]) -> None:
    wait_until(lambda: len(fleet.registered()) == 2, "both are registered")
    for router in (0, 1):
        assert fleet.stream(router, 2) == (fleet.expected[2], "")


def test_rate_limits_of_a_key_are_shared_by_all_routers(fleet: Fleet, wait_until: Callable[..., None]) -> None:
    for router in (0, 1):
        assert fleet.stream(router, 2, key="b") == (fleet.expected[2], "")

    def limits() -> dict[str, Any]:
        with closing(redis.Redis.from_url(fleet.redis.url)) as client:
            text: Any = client.get(f"pdserve:limits:bob:{fleet.deployment.config.name}")
        return dict(json.loads(text or "{}"))

    wait_until(lambda: 2 <= limits().get("rates", {"requests": [4]})["requests"][0] < 3, "two of four requests remain")
    wait_until(lambda: limits()["choices"] == {}, "no request is running")


def test_redis_restart_loses_no_router_and_no_instance(fleet: Fleet, wait_until: Callable[..., None]) -> None:
    fleet.redis.kill()
    wait_until(lambda: all(fleet.metric(router, "registry_failures_total") > 1 for router in (0, 1)), "routers notice")
    failed = "lookups_of_routers_failed_total"
    for name in ("prefill-0", "decode-0"):
        wait_until(
            lambda name=name: all(fleet.metric(router, failed, name) > 0 for router in (0, 1)), f"{name} notices"
        )
    assert [fleet.stream(router, 3) for router in (0, 1)] == [(fleet.expected[3], "")] * 2
    fleet.redis.start()
    wait_until(lambda: len(fleet.registered()) == 2, "both are registered again")
    wait_until(
        lambda: sum("the registry answers again" in line for line in fleet.log_lines) >= 4,
        "all processes have reconnected",
    )
    assert [fleet.metric(router, "instances_lost_total") for router in (0, 1)] == [0, 0]


def test_router_drains_while_the_other_takes_requests(fleet: Fleet, wait_until: Callable[..., None]) -> None:
    draining, before = fleet.child("router-0"), fleet.registered()
    with fleet.paused_streams(0) as (stream,):
        os.kill(draining.pid, signal.SIGTERM)
        wait_until(lambda: _refuses_connections(fleet.urls[0]), "router-0 accepts no connections")
        new = Event()
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(fleet.stream, 1, 1, "a", new)
            assert new.wait(600) and not other.done(), "the other router serves"
            time.sleep(0.3)  # time for a router that does not drain to exit
            assert draining.running and not stream.done()
            os.kill(fleet.child("decode-0").pid, signal.SIGCONT)
            assert other.result() == (fleet.expected[1], "")
    assert stream.result() == (fleet.expected[0], "")
    assert draining.process is not None and draining.process.wait(600) == 0
    assert len(fleet.registered()) == 1 < len(before), "router-0 is deregistered"
    fleet.deployment.wait_ready(600)
    assert fleet.stream(0, 2) == (fleet.expected[2], ""), "router-0 serves again"


def test_dead_router_is_dropped_and_a_new_one_found(fleet: Fleet, wait_until: Callable[..., None]) -> None:
    dead = fleet.child("router-1")
    at = dead.arguments.index("--control-port") + 1
    with fleet.paused_streams(1, 0) as (lost, kept):
        os.kill(dead.pid, signal.SIGKILL)
        ids, error = lost.result()
        assert error and len(ids) < TOKENS
        assert not kept.done()
    assert kept.result() == (fleet.expected[1], "")
    dropped = f"router 127.0.0.1:{dead.arguments[at]} is no longer in the registry"
    wait_until(lambda: sum(dropped in line for line in fleet.log_lines) == 2, "instances stop connecting to it")
    dead.arguments[at] = str(free_port())
    fleet.deployment.wait_ready(600)
    assert fleet.stream(1, 3) == (fleet.expected[3], "")
    wait_until(lambda: fleet.metric(1, "kv_cache_blocks_held") == 0, "no block is held")


def _refuses_connections(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:  # a connection that was accepted just before may end without an answer
        return True
    return False
