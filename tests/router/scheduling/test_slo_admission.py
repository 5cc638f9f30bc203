"""SLO admission over arbitrary loads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.router.scheduling.policy import Candidate, Load, PlacementRequest, place
from pdserve.router.scheduling.slo_admission import MAX_RETRY_AFTER_S, check_slo
from pdserve.slo import Slo

MACHINE = Costs(prefill=(0.0, 1e-3, 0), decode=(0.01, 1e-3, 0), transfer=(0, 1e-3))
BOTH = Slo(ttft=1.0, itl=0.05)


def prefilling(tokens: int) -> Candidate:
    return Candidate("prefill", requests=1, prefills=1, prefill_tokens=tokens, costs=MACHINE)


def decoding(sequences: int, token_bytes: int = 0, capacity_tokens: int = 10**6) -> Candidate:
    """An instance whose running sequences have 100 tokens left each; the transfer of a byte takes a millisecond."""
    return Candidate(
        "decode",
        sequences,
        output_tokens=100 * sequences,
        costs=MACHINE,
        token_bytes=token_bytes,
        capacity_tokens=capacity_tokens,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "asked", "reason", "retry_after_s"),
    [
        (prefilling(100), decoding(10), PlacementRequest(500, output_tokens=9), None, 0),
        (
            prefilling(3000),
            decoding(10),
            PlacementRequest(500, output_tokens=9),
            "slo_ttft",
            3,
        ),  # forecast 3.5 s, target 1 s
        (prefilling(900), decoding(10), PlacementRequest(500, cached={"prefill": 450}, output_tokens=9), None, 0),
        (prefilling(9 * 10**6), decoding(10), PlacementRequest(500), "slo_ttft", MAX_RETRY_AFTER_S),
        (
            prefilling(100),
            decoding(50),
            PlacementRequest(500, output_tokens=9),
            "slo_itl",
            7,
        ),  # 61 ms per token, 100 tokens
        (
            prefilling(100),
            decoding(50),
            PlacementRequest(500, output_tokens=1),
            None,
            0,
        ),  # a single token has no ITL
        (
            prefilling(100),
            decoding(10, token_bytes=1),
            PlacementRequest(500, output_tokens=2),
            "slo_itl",
            28,
        ),  # the transfer of its KV takes 0.5 s
        (
            prefilling(100),
            decoding(10, token_bytes=1),
            PlacementRequest(500, cached={"decode": 490}, output_tokens=2),
            None,
            0,
        ),
        (
            prefilling(100),
            decoding(10, capacity_tokens=400),
            PlacementRequest(500, output_tokens=9),
            "slo_itl",
            26,
        ),  # no room in the pool
    ],
)
def test_forecasts_against_the_slo(
    prefill: Candidate, decode: Candidate, asked: PlacementRequest, reason: str | None, retry_after_s: int
) -> None:
    rejection = check_slo(BOTH, prefill, decode, asked)
    assert (rejection and rejection.kind) == reason
    if rejection is not None:
        assert rejection.retry_after_s == retry_after_s and rejection.status == 429
        assert f"exceeds the SLO of {BOTH.ttft if reason == 'slo_ttft' else BOTH.itl:.3g} s" in str(rejection)
    assert check_slo(Slo(), prefill, decode, asked) is None


def test_time_waited_in_the_router_counts() -> None:
    idle, asked = Candidate("prefill", costs=MACHINE), PlacementRequest(500, output_tokens=9)
    for prefill, waited, late in [(prefilling(100), 0.3, False), (prefilling(100), 0.5, True), (idle, 9.0, False)]:
        assert (check_slo(BOTH, prefill, decoding(10), asked, waited) is not None) == late


def test_prompts_that_wait_for_decode_in_the_pool_of_prefill_count() -> None:
    """Over `nixl://` they fill it, and the next prompt waits until decode has room for them."""
    asked, idle = PlacementRequest(500, output_tokens=9), prefilling(0)
    decode = replace(
        decoding(40, capacity_tokens=2000), context_tokens=3000
    )  # 1,000 tokens wait: 5 s until 1,500 more fit
    assert check_slo(Slo(ttft=1.0), idle, decode, asked) is None, "prefill has room"
    idle.free_tokens = 499
    refused = check_slo(Slo(ttft=1.0), idle, decode, asked)
    assert refused is not None and refused.kind == "slo_ttft" and "wait for room on decode" in str(refused)
    assert check_slo(Slo(ttft=1.0), idle, decoding(40), asked) is None, "decode has room, so it empties soon"
    full, other = place(idle, decode, asked, None, 1.0), place(prefilling(0), decode, asked, None, 1.0)
    assert full.there_seconds is not None and other.there_seconds is not None
    assert full.there_seconds > other.there_seconds + 1


def test_unsplit_request_needs_no_transfer() -> None:
    both = Candidate("both", 10, output_tokens=1000, token_bytes=1, costs=MACHINE)
    assert check_slo(BOTH, both, both, PlacementRequest(500, output_tokens=2)) is None


LOADS = st.builds(Load, st.integers(1, 9), *[st.integers(0, 10_000)] * 3, st.integers(0, 9), st.integers(0, 10**6))
SLOS = st.builds(Slo, st.floats(1e-6, 10), st.floats(1e-6, 1))
REQUESTS = st.builds(PlacementRequest, st.integers(1, 10_000), output_tokens=st.integers(1, 1000))


@given(slo=SLOS, asked=REQUESTS, more=LOADS)
def test_idle_instances_admit_and_more_load_never_admits_more(slo: Slo, asked: PlacementRequest, more: Load) -> None:
    prefill, decode = Candidate("prefill", costs=MACHINE), Candidate("decode", costs=MACHINE)
    assert check_slo(slo, prefill, decode, asked) is None, "a retry would not find less load"
    for candidate in (prefill, decode):
        candidate.replace_load(Load(0), more)
    rejection = check_slo(slo, prefill, decode, asked)
    for candidate in (prefill, decode):
        candidate.replace_load(Load(0), Load(1, 10, 10, 10, 1, 100))
    again = check_slo(slo, prefill, decode, asked)
    assert rejection is None or again is not None
    assert all(1 <= (one.retry_after_s or 0) <= MAX_RETRY_AFTER_S for one in (rejection, again) if one is not None)
