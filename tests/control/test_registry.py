"""Registration and lookup of routers in a real Redis. tests/integration covers its use by instances."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import pdserve.control.registry
from pdserve.control.registry import RENEW_SCRIPT, Registry
from pdserve.errors import SetupError

Make = Callable[..., Registry]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis may take as long as it likes to answer, and a router to renew its lease."""
    monkeypatch.setattr(pdserve.control.registry, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(pdserve.control.registry, "LEASE_S", 600.0)


@pytest.fixture
def failures() -> list[None]:
    return []


@pytest.fixture
def make(redis_server: Any, failures: list[None], tmp_path: Any) -> Make:
    """make(model, token="secret") → a registry with connections of its own, and a model name unique to this test."""
    return lambda model="m", token="secret": Registry(
        redis_server.url, f"{tmp_path}/{model}", token, lambda: failures.append(None)
    )


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 600))


async def wait_for_routers(registry: Registry, expected: set[str]) -> None:
    while await registry.routers() != expected:
        await asyncio.sleep(0.01)


def test_routers_are_listed_while_they_are_announced(make: Make, failures: list[None]) -> None:
    async def scenario() -> None:
        reader, other_model, one, two = make(), make("n"), make(), make()
        announced = [
            asyncio.create_task(one.announce("0.0.0.0", 8001)),
            asyncio.create_task(two.announce("::1", 8002)),
        ]
        await wait_for_routers(reader, {"127.0.0.1:8001", "[::1]:8002"})
        assert await other_model.routers() == set()
        announced.pop().cancel()
        await wait_for_routers(reader, {"127.0.0.1:8001"})
        announced.pop().cancel()
        await wait_for_routers(reader, set())
        for registry in (reader, other_model, one, two):
            await registry.close()

    run(scenario())
    assert not failures


def test_entries_with_another_token_are_ignored(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        reader, attacker = make(), make(token="guessed")
        announced = asyncio.create_task(make().announce("routerhost", 8001))
        await wait_for_routers(reader, {"routerhost:8001"})
        (entry,) = await reader.run_script("return redis.call('ZRANGE', KEYS[1], 0, -1)", ["routers"], [])
        signature = entry.partition(" ")[2]
        for forged in (
            attacker._entry("evil:1"),
            f"evil:2 {signature}",
            "evil:3 ",
            "",
            "\xff\n \xe9",
            make("n")._entry("evil:4"),
        ):
            assert await reader.run_script(RENEW_SCRIPT, ["routers"], [forged, 60]) is None
        with caplog.at_level(logging.WARNING, "pdserve.control.registry"):
            assert await reader.routers() == await reader.routers() == {"routerhost:8001"}
        (message,) = caplog.messages
        assert message.startswith("6 routers are registered with another --control-token, such as ''")
        assert await attacker.routers() == {"evil:1"}
        announced.cancel()
        await reader.close()
        await attacker.close()

    run(scenario())


def test_an_unreachable_redis_is_logged_once_and_counted(
    start_redis: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server, failures = start_redis(), list[None]()
        registry = Registry(server.url, "m", "", lambda: failures.append(None))
        assert await registry.routers() == set()
        server.kill()
        assert [await registry.routers() for _ in range(3)] == [None] * 3 and len(failures) == 3
        server.start()
        await wait_for_routers(registry, set())
        await registry.close()

    with caplog.at_level(logging.INFO, "pdserve.control.registry"):
        run(scenario())
    lost, recovered = caplog.messages
    assert lost.startswith("the registry does not answer; the last known state stays in force")
    assert recovered == "the registry answers again"


@pytest.mark.parametrize("url", ["http://host", "redis://host:port", "redis://host?colour=red"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(SetupError, match="--registry must be the URL of a Redis, such as redis://host:6379/0: "):
        Registry(url, "m", "", lambda: None)
