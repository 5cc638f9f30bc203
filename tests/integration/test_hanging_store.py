"""A store that hangs: the first requests wait for its time-outs, later ones go on without it until it answers again.

Heartbeats name a store that hangs or refuses connections.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from pdserve.counters import series
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored, num_stored

OUT = series("kv_store_out", connector="redis")
AT_ONCE = 32  # prompts of which transformers computes the tokens together


def prompt_of(number: int) -> list[int]:
    return [(i * number) % 251 for i in range(40)]


def test_requests_go_on_without_a_store_that_hangs(
    checkpoint: Callable[..., Path],
    generate: Callable[[Path, list[list[int]], int], list[list[int]]],
    make_instance: Callable[..., Any],
    start_redis: Callable[..., Any],
) -> None:
    path, server = checkpoint("llama"), start_redis()
    driver = make_instance(model=str(path), num_blocks=64, connector=f"{server.url}?timeout=2")
    instance = driver.instance
    served = 0

    def serve() -> int:
        """Serve one prompt as prefill, and return the number of blocks that the store took."""
        nonlocal served
        served += 1
        name, prompt = str(served), prompt_of(served)
        driver.submit(name, prompt, 5, pb.PREFILL)
        driver.run_until(lambda outputs: any(o.request_id == name and is_stored(o) for o in outputs))
        driver.run_until_idle()
        first = served // AT_ONCE * AT_ONCE
        expected = generate(path, [*map(prompt_of, range(first, first + AT_ONCE))], 1)
        assert driver.tokens(name) == expected[served - first]
        stored: list[int] = [num_stored(output) for output in driver.outputs if output.request_id == name]
        return max(stored)

    def heartbeat() -> dict[str, float]:
        instance.run_once(wait=False)
        return dict(instance.reporter.heartbeat.counters)

    assert heartbeat()[OUT] == 0
    os.kill(server.pid, signal.SIGSTOP)
    try:
        while not instance.connector.stats().is_out:
            serve()
        assert served <= 2, "a prompt has a match and a store that time out"
        before = instance.connector.stats()
        assert [serve() for _ in range(5)] == [0] * 5
        after = instance.connector.stats()
        assert after.seconds == before.seconds, "no transfer was tried"
        assert sum(after.failures.values()) > sum(before.failures.values())
        assert heartbeat()[OUT] == 1
    finally:
        os.kill(server.pid, signal.SIGCONT)
    give_up = time.monotonic() + 600

    def wait_until_it_is_back() -> None:
        while instance.reporter.heartbeat.counters[OUT]:  # without a request
            instance.run_once(wait=True)
            assert time.monotonic() < give_up

    wait_until_it_is_back()
    while not serve():
        assert time.monotonic() < give_up
    assert heartbeat()[OUT] == 0
    server.kill()
    assert [serve() for _ in range(2)] == [0] * 2
    assert heartbeat()[OUT] == 1, "refused at once"
    server.start()
    wait_until_it_is_back()
    while not serve():
        assert time.monotonic() < give_up
    assert heartbeat()[OUT] == 0
    assert instance.engine.pool.num_held == 0
    loads = {key: blocks for key, blocks in heartbeat().items() if "kv_transfer_failures" in key and "load" in key}
    assert not any(loads.values()), "what asks a store whether it is back is no failure"


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "tiered"])
def test_an_instance_starts_without_a_store_that_does_not_answer(
    scheme: str,
    checkpoint: Callable[..., Path],
    generate: Callable[[Path, list[list[int]], int], list[list[int]]],
    make_instance: Callable[..., Any],
    start_redis: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.kv_transfer.connectors.tiered._ATTACH_RETRY_S", 0.1)
    path, server = checkpoint("llama"), start_redis(*(["--cluster-enabled", "yes"] if "cluster" in scheme else []))
    if "cluster" in scheme:
        with closing(redis.Redis.from_url(server.url)) as client:
            client.execute_command("CLUSTER ADDSLOTS", *range(16384))
    server.kill()
    url = f"{server.url.replace('redis:', f'{scheme}:')}?timeout=600"
    if scheme == "tiered":
        url = f"tiered://{server.url},{server.url.replace('/0', '/1')}"
    driver = make_instance(model=str(path), num_blocks=64, connector=url)
    instance, served = driver.instance, 0
    assert instance.connector.stats().any_out

    def serve() -> int:
        """Serve one prompt as prefill, and return the number of blocks that the store took."""
        nonlocal served
        served += 1
        name, prompt = str(served), prompt_of(served)
        driver.submit(name, prompt, 5, pb.PREFILL)
        driver.run_until(lambda outputs: any(o.request_id == name and is_stored(o) for o in outputs))
        driver.run_until_idle()
        assert driver.tokens(name) == generate(path, [prompt], 1)[0]
        stored: list[int] = [num_stored(output) for output in driver.outputs if output.request_id == name]
        return max(stored)

    assert serve() == 0
    server.start()
    if "cluster" in scheme:
        with closing(redis.Redis.from_url(server.url)) as client:
            while client.cluster("info")["cluster_state"] != "ok":
                time.sleep(0.05)
    give_up = time.monotonic() + 600
    while instance.connector.stats().any_out:
        assert time.monotonic() < give_up, "the store is back"
        instance.run_once(wait=False)  # an idle instance asks the store, too
        driver.run_until_idle()
        time.sleep(0.05)
    assert serve() == 3 and not instance.connector.stats().any_out
