"""Placement of prompts on prefill or decode, by threshold and by forecast."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.router.scheduling.policy import NO_LOAD, Candidate, Load, PlacementRequest, forecast_ttft, place

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


def test_with_an_itl_target_decode_takes_prompts_that_would_wait() -> None:
    prefill = Candidate("prefill", costs=MACHINE, itl_target=0.05, block_size=16)
    without_target = Candidate("decode", 5, context_tokens=2000, costs=MACHINE, token_bytes=1000)
    decode = replace(without_target, itl_target=0.05, block_size=16)
    request = PlacementRequest(1000, output_tokens=100)
    assert place(prefill, decode, request, None, 0.2).way == "split", "prefill is idle"
    prefill.replace_load(NO_LOAD, Load(1, 3000, prefills=1))
    placement = place(prefill, decode, request, None, 0.2)
    assert (placement.way, placement.reason) == ("decode", "backlog")
    long = request._replace(output_tokens=10_000)
    assert place(prefill, decode, long, None, 0.2).way == "split", "decode is what such requests wait for"
    assert place(prefill, decode, long._replace(mean_answer=100), None, 0.2).way == "decode", "few answers are so long"
    assert place(prefill, decode, long, None, 0.2, 0.01).way == "decode", "there are 100 decode instances"
    assert placement.here_seconds is not None and placement.there_seconds is not None
    assert 0.11 < placement.here_seconds < placement.there_seconds, "prompts get a part of each step"
    assert place(prefill, decode, request, None, 1.0).way == "split", "it meets the target by way of prefill"
    assert place(prefill, decode, request, None).way == "split", "there is no target"
    assert place(prefill, without_target, request, None, 0.2).way == "split", "it would delay five sequences"
    decode.replace_load(NO_LOAD, Load(1, 9000, prefills=1))
    assert place(prefill, decode, request, None, 0.2).way == "split", "decode has even more prompts"


def test_an_idle_prefill_instance_keeps_a_request_that_decode_would_serve_more_slowly() -> None:
    prefill = Candidate("prefill", costs=MACHINE, itl_target=0.015)
    decode = Candidate("decode", 60, context_tokens=60_000, costs=MACHINE, token_bytes=1000, itl_target=0.015)
    request = PlacementRequest(1000, output_tokens=100)
    placement = place(prefill, decode, request, None, 1.0)
    assert (placement.way, placement.reason) == ("prefill", "idle")
    assert place(prefill, decode, request, None, 0.2).way == "split", "prefill has no time to spare"
    assert place(prefill, decode, request, None).way == "split", "there is no target"

    def way(itl_target: float) -> str:
        one, other = replace(prefill, itl_target=itl_target), replace(decode, itl_target=itl_target)
        return place(one, other, request, None, 1.0).way

    assert way(0.05) == "split", "decode meets the ITL target"
    decode.replace_load(NO_LOAD, Load(-56, context_tokens=-56_000))
    assert way(0.004) == "split", "decode is nearly as fast"
    decode.replace_load(NO_LOAD, Load(56, context_tokens=56_000))
    assert place(replace(prefill, itl_target=math.inf), decode, request, None, 1.0).way == "split", (
        "prompts would stall it"
    )
    prefill.replace_load(NO_LOAD, Load(1, 100, prefills=1))
    assert place(prefill, decode, request, None, 1.0).way == "split", "another prompt is there"


@given(step=st.floats(0.001, 0.2), target=st.floats(0.001, 0.2), tokens=st.integers(1, 5000))
def test_an_itl_target_never_makes_prompts_faster(step: float, target: float, tokens: int) -> None:
    costs = replace(MACHINE, decode=(step, 0.0, 0.0))
    free = Candidate("decode", 3, context_tokens=300, costs=costs)
    bound = replace(free, itl_target=target, block_size=16)
    request = PlacementRequest(tokens)
    assert (
        forecast_ttft(bound, request)
        >= forecast_ttft(free, request)
        > forecast_ttft(replace(free, requests=0), request)
    )


@given(tokens=st.integers(1, 5000), streams=st.integers(0, 50), more=st.integers(1, 50))
def test_more_running_sequences_never_move_a_prompt_to_decode(tokens: int, streams: int, more: int) -> None:
    prefill = Candidate("prefill", costs=MACHINE)
    ways = []
    for requests in (streams, streams + more):
        decode = Candidate("decode", requests, context_tokens=100 * requests, costs=MACHINE, token_bytes=1000)
        ways.append(place(prefill, decode, PlacementRequest(tokens), None).way)
    assert ways != ["split", "decode"]
