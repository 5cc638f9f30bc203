"""Limits of a key over several routers, with accounts in a real Redis. Rates are by the hour: next to nothing is filled."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from pdserve import registry
from pdserve.registry import Registry
from pdserve.router import shared_quota
from pdserve.router.quota import Limits, Quota, Rate
from pdserve.router.shared_quota import SharedQuotas

LIMITS = Limits(requests=Rate(10, 3600), tokens=Rate(1000, 3600), concurrency=8)


class Router:
    def __init__(self, url: str, model: str, name: str) -> None:
        self.quota, self.failures = Quota(LIMITS), 0
        self.registry = Registry(url, model, "", self._failed)
        quotas = {"alice": self.quota, "bob": Quota(Limits())}
        self.settle = SharedQuotas(self.registry, name, quotas).settle

    def _failed(self) -> None:
        self.failures += 1

    def ask(self, choices: int = 1, tokens: int = 1) -> str:
        """Why a request is refused; empty: it is let in."""
        now = time.monotonic()
        refusal = self.quota.refusal(choices, tokens, now)
        if refusal is None:
            self.quota.take(choices, tokens, now)
        return refusal.kind if refusal else ""

    def end(self, choices: int = 1, unused: int = 0) -> None:
        self.quota.give_back(choices, unused, time.monotonic())

    def missing(self) -> int:
        """Requests that have to be filled in before the next one may come, at six minutes each."""
        refusal = self.quota.refusal(1, 1, time.monotonic())
        return round(((refusal and refusal.retry_after_s) or 0) / 360)


Story = Callable[[list[Router]], Awaitable[None]]


async def play(url: str, model: object, story: Story) -> None:
    """With three routers."""
    routers = [Router(url, str(model), f"router-{i}") for i in range(3)]
    async with asyncio.timeout(600):
        await story(routers)
    for router in routers:
        await router.registry.close()


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many seconds a router's choices count without news; in these tests for ever, unless told. A Redis may take
    as long as it likes to answer."""
    monkeypatch.setattr(registry, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(shared_quota, "LEASE_S", 1000.0)
    return lambda seconds: monkeypatch.setattr(shared_quota, "LEASE_S", seconds)


@pytest.fixture
def on_redis(redis_server: Any, tmp_path: Any) -> Callable[[Story], None]:
    """Plays a story of a model that only this test has."""
    return lambda story: asyncio.run(play(redis_server.url, tmp_path, story))


def test_what_one_lets_in_counts_for_all(on_redis: Callable[[Story], None]) -> None:
    async def story(routers: list[Router]) -> None:
        one, two, _ = routers
        for _ in range(6):
            assert not one.ask()
            one.end()
        await one.settle()
        assert not two.ask(), "it has heard of nothing yet"
        two.end()
        await two.settle()
        assert [two.ask() for _ in range(4)] == ["", "", "", "rate_limit_requests"]
        assert [one.ask() for _ in range(5)] == ["", "", "", "", "rate_limit_requests"], "it has not heard of these"
        for router in (two, one, two):
            await router.settle()
        assert one.missing() == two.missing() == 5, "14 of 10 were let in: a debt of 4, and one for the next"
        settling = asyncio.create_task(one.settle())
        await asyncio.sleep(0)  # it has told, and not heard yet
        one.quota.take(0, 1, time.monotonic())
        await settling
        assert one.missing() == 6

    on_redis(story)


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_things_lets_in_more_than_each_router_would_alone(
    seed: int, on_redis: Callable[[Story], None]
) -> None:
    async def story(routers: list[Router]) -> None:
        random, let_in = Random(seed), 0
        for _ in range(200):
            router = random.choice(routers)
            if random.random() < 0.3:
                await router.settle()
            elif not router.ask():
                router.end()
                let_in += 1
        assert 10 <= let_in <= 3 * 10
        for router in 2 * routers:
            router.missing()
            await router.settle()
        assert {router.missing() for router in routers} == {let_in - 9}

    on_redis(story)


def test_tokens_that_were_not_needed_come_back_to_all(on_redis: Callable[[Story], None]) -> None:
    async def story(routers: list[Router]) -> None:
        one, two, _ = routers
        assert not one.ask(tokens=1000)
        await one.settle()
        two.missing()
        await two.settle()
        assert two.ask(tokens=500) == "rate_limit_tokens"
        one.end(unused=900)
        await one.settle()
        await two.settle()
        assert two.ask(tokens=950) == "rate_limit_tokens" and not two.ask(tokens=900)

    on_redis(story)


def test_choices_of_all_routers_count_while_these_live(
    on_redis: Callable[[Story], None], lease: Callable[[float], None]
) -> None:
    async def story(routers: list[Router]) -> None:
        one, two, three = routers
        assert not one.ask(choices=6) and not two.ask(choices=2)
        for router in routers:
            router.missing()
            await router.settle()
        assert three.ask() == "rate_limit_concurrency"
        one.end(choices=5)
        await one.settle()
        await three.settle()
        assert three.ask(choices=6) == "rate_limit_concurrency" and not three.ask(choices=5)
        three.end(choices=5)
        lease(0.02)
        await one.settle()  # and is not heard of again
        while three.ask(choices=6):
            await three.settle()
        assert three.quota.elsewhere == 2

    on_redis(story)


def test_without_redis_each_counts_for_itself(start_redis: Callable[..., Any]) -> None:
    server = start_redis()

    async def story(routers: list[Router]) -> None:
        one, two, three = routers
        assert not one.ask(choices=8)
        for router in (one, two):
            router.missing()
            await router.settle()
        assert two.ask() == "rate_limit_concurrency" and not three.quota.stale
        server.kill()
        for router in routers:
            await router.settle()
        assert [router.failures for router in routers] == [1, 1, 0], "who was asked for nothing has nothing to say"
        assert not two.ask(choices=8)
        server.start()
        for router in (one, two, one):
            await router.settle()
        assert (one.quota.elsewhere, two.quota.elsewhere) == (8, 8)

    asyncio.run(play(server.url, "m", story))
