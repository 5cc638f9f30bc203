"""Limits shared by several routers through a file. Rates are per hour, so buckets hardly refill in a test."""

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from pdserve.errors import SetupError
from pdserve.router.limits.quota import Limits, Quota, Rate
from pdserve.router.limits.shared_quota import FileAccounts, SharedQuotas

LIMITS = Limits(requests=Rate(10, 3600), tokens=Rate(1000, 3600), concurrency=8)
HOLD = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX); print(flush=True); input()"


class Router:
    """A router reduced to the quota of one key."""

    def __init__(self, path: Path, name: str) -> None:
        self.quota = Quota(LIMITS)
        self.now = 0.0
        accounts, quotas = FileAccounts(str(path), self.clock), {"alice": self.quota, "bob": Quota(Limits())}
        self.shared = SharedQuotas(accounts, name, quotas, self.clock)

    def clock(self) -> float:
        return self.now

    def admit(self, now: float = 0.0, choices: int = 1, tokens: int = 1) -> str:
        """Charge a request; return the code of the refusal, or an empty string if it is admitted."""
        refusal = self.quota.refusal(choices, tokens, now)
        if refusal is None:
            self.quota.take(choices, tokens, now)
        return refusal.kind if refusal else ""

    def sync(self, now: float = 0.0) -> None:
        self.quota.refusal(1, 1, now)  # an idle router does not synchronise
        self.now = now
        asyncio.run(self.shared.sync())


@pytest.fixture
def routers(tmp_path: Path) -> list[Router]:
    return [Router(tmp_path / "accounts", f"router-{i}") for i in range(2)]


def test_admissions_count_on_all_routers(routers: list[Router]) -> None:
    one, two = routers
    for _ in range(6):
        assert not one.admit()
        one.quota.give_back(1, 0, 0.0)
    one.sync()
    two.sync()
    assert [two.admit() for _ in range(5)] == ["", "", "", "", "rate_limit_requests"]
    two.sync()
    one.sync()
    assert one.admit() == "rate_limit_requests"
    one.sync(now=360.0)
    two.sync(now=360.0)
    assert not one.admit(now=360.0), "one of ten per hour is back"
    one.sync(now=360.0)
    two.sync(now=360.0)
    assert two.admit(now=360.0) == "rate_limit_requests"


def test_choices_of_a_router_count_until_it_falls_silent(routers: list[Router]) -> None:
    one, two = routers
    assert not one.admit(choices=6)
    one.sync()
    two.sync()
    assert two.admit(choices=3) == "rate_limit_concurrency"
    two.sync(now=100.0)
    assert not two.admit(now=100.0, choices=8), "the first router was killed"


@pytest.mark.parametrize("seed", range(5))
def test_no_interleaving_admits_more_than_one_bucket_per_router(routers: list[Router], seed: int) -> None:
    random, admitted = Random(seed), 0
    for _ in range(200):
        router = random.choice(routers)
        if random.random() < 0.3:
            router.sync()
        elif not router.admit():
            router.quota.give_back(1, 0, 0.0)
            admitted += 1
    assert 10 <= admitted <= 2 * 10
    for router in 2 * routers:
        router.sync()
    assert {router.admit(now=360.0 * (admitted - 10)) for router in routers} == {"rate_limit_requests"}, (
        "what was admitted twice is made up for"
    )


def test_an_exchange_does_not_wait_for_another_router(routers: list[Router], tmp_path: Path) -> None:
    one, two = routers
    one.sync()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "accounts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stopped:
        assert stopped.stdout is not None
        stopped.stdout.readline()
        for _ in range(6):
            assert not one.admit(tokens=100)
            one.quota.give_back(1, 0, 0.0)
        one.sync()
        stopped.communicate(b"\n")
    one.sync()
    two.sync()
    assert two.admit(tokens=500) == "rate_limit_tokens", "the report was kept for the next exchange"


@pytest.mark.parametrize("content", ['{"alice": {"cho', "[1]", "[" * 100_000])
def test_a_damaged_file_starts_anew(
    routers: list[Router], tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    one, two = routers
    assert not one.admit()
    one.sync()
    (tmp_path / "accounts").write_text(content)
    two.sync()
    assert "they start anew" in caplog.text and not two.admit(choices=8)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--quota-file .*: No such file or directory"):
        FileAccounts(str(tmp_path / "nowhere" / "accounts"))
