"""Who is let in, over any snapshot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.router.scheduling.policy import Candidate, Load, PlacementRequest
from pdserve.router.scheduling.slo_admission import MAX_RETRY_AFTER_S, check_slo
from pdserve.slo import Slo

MACHINE = Costs(prefill=(0.0, 1e-3, 0), decode=(0.01, 1e-3, 0), transfer=(0, 1e-3))
BOTH = Slo(ttft=1.0, itl=0.05)


def prefilling(tokens: int) -> Candidate:
    return Candidate("prefill", requests=1, prefills=1, prefill_tokens=tokens, costs=MACHINE)


def decoding(streams: int, token_bytes: int = 0, capacity_tokens: int = 10**6) -> Candidate:
    """Streams with 100 tokens left each; a byte takes a millisecond."""
    return Candidate(
        "decode",
        streams,
        output_tokens=100 * streams,
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
        ),  # 3.5 s, and 1 s is right
        (prefilling(900), decoding(10), PlacementRequest(500, cached={"prefill": 450}, output_tokens=9), None, 0),
        (prefilling(9 * 10**6), decoding(10), PlacementRequest(500), "slo_ttft", MAX_RETRY_AFTER_S),
        (prefilling(100), decoding(50), PlacementRequest(500, output_tokens=9), "slo_itl", 7),  # 61 ms for 100 tokens
        (
            prefilling(100),
            decoding(50),
            PlacementRequest(500, output_tokens=1),
            None,
            0,
        ),  # of one token, there are no gaps
        (
            prefilling(100),
            decoding(10, token_bytes=1),
            PlacementRequest(500, output_tokens=2),
            "slo_itl",
            28,
        ),  # its KV takes 0.5 s
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
        ),  # no room
    ],
)
def test_by_forecast(
    prefill: Candidate, decode: Candidate, asked: PlacementRequest, reason: str | None, retry_after_s: int
) -> None:
    refusal = check_slo(BOTH, prefill, decode, asked)
    assert (refusal and refusal.kind) == reason
    if refusal is not None:
        assert refusal.retry_after_s == retry_after_s and refusal.status == 429
        assert f"--slo says {BOTH.ttft if reason == 'slo_ttft' else BOTH.itl:.3g} s" in str(refusal)
    assert check_slo(Slo(), prefill, decode, asked) is None


def test_who_has_waited_in_the_router_has_less_time_left() -> None:
    idle, asked = Candidate("prefill", costs=MACHINE), PlacementRequest(500, output_tokens=9)
    for prefill, waited, late in [(prefilling(100), 0.3, False), (prefilling(100), 0.5, True), (idle, 9.0, False)]:
        assert (check_slo(BOTH, prefill, decoding(10), asked, waited) is not None) == late


def test_one_instance_that_does_both_waits_for_no_kv() -> None:
    both = Candidate("both", 10, output_tokens=1000, token_bytes=1, costs=MACHINE)
    assert check_slo(BOTH, both, both, PlacementRequest(500, output_tokens=2)) is None


LOADS = st.builds(Load, st.integers(1, 9), *[st.integers(0, 10_000)] * 3, st.integers(0, 9), st.integers(0, 10**6))
SLOS = st.builds(Slo, st.floats(1e-6, 10), st.floats(1e-6, 1))
ASKS = st.builds(PlacementRequest, st.integers(1, 10_000), output_tokens=st.integers(1, 1000))


@given(slo=SLOS, asked=ASKS, more=LOADS)
def test_the_idle_take_anything_and_more_load_never_lets_more_in(slo: Slo, asked: PlacementRequest, more: Load) -> None:
    prefill, decode = Candidate("prefill", costs=MACHINE), Candidate("decode", costs=MACHINE)
    assert check_slo(slo, prefill, decode, asked) is None, "there is no better time to come back"
    for candidate in (prefill, decode):
        candidate.replace_load(Load(0), more)
    refusal = check_slo(slo, prefill, decode, asked)
    for candidate in (prefill, decode):
        candidate.replace_load(Load(0), Load(1, 10, 10, 10, 1, 100))
    again = check_slo(slo, prefill, decode, asked)
    assert refusal is None or again is not None
    assert all(1 <= (one.retry_after_s or 0) <= MAX_RETRY_AFTER_S for one in (refusal, again) if one is not None)


def test_an_slo_is_read_from_text() -> None:
    assert Slo.parse("") == Slo()
    assert Slo.parse("ttft=500ms,itl=50ms") == Slo(0.5, 0.05)
    assert Slo.parse("itl = 0.5s") == Slo(itl=0.5)
    for wrong in (
        "ttft",
        "ttft=500",
        "ttft=0ms",
        "ttft=-1s",
        "tpot=1s",
        "ttft=1s,ttft=2s",
        "ttft=1s;itl=1s",
        "itl=1.2.3s",
    ):
        with pytest.raises(ValueError, match="no SLO; write"):
            Slo.parse(wrong)
