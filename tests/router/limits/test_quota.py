"""Limits of one key, over arbitrary sequences of requests and times."""

from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.limits.quota import Limits, Quota, Rate, TokenBucket
from pdserve.router.limits.shared_quota import settle

STEPS = st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1), st.floats(0, 5), st.floats(0, 50)), max_size=40)


@given(amount=st.integers(1, 200), seconds=st.sampled_from([1.0, 60.0]), steps=STEPS)
def test_no_key_gets_more_tokens_than_its_rate(
    amount: int, seconds: float, steps: list[tuple[int, float, float, float]]
) -> None:
    """Each request takes the most it may use and returns the unused part when it ends."""
    quota, now, used, held = Quota(Limits(tokens=Rate(amount, seconds))), 0.0, 0, list[tuple[float, int, int]]()
    largest = 0
    for tokens, share, pause, duration in steps:
        now += pause
        for end, taken, used_tokens in [entry for entry in held if entry[0] <= now]:
            quota.give_back(1, taken - used_tokens, now)
            held.remove((end, taken, used_tokens))
        if quota.refusal(1, tokens, now) is None:
            quota.take(1, tokens, now)
            held.append((now + duration, tokens, int(tokens * share)))
            used += int(tokens * share)
            largest = max(largest, tokens - amount)  # a request for more than a full bucket overdraws it once
        assert used <= amount + amount / seconds * now + max(0, largest) + 1e-3
        assert quota.choices == len(held)


@given(amount=st.integers(1, 10**6), seconds=st.sampled_from([1.0, 60.0, 3600.0]), costs=st.lists(st.integers(1, 2000)))
def test_the_wait_is_exact(amount: int, seconds: float, costs: list[int]) -> None:
    bucket, now = TokenBucket(Rate(amount, seconds)), 0.0
    for cost in costs:
        wait = bucket.wait(cost, now)
        assert not wait or bucket.wait(cost, now + wait / 2)
        now += wait
        assert bucket.wait(cost, now) == 0.0
        bucket.take(cost, now)


def test_each_limit_refuses_with_its_code_and_retry_time() -> None:
    quota = Quota(Limits(requests=Rate(2, 60), tokens=Rate(100, 60), concurrency=3))
    quota.take(2, 60, now=0)
    for choices, tokens, now, kind, retry_after_s in [
        (4, 1, 1e9, "too_many_choices", None),
        (2, 1, 1e9, "rate_limit_concurrency", 1),
        (1, 100, 0.0, "rate_limit_tokens", 36),
        (1, 5000, 1e9, None, None),  # more than the bucket holds: admitted when it is full
    ]:
        refusal = quota.refusal(choices, tokens, now)
        assert (refusal and (refusal.kind, refusal.retry_after_s)) == (kind and (kind, retry_after_s))
    quota.take(1, 10, now=0)
    refusal = quota.refusal(0, 1, now=0)
    assert refusal is not None and refusal.kind == "rate_limit_requests" and refusal.retry_after_s == 30
    assert quota.headers(now=0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "42.000s",
    }


ACCOUNT: dict[str, Any] = {"choices": {}, "rates": {}}


@given(
    exchanges=st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["ok", "lost request", "lost answer"]))),
)
def test_the_account_is_charged_once_whatever_is_lost(exchanges: list[tuple[int, str]]) -> None:
    """Each exchange: what was taken before it, and what happened to it. Then one succeeds. Nothing refills."""
    rate, account = Rate(10**6, 1e30), deepcopy(ACCOUNT)
    quota, taken = Quota(Limits(tokens=rate)), 0
    for cost, happens in exchanges:
        quota.take(0, cost, 0.0)
        taken += cost
        assert not cost or quota.needs_sync
        report = quota.report()
        if happens == "lost request":
            quota.keep()
            continue
        answer = settle(account, "router", report, 0.0)
        if happens == "ok":
            quota.update(**answer, now=0.0)
        else:
            quota.keep()
    quota.update(**settle(account, "router", quota.report(), 0.0), now=0.0)
    assert account["rates"]["tokens"][0] == 10**6 - taken
    assert not quota.needs_sync


def test_an_account_that_was_lost_is_charged_only_with_what_it_was_not_told() -> None:
    quota = Quota(Limits(tokens=Rate(1000, 1e30)))
    quota.take(0, 600, 0.0)
    quota.update(**settle(deepcopy(ACCOUNT), "router", quota.report(), 0.0), now=0.0)
    quota.take(0, 100, 0.0)
    new_account = deepcopy(ACCOUNT)
    quota.update(**settle(new_account, "router", quota.report(), 0.0), now=0.0)
    assert new_account["rates"]["tokens"][0] == 900
