"""What a Redis says of the routers that there are, and what of it is believed. How instances use it: tests/integration."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import pdserve.control.registry
from pdserve.control.registry import RENEW, Registry
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
    """make(model, token="secret") → a registry of its own connections, with models that only this test has."""
    return lambda model="m", token="secret": Registry(
        redis_server.url, f"{tmp_path}/{model}", token, lambda: failures.append(None)
    )


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 600))


async def found(registry: Registry, expected: set[str]) -> None:
    while await registry.routers() != expected:
        await asyncio.sleep(0.01)


def test_routers_are_found_while_they_are_there(make: Make, failures: list[None]) -> None:
    async def story() -> None:
        asking, other_model, one, two = make(), make("n"), make(), make()
        announced = [
            asyncio.create_task(one.announce("0.0.0.0", 8001)),
            asyncio.create_task(two.announce("::1", 8002)),
        ]
        await found(asking, {"127.0.0.1:8001", "[::1]:8002"})
        assert await other_model.routers() == set()
        announced.pop().cancel()
        await found(asking, {"127.0.0.1:8001"})
        announced.pop().cancel()
        await found(asking, set())
        for registry in (asking, other_model, one, two):
            await registry.close()

    play(story())
    assert not failures


def test_who_does_not_know_the_token_cannot_name_a_router(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        asking, stranger = make(), make(token="guessed")
        announced = asyncio.create_task(make().announce("routerhost", 8001))
        await found(asking, {"routerhost:8001"})
        (entry,) = await asking.call("return redis.call('ZRANGE', KEYS[1], 0, -1)", ["routers"], [])
        seal = entry.partition(" ")[2]
        for forged in (
            stranger._entry("evil:1"),
            f"evil:2 {seal}",
            "evil:3 ",
            "",
            "\xff\n \xe9",
            make("n")._entry("evil:4"),
        ):
            assert await asking.call(RENEW, ["routers"], [forged, 60]) is None
        with caplog.at_level(logging.WARNING, "pdserve.control.registry"):
            assert await asking.routers() == await asking.routers() == {"routerhost:8001"}
        (told,) = caplog.messages
        assert told.startswith("6 routers are registered with another --control-token, such as ''")
        assert await stranger.routers() == {"evil:1"}
        announced.cancel()
        await asking.close()
        await stranger.close()

    play(story())


def test_a_redis_that_is_not_there_is_told_once_and_counted(
    start_redis: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server, failures = start_redis(), list[None]()
        registry = Registry(server.url, "m", "", lambda: failures.append(None))
        assert await registry.routers() == set()
        server.kill()
        assert [await registry.routers() for _ in range(3)] == [None] * 3 and len(failures) == 3
        server.start()
        await found(registry, set())
        await registry.close()

    with caplog.at_level(logging.INFO, "pdserve.control.registry"):
        play(story())
    gone, again = caplog.messages
    assert gone.startswith("the registry does not answer, and what is known stays in force")
    assert again == "the registry answers again"


@pytest.mark.parametrize("url", ["http://host", "redis://host:port", "redis://host?colour=red"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="--registry must be the URL of a Redis, such as redis://host:6379/0: "):
        Registry(url, "m", "", lambda: None)
