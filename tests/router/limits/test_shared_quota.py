"""Limits shared by several routers, with accounts in a real Redis. Rates are per hour, so buckets hardly refill in a test."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from pdserve.control import registry
from pdserve.control.registry import Registry
from pdserve.router.limits import shared_quota
from pdserve.router.limits.quota import Limits, Quota, Rate
from pdserve.router.limits.shared_quota import RedisAccounts, SharedQuotas

LIMITS = Limits(requests=Rate(10, 3600), tokens=Rate(1000, 3600), concurrency=8)


class Router:
    """A router reduced to the quota of one key."""

    def __init__(self, url: str, model: str, name: str) -> None:
        self.quota, self.failures = Quota(LIMITS), 0
        self.registry = Registry(url, model, "", self._failed)
        quotas = {"alice": self.quota, "bob": Quota(Limits())}
        self.sync = SharedQuotas(RedisAccounts(self.registry), name, quotas).sync

    def _failed(self) -> None:
        self.failures += 1

    def admit(self, choices: int = 1, tokens: int = 1) -> str:
        """Charge a request; return the code of the refusal, or an empty string if it is admitted."""
        now = time.monotonic()
        refusal = self.quota.refusal(choices, tokens, now)
        if refusal is None:
            self.quota.take(choices, tokens, now)
        return refusal.kind if refusal else ""

    def end(self, choices: int = 1, unused: int = 0) -> None:
        self.quota.give_back(choices, unused, time.monotonic())

    def missing(self) -> int:
        """Return how many requests must refill before the next is admitted, at six minutes each."""
        refusal = self.quota.refusal(1, 1, time.monotonic())
        return round(((refusal and refusal.retry_after_s) or 0) / 360)


Scenario = Callable[[list[Router]], Awaitable[None]]


async def play(url: str, model: object, scenario: Scenario) -> None:
    """Run a scenario with three routers."""
    routers = [Router(url, str(model), f"router-{i}") for i in range(3)]
    async with asyncio.timeout(600):
        await scenario(routers)
    for router in routers:
        await router.registry.close()


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Setter of the lease of a router's choices, in seconds; long enough never to expire unless a test sets it.

    Redis may take as long as it likes to answer."""
    monkeypatch.setattr(registry, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(shared_quota, "LEASE_S", 1000.0)
    return lambda seconds: monkeypatch.setattr(shared_quota, "LEASE_S", seconds)


@pytest.fixture
def on_redis(redis_server: Any, tmp_path: Any) -> Callable[[Scenario], None]:
    """Runner of scenarios, under a model name that only this test uses."""
    return lambda scenario: asyncio.run(play(redis_server.url, tmp_path, scenario))


def test_admissions_count_on_all_routers(on_redis: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(routers: list[Router]) -> None:
        one, two, _ = routers
        for _ in range(6):
            assert not one.admit()
            one.end()
        await one.sync()
        assert not two.admit(), "it has not synchronised yet"
        two.end()
        await two.sync()
        assert [two.admit() for _ in range(4)] == ["", "", "", "rate_limit_requests"]
        assert [one.admit() for _ in range(5)] == ["", "", "", "", "rate_limit_requests"], "it has not seen these"
        for router in (two, one, two):
            await router.sync()
        assert one.missing() == two.missing() == 5, "14 of 10 were admitted: a debt of 4, and one for the next"
        reported, report = asyncio.Event(), one.quota.report

        def report_once() -> dict[str, object]:
            reported.set()
            return report()

        monkeypatch.setattr(one.quota, "report", report_once)
        syncing = asyncio.create_task(one.sync())
        await reported.wait()  # it has reported and has no answer yet
        one.quota.take(0, 1, time.monotonic())
        await syncing
        assert one.missing() == 6

    on_redis(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_no_interleaving_admits_more_than_one_bucket_per_router(
    seed: int, on_redis: Callable[[Scenario], None]
) -> None:
    async def scenario(routers: list[Router]) -> None:
        random, admitted = Random(seed), 0
        for _ in range(200):
            router = random.choice(routers)
            if random.random() < 0.3:
                await router.sync()
            elif not router.admit():
                router.end()
                admitted += 1
        assert 10 <= admitted <= 3 * 10
        for router in 2 * routers:
            router.missing()
            await router.sync()
        assert {router.missing() for router in routers} == {admitted - 9}

    on_redis(scenario)


def test_unused_tokens_return_to_all_routers(on_redis: Callable[[Scenario], None]) -> None:
    async def scenario(routers: list[Router]) -> None:
        one, two, _ = routers
        assert not one.admit(tokens=1000)
        await one.sync()
        two.missing()
        await two.sync()
        assert two.admit(tokens=500) == "rate_limit_tokens"
        one.end(unused=900)
        await one.sync()
        await two.sync()
        assert two.admit(tokens=950) == "rate_limit_tokens" and not two.admit(tokens=900)

    on_redis(scenario)


def test_choices_of_a_router_count_while_its_lease_lasts(
    on_redis: Callable[[Scenario], None], lease: Callable[[float], None]
) -> None:
    async def scenario(routers: list[Router]) -> None:
        one, two, three = routers
        assert not one.admit(choices=6) and not two.admit(choices=2)
        for router in routers:
            router.missing()
            await router.sync()
        assert three.admit() == "rate_limit_concurrency"
        one.end(choices=5)
        await one.sync()
        await three.sync()
        assert three.admit(choices=6) == "rate_limit_concurrency" and not three.admit(choices=5)
        three.end(choices=5)
        lease(0.02)
        await one.sync()  # its last exchange
        while three.admit(choices=6):
            await three.sync()
        assert three.quota.remote_choices == 2

    on_redis(scenario)


def test_without_redis_each_router_counts_for_itself(start_redis: Callable[..., Any]) -> None:
    server = start_redis()

    async def scenario(routers: list[Router]) -> None:
        one, two, three = routers
        assert not one.admit(choices=8)
        for router in (one, two):
            router.missing()
            await router.sync()
        assert two.admit() == "rate_limit_concurrency" and not three.quota.needs_sync
        server.kill()
        for router in routers:
            await router.sync()
        assert [router.failures for router in routers] == [1, 1, 0], "a router without use does not synchronise"
        assert not two.admit(choices=8)
        server.start()
        for router in (one, two, one):
            await router.sync()
        assert (one.quota.remote_choices, two.quota.remote_choices) == (8, 8)

    asyncio.run(play(server.url, "m", scenario))


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_use_in_a_failed_exchange_is_charged_once(
    on_redis: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    async def scenario(routers: list[Router]) -> None:
        one, two, _ = routers
        change = one.registry.change

        async def fail(*arguments: Any) -> bool:
            if lost == "answer":
                await change(*arguments)
            return False

        for _ in range(4):
            assert not one.admit(tokens=150)
            one.end()
            monkeypatch.setattr(one.registry, "change", fail)
            await one.sync()
            monkeypatch.setattr(one.registry, "change", change)
            assert one.quota.needs_sync
            await one.sync()
        assert one.admit(tokens=401) == "rate_limit_tokens" and not one.admit(tokens=400)
        one.end(unused=400)
        for router in (one, two):
            router.missing()
            await router.sync()
        assert two.admit(tokens=401) == "rate_limit_tokens" and not two.admit(tokens=400)

    on_redis(scenario)


def test_exchanges_at_the_same_time_are_all_charged(on_redis: Callable[[Scenario], None]) -> None:
    async def scenario(routers: list[Router]) -> None:
        for _ in range(10):
            for router in routers:
                router.quota.take(0, 10, time.monotonic())
            await asyncio.gather(*(router.sync() for router in routers))
        for router in routers:
            router.missing()
            await router.sync()
            assert router.admit(tokens=701) == "rate_limit_requests" and router.missing() == 21, "30 of 10, and one"

    on_redis(scenario)
