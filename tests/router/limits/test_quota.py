"""What one key may ask for, over any requests and any clock; and how keys are declared."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import SetupError
from pdserve.router.limits.key_file import declared
from pdserve.router.limits.quota import Bucket, Limits, Quota, Rate

STEPS = st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1), st.floats(0, 5), st.floats(0, 50)), max_size=40)


@given(amount=st.integers(1, 200), seconds=st.sampled_from([1.0, 60.0]), steps=STEPS)
def test_no_key_gets_more_tokens_than_its_rate(
    amount: int, seconds: float, steps: list[tuple[int, float, float, float]]
) -> None:
    """Requests take what they may need and give back what they did not, each when it ends."""
    quota, now, used, held = Quota(Limits(tokens=Rate(amount, seconds))), 0.0, 0, list[tuple[float, int, int]]()
    largest = 0
    for tokens, share, pause, duration in steps:
        now += pause
        for end, asked, needed in [one for one in held if one[0] <= now]:
            quota.give_back(1, asked - needed, now)
            held.remove((end, asked, needed))
        if quota.refusal(1, tokens, now) is None:
            quota.take(1, tokens, now)
            held.append((now + duration, tokens, int(tokens * share)))
            used += int(tokens * share)
            largest = max(largest, tokens - amount)  # who asks for more than a full bucket overdraws it, once
        assert used <= amount + amount / seconds * now + max(0, largest) + 1e-3
        assert quota.choices == len(held)


@given(amount=st.integers(1, 10**6), seconds=st.sampled_from([1.0, 60.0, 3600.0]), costs=st.lists(st.integers(1, 2000)))
def test_who_comes_back_in_time_is_let_in_and_not_before(amount: int, seconds: float, costs: list[int]) -> None:
    bucket, now = Bucket(Rate(amount, seconds)), 0.0
    for cost in costs:
        wait = bucket.wait(cost, now)
        assert not wait or bucket.wait(cost, now + wait / 2)
        now += wait
        assert bucket.wait(cost, now) == 0.0
        bucket.take(cost, now)


def test_each_limit_refuses_with_its_reason_and_a_time() -> None:
    quota = Quota(Limits(requests=Rate(2, 60), tokens=Rate(100, 60), concurrency=3))
    quota.take(2, 60, now=0)
    for choices, tokens, now, kind, retry_after_s in [
        (4, 1, 1e9, "too_many_choices", None),
        (2, 1, 1e9, "rate_limit_concurrency", 1),
        (1, 100, 0.0, "rate_limit_tokens", 36),
        (1, 5000, 1e9, None, None),  # more than there ever is: with all of it
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


def test_keys_of_a_setting_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[alice]\nkey = "one"\nweight = 2\nrequests = "10/s"\ntokens = "6000 / min"\nconcurrency = 8\n'
        f'[bob]\nkey = "sha256:{"ab" * 32}"\n'
    )
    first, second, alice, bob = declared("two,three", str(file))
    assert (first.name, second.name, first.weight, first.limits) == ("key-1", "key-2", 1.0, Limits())
    assert (alice.name, alice.weight) == ("alice", 2.0) and "digest" not in repr(alice)
    assert alice.limits == Limits(requests=Rate(10, 1.0), tokens=Rate(6000, 60.0), concurrency=8)
    assert bob.digest == b"\xab" * 32 and bob.limits == Limits()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "declares no key"),
        ("[alice\n", "cannot be read"),
        ("\xff", "cannot be read"),
        ('alice = "one"', r"\[alice\]: this must be a table"),
        ("[alice]", 'key = "…" is missing'),
        ('["a b"]\nkey = "one"', "a name has 1 to 64 characters"),
        ('[alice]\nkey = "one"\nlimit = 3', "limit is unknown; there are key, weight"),
        ('[alice]\nkey = "sha256:12"', "64 hexadecimal digits"),
        ('[alice]\nkey = "one"\nrequests = 10', "'10' is no rate; write such as 10/s"),
        ('[alice]\nkey = "one"\ntokens = "0/min"', "is no rate"),
        ('[alice]\nkey = "one"\nweight = 0', "weight must be"),
        ('[alice]\nkey = "one"\nweight = nan', "weight must be"),
        ('[alice]\nkey = "one"\nconcurrency = true', "concurrency must be"),
        ('[alice]\nkey = "one"\n[bob]\nkey = "one"', "two API keys have the same digest"),
        ('[key-1]\nkey = "one"', "two API keys have the same name"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1") if text == "\xff" else text.encode())
    with pytest.raises(SetupError, match=words) as told:
        declared("another", str(file))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(SetupError, match="--keys-file nowhere cannot be read"):
        declared("", "nowhere")
