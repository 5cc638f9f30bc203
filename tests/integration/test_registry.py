"""Two routers and two instances that know of each other by a Redis alone; routers and the Redis come and go."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
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
    """A deployment whose instances were told of a registry, and of no router."""

    def __init__(self, deployment: Deployment, redis_server: Any, said: list[str], expected: list[list[int]]) -> None:
        self.deployment, self.redis, self.said, self.expected = deployment, redis_server, said, expected
        self.urls = deployment.routers

    def child(self, name: str) -> Child:
        return self.deployment.child(name)

    def ask(self, router: int, number: int = 0, key: str = "a", first: Event | None = None) -> tuple[list[int], str]:
        """The tokens of a stream by way of one router, and the error that ended it; `first` is set when it has begun."""
        body = {"model": self.deployment.config.name, "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0}
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
        return ids, "it ended without [DONE]"

    def metric(self, router: int, name: str) -> float:
        """The sum over all labels."""
        lines = httpx.get(f"{self.urls[router]}/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith((f"pdserve_{name} ", f"pdserve_{name}{{"))
        )

    def registered(self) -> list[str]:
        """Control addresses."""
        with closing(redis.Redis.from_url(self.redis.url, decode_responses=True)) as client:
            entries: Any = client.zrange(f"pdserve:routers:{self.deployment.config.name}", 0, -1)
        return [entry.partition(" ")[0] for entry in entries]

    @contextmanager
    def held(self, *routers: int) -> Iterator[list[Future[tuple[list[int], str]]]]:
        """A stream through each of these routers that has begun, and goes on when the block ends: decode is frozen."""
        frozen = self.child("decode-0").pid
        begun = [Event() for _ in routers]
        with ThreadPoolExecutor(len(routers)) as threads:
            os.kill(frozen, signal.SIGSTOP)
            try:
                streams = [threads.submit(self.ask, *args) for args in zip(routers, (0, 1), "aa", begun, strict=False)]
                assert all(one.wait(600) for one in begun)
                yield streams
            finally:
                os.kill(frozen, signal.SIGCONT)


@pytest.fixture(scope="module")
def fleet(
    forked: type[Deployment],
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

        class Registered(forked):  # type: ignore[misc, valid-type]  # what a fixture gives is no class to mypy
            flags: ClassVar = {
                "router": ["--registry", redis_server.url, "--lease-seconds", "600", "--drain-seconds", "600"]
            }

            def _instances(self) -> list[Child]:
                children: list[Child] = super()._instances()
                for child in children:
                    at = child.arguments.index("--router")
                    child.arguments[at : at + 2] = ["--registry", redis_server.url]
                return children

        said: list[str] = []
        with Registered(config, say=said.append) as deployment:
            try:
                deployment.wait_ready(600)
                yield Fleet(deployment, redis_server, said, generate(path, PROMPTS, TOKENS))
            except BaseException:
                print("\n".join(said))
                raise


def test_instances_find_all_routers(fleet: Fleet, until: Callable[..., None]) -> None:
    until(lambda: len(fleet.registered()) == 2, "both are registered")
    for router in (0, 1):
        assert fleet.ask(router, 2) == (fleet.expected[2], "")


def test_a_key_has_one_account_for_all_routers(fleet: Fleet, until: Callable[..., None]) -> None:
    for router in (0, 1):
        assert fleet.ask(router, 2, key="b") == (fleet.expected[2], "")

    def account() -> dict[str, Any]:
        with closing(redis.Redis.from_url(fleet.redis.url)) as client:
            text: Any = client.get(f"pdserve:limits:bob:{fleet.deployment.config.name}")
        return dict(json.loads(text or "{}"))

    until(lambda: 2 <= account().get("requests", [4])[0] < 3, "two of four requests are left")
    until(lambda: account()["choices"] == {}, "nothing is under way")


def test_nobody_is_lost_with_redis(fleet: Fleet, until: Callable[..., None]) -> None:
    fleet.redis.kill()
    for name in ("registry_failures_total", "lookups_of_routers_failed_total"):
        until(lambda name=name: all(fleet.metric(router, name) > 1 for router in (0, 1)), name)
    assert [fleet.ask(router, 3) for router in (0, 1)] == [(fleet.expected[3], "")] * 2
    fleet.redis.start()
    until(lambda: len(fleet.registered()) == 2, "both are registered again")
    until(lambda: sum("the registry answers again" in line for line in fleet.said) >= 4, "everybody has heard")
    assert [fleet.metric(router, "instances_lost_total") for router in (0, 1)] == [0, 0]


def test_a_router_drains_while_the_other_takes_requests(fleet: Fleet, until: Callable[..., None]) -> None:
    leaving, before = fleet.child("router-0"), fleet.registered()
    with fleet.held(0) as (stream,):
        os.kill(leaving.pid, signal.SIGTERM)
        until(lambda: _refuses(fleet.urls[0]), "it takes no connections")
        new = Event()
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(fleet.ask, 1, 1, "a", new)
            assert new.wait(600), "the other router serves"
            time.sleep(0.3)  # for one that does not wait to end
            assert leaving.running and not stream.done()
            os.kill(fleet.child("decode-0").pid, signal.SIGCONT)
            assert other.result() == (fleet.expected[1], "")
    assert stream.result() == (fleet.expected[0], "")
    assert leaving.process is not None and leaving.process.wait(600) == 0
    assert len(fleet.registered()) == 1 < len(before), "it has withdrawn"
    fleet.deployment.wait_ready(600)
    assert fleet.ask(0, 2) == (fleet.expected[2], ""), "it is back"


def test_a_dead_router_is_forgotten_and_a_new_one_found(fleet: Fleet, until: Callable[..., None]) -> None:
    dead = fleet.child("router-1")
    at = dead.arguments.index("--control-port") + 1
    with fleet.held(1, 0) as (lost, kept):
        os.kill(dead.pid, signal.SIGKILL)
        ids, error = lost.result()
        assert error and len(ids) < TOKENS
        assert not kept.done()
    assert kept.result() == (fleet.expected[1], "")
    forgotten = f"router 127.0.0.1:{dead.arguments[at]} is no longer in the registry"
    until(lambda: sum(forgotten in line for line in fleet.said) == 2, "instances dial it no more")
    dead.arguments[at] = str(free_port())
    fleet.deployment.wait_ready(600)
    assert fleet.ask(1, 3) == (fleet.expected[3], "")
    until(lambda: fleet.metric(1, "kv_cache_blocks_held") == 0, "nothing is held")


def _refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False
