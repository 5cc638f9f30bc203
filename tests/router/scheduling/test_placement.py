"""Placement of prompts on prefill or decode, by threshold and by forecast."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.router.scheduling.placement import place
from pdserve.router.scheduling.policy import NO_LOAD, Candidate, Load, PlacementRequest

MACHINE = Costs(prefill=(0.01, 1e-4, 1e-8), decode=(0.005, 1e-4, 1e-7), transfer=(0.02, 1e-9))


@given(tokens=st.integers(1, 500), cached=st.integers(0, 499), threshold=st.integers(0, 500))
def test_threshold_compares_uncached_tokens(tokens: int, cached: int, threshold: int) -> None:
    cached = min(cached, tokens - 1)
    busy = Candidate("decode", 30, 10_000, 10_000, 10_000)
    placement = place(
        Candidate("prefill"), busy, PlacementRequest(tokens, cached={"decode": cached, "prefill": 7}), threshold
    )
    assert placement.uncached_tokens == tokens - cached and placement.reason == "threshold"
    assert placement.way == ("decode" if tokens - cached <= threshold else "split")
    assert threshold or placement.way == "split", "a threshold of 0 always splits"


def test_forecast_keeps_short_prompts_on_decode() -> None:
    prefill = Candidate("prefill", costs=MACHINE)
    decode = Candidate("decode", costs=MACHINE, token_bytes=10_000)

    def way(tokens: int, **cached: int) -> str:
        placement = place(prefill, decode, PlacementRequest(tokens, cached=cached), None)
        assert placement.reason == "forecast"
        return placement.way

    assert way(10) == "decode", "faster than the transfer of its KV"
    assert way(1000) == "split"
    assert way(1000, decode=995) == "decode", "the next turn of a cached chat"
    assert way(1000, prefill=995) == "split"
    decode.replace_load(NO_LOAD, Load(30, context_tokens=30_000))
    assert way(10) == "split", "it would delay thirty sequences"
    prefill.replace_load(NO_LOAD, Load(0, prefills=1, prefill_tokens=20_000))
    assert way(10) == "decode", "the queue at prefill is longer than that delay"


@given(tokens=st.integers(1, 5000), streams=st.integers(0, 50), more=st.integers(1, 50))
def test_more_running_sequences_never_move_a_prompt_to_decode(tokens: int, streams: int, more: int) -> None:
    prefill = Candidate("prefill", costs=MACHINE)
    ways = []
    for requests in (streams, streams + more):
        decode = Candidate("decode", requests, context_tokens=100 * requests, costs=MACHINE, token_bytes=1000)
        ways.append(place(prefill, decode, PlacementRequest(tokens), None).way)
    assert ways != ["split", "decode"]
