"""The routing policies: properties over arbitrary snapshots, and examples."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import POLICY_NAMES
from pdserve.costs import Costs
from pdserve.router.scheduling.policy import (
    EXPLANATIONS,
    MAX_EXPLAINED,
    POLICIES,
    WAIT_SPREAD_TOKENS,
    Candidate,
    Decision,
    Load,
    PlacementRequest,
    decide,
    forecast_itl,
    forecast_ttft,
    place,
)

TOKENS = st.integers(0, 10_000)
NAMES = st.text("abcdef-0123456789", min_size=1, max_size=8)


COEFFICIENT = st.floats(0, 1e-2)
COSTS = st.builds(
    Costs,
    prefill=st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT),
    decode=st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT),
    transfer=st.tuples(COEFFICIENT, COEFFICIENT),
)


@st.composite
def snapshots(draw: st.DrawFn, min_size: int = 1) -> list[Candidate]:
    names = draw(st.lists(NAMES, min_size=min_size, max_size=12, unique=True))
    small = st.integers(0, 3)  # small values produce ties
    costs = draw(COSTS)  # instances mostly have equal costs
    return [
        Candidate(
            name,
            requests=draw(small),
            prefill_tokens=draw(TOKENS | small),
            output_tokens=draw(TOKENS | small),
            context_tokens=draw(TOKENS),
            prefills=0,
            costs=draw(st.just(costs) | COSTS),
            is_both=draw(st.booleans()),
            capacity_tokens=draw(TOKENS),
        )
        for name in names
    ]


@st.composite
def placement_requests(draw: st.DrawFn) -> PlacementRequest:
    tokens = draw(st.integers(1, 10_000))
    cached = draw(st.dictionaries(NAMES, st.integers(0, tokens), max_size=8))
    session = draw(st.text(max_size=5))
    return PlacementRequest(
        tokens,
        draw(st.integers(0, 2**40)),
        session,
        cached,
        draw(st.integers(1, 99)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def chosen(decision: Decision, snapshot: list[Candidate]) -> Candidate:
    return next(c for c in snapshot if c.instance_id == decision.chosen)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data(), snapshot=snapshots(), request=placement_requests())
def test_choice_does_not_depend_on_the_order_of_candidates(
    policy: str, data: st.DataObject, snapshot: list[Candidate], request: PlacementRequest
) -> None:
    decision = decide(policy, snapshot, request)
    assert chosen(decision, snapshot) in snapshot
    assert decide(policy, data.draw(st.permutations(snapshot)), request) == decision


@pytest.mark.parametrize("policy", POLICIES)
@given(snapshot=snapshots(), request=placement_requests())
def test_decision_explains_the_choice(policy: str, snapshot: list[Candidate], request: PlacementRequest) -> None:
    decision = decide(policy, snapshot, request)
    best = decision.candidates[0]
    assert best.instance == decision.chosen and decision.why
    assert all(best.score <= other.score * (1.1 if policy == "auto" else 1) for other in decision.candidates)
    assert len(decision.candidates) <= MAX_EXPLAINED and decision.considered == len(snapshot)
    json.dumps(decision.as_dict(), allow_nan=False)


@given(snapshot=snapshots(), turn=st.integers(0, 2**40))
def test_round_robin_visits_all_before_it_repeats(snapshot: list[Candidate], turn: int) -> None:
    visited = Counter(
        decide("round_robin", snapshot, PlacementRequest(1, turn + i)).chosen for i in range(2 * len(snapshot))
    )
    assert set(visited.values()) == {2} and len(visited) == len(snapshot)


@given(snapshot=snapshots(), request=placement_requests())
def test_least_loaded_has_the_least_work(snapshot: list[Candidate], request: PlacementRequest) -> None:
    got = chosen(decide("least_loaded", snapshot, request), snapshot)
    assert got.work_tokens == min(c.work_tokens for c in snapshot)


@given(snapshot=snapshots(), turn=st.integers(0, 2**40))
def test_ties_are_broken_in_rotation(snapshot: list[Candidate], turn: int) -> None:
    for candidate in snapshot:
        candidate.requests, candidate.prefill_tokens, candidate.output_tokens = 1, 7, 7
    for policy in ("least_loaded", "prefix_aware"):
        visited = {decide(policy, snapshot, PlacementRequest(9, turn + i)).chosen for i in range(len(snapshot))}
        assert len(visited) == len(snapshot)


@given(snapshot=snapshots(min_size=2), request=placement_requests())
def test_power_of_two_is_never_the_worst(snapshot: list[Candidate], request: PlacementRequest) -> None:
    worst = max(snapshot, key=lambda c: c.work_tokens)
    worst.prefill_tokens += 1
    assert decide("power_of_two", snapshot, request).chosen != worst.instance_id


@given(snapshot=snapshots(), request=placement_requests(), stored=st.integers(0, 1000))
def test_what_the_store_has_never_makes_a_forecast_longer(
    snapshot: list[Candidate], request: PlacementRequest, stored: int
) -> None:
    better = request._replace(stored=min(stored, request.tokens))
    for candidate in snapshot:
        assert forecast_ttft(candidate, better) <= forecast_ttft(candidate, request)
        if better.stored <= request.cached_on(candidate):
            assert forecast_ttft(candidate, better) == forecast_ttft(candidate, request)


def test_power_of_two_draws_all_candidates() -> None:
    snapshot = [Candidate(f"p{i}") for i in range(8)]
    visited = Counter(decide("power_of_two", snapshot, PlacementRequest(1, turn)).chosen for turn in range(800))
    assert len(visited) == 8 and min(visited.values()) > 50


@given(snapshot=snapshots(min_size=2), request=placement_requests(), session=st.text(min_size=1))
def test_session_moves_only_if_its_instance_leaves_or_a_new_one_wins(
    snapshot: list[Candidate], request: PlacementRequest, session: str
) -> None:
    def place(candidates: list[Candidate], turn: int = 0) -> str:
        return decide("session", candidates, PlacementRequest(request.tokens, turn, session, request.cached)).chosen

    before = place(snapshot)
    assert place(snapshot, turn=1) == before
    for leaving in snapshot:
        rest = [c for c in snapshot if c is not leaving]
        assert place(rest) == before or leaving.instance_id == before
    assert place([*snapshot, Candidate("new")]) in (before, "new")


def test_sessions_spread_evenly() -> None:
    snapshot = [Candidate(f"p{i}") for i in range(4)]
    places = Counter(decide("session", snapshot, PlacementRequest(1, session=f"s{i}")).chosen for i in range(400))
    assert len(places) == 4 and min(places.values()) > 60


@given(snapshot=snapshots(), request=placement_requests())
def test_without_a_session_the_least_loaded_is_picked(snapshot: list[Candidate], request: PlacementRequest) -> None:
    decision = decide("session", snapshot, PlacementRequest(request.tokens, request.turn))
    assert decision.policy == "least_loaded" and decision.why.startswith("the request has no session")
    assert decision.chosen == decide("least_loaded", snapshot, PlacementRequest(request.tokens, request.turn)).chosen


@given(snapshot=snapshots(), request=placement_requests())
def test_prefix_aware_minimises_queued_plus_uncached_tokens(
    snapshot: list[Candidate], request: PlacementRequest
) -> None:
    got = chosen(decide("prefix_aware", snapshot, request), snapshot)
    for other in snapshot:
        assert got.work_tokens <= other.work_tokens or request.uncached(got) < request.uncached(other)
        wait = other.work_tokens + request.uncached(other)
        assert got.work_tokens + request.uncached(got) <= wait


def test_prefix_aware_prefers_the_cache_until_its_queue_is_longer() -> None:
    def pick(queued: int) -> str:
        snapshot = [Candidate("has-it", 1, prefill_tokens=queued), Candidate("idle")]
        return decide("prefix_aware", snapshot, PlacementRequest(1000, cached={"has-it": 800})).chosen

    assert pick(700) == "has-it" and pick(900) == "idle"


@given(loads=st.lists(st.tuples(TOKENS, TOKENS, TOKENS)))
def test_added_and_removed_loads_cancel_out(loads: list[tuple[int, int, int]]) -> None:
    candidate, nothing = Candidate("p0"), Load(requests=0)
    for tokens in loads:
        candidate.replace_load(nothing, Load(1, *tokens))
    assert candidate.requests == len(loads) and candidate.prefill_tokens == sum(tokens[0] for tokens in loads)
    for tokens in loads:
        candidate.replace_load(Load(1, *tokens), nothing)
    assert candidate.work_tokens == candidate.requests == candidate.context_tokens == 0


MACHINE = Costs(prefill=(0.01, 1e-4, 1e-8), decode=(0.005, 1e-4, 1e-7), transfer=(0.001, 1e-9))


def auto(*candidates: Candidate, tokens: int = 1000, **request: Any) -> tuple[str, Any]:
    """Return the instance that `auto` picks, and its forecast in seconds."""
    decision = decide("auto", candidates, PlacementRequest(tokens=tokens, **request))
    return decision.chosen, decision.candidates[0].score


def test_a_short_prompt_is_forecast_to_share_steps_with_the_longest_one() -> None:
    """It waits for the other prompts, and for as many tokens of the longest as it has itself; longer ones wait for all."""
    costs = Costs(prefill=(0.0, 0.001, 0.0), decode=(0.0, 0.0, 0.0))
    longest = Load(prefill_tokens=30_000, prefills=1)
    busy = Candidate("busy", requests=2, prefill_tokens=30_500, prefills=2, costs=costs, longest=longest)
    assert forecast_ttft(busy, PlacementRequest(tokens=100, turn=0)) == pytest.approx(0.5 + 0.1 + 0.1)
    assert forecast_ttft(busy, PlacementRequest(tokens=20_000, turn=0)) == pytest.approx(30.5 + 20)


def test_auto_picks_the_lowest_ttft_for_prefill() -> None:
    idle = Candidate("idle", costs=MACHINE)
    busy = Candidate("busy", requests=1, prefills=1, prefill_tokens=500, attended_tokens=125_000, costs=MACHINE)
    slow = Candidate("slow", costs=Costs(prefill=(0.05, 3e-4, 1e-8)))
    assert auto(idle, busy, slow) == ("idle", pytest.approx(0.01 + 0.1 + 0.005))
    assert auto(busy, slow) == ("busy", pytest.approx(0.01 + 0.05 + 0.00125 + 0.01 + 0.1 + 0.005))
    assert auto(idle, busy, cached={"busy": 800})[0] == "busy", (
        "the queue is shorter than the prefill of the uncached tokens"
    )
    assert auto(idle, busy, cached={"busy": 400})[0] == "idle"
    decoding = Candidate("decoding", requests=4, output_tokens=400, context_tokens=8000, is_both=True, costs=MACHINE)
    assert auto(decoding)[1] == pytest.approx(0.115 + 0.005 + 4e-4 + 8e-4), "the chunk shares a step with the decodes"


def test_auto_picks_the_lowest_itl_for_decode() -> None:
    few = Candidate("few", requests=2, output_tokens=100, context_tokens=100, token_bytes=1000, costs=MACHINE)
    long = Candidate("long", requests=1, output_tokens=50, context_tokens=90_000, token_bytes=1000, costs=MACHINE)
    seconds = 0.005 + 3e-4 + 1.1e-4 + 0.002 / WAIT_SPREAD_TOKENS
    assert auto(few, long, decode=True, output_tokens=500) == ("few", pytest.approx(seconds))
    assert auto(few, decode=True, output_tokens=500, cached={"few": 1000})[1] == pytest.approx(
        seconds - 0.002 / WAIT_SPREAD_TOKENS
    )
    full = replace(few, capacity_tokens=1000, output_tokens=1000)
    assert auto(full, long, decode=True, output_tokens=500)[0] == "long", "the pool has no room"


def test_auto_forecasts_the_wait_for_all_that_waits_for_room_on_decode() -> None:
    """Prompts whose KV waits in the store count: if three pools' worth must end before, the wait is three times as long."""
    costs = Costs(decode=(0.01, 0.0, 0.0))
    queues = [Candidate("a", 10, 0, 1000, 1000 * pools, costs=costs, capacity_tokens=1000) for pools in (0, 1, 3)]
    none, one, three = (auto(queue, decode=True, output_tokens=500, cached={"a": 1000})[1] - 0.01 for queue in queues)
    assert (none, one, three) == pytest.approx(
        (0, 100 * 0.01 / WAIT_SPREAD_TOKENS, 3 * 100 * 0.01 / WAIT_SPREAD_TOKENS)
    )


def test_auto_adds_the_ttft_of_instances_that_prefill_themselves() -> None:
    both = Candidate("both", is_both=True, costs=MACHINE)
    decode = Candidate("decode", requests=3, context_tokens=3000, costs=MACHINE)
    assert auto(both, decode, decode=True, output_tokens=100)[0] == "both", "prefill instances can compute the prompt"
    assert auto(both, decode, decode=True, output_tokens=100, prefills_itself=True)[0] == "decode"
    assert auto(both, decode, decode=True, output_tokens=100, prefills_itself=True, cached={"both": 990})[0] == "both"


@given(snapshot=snapshots(), request=placement_requests())
def test_more_load_never_lowers_a_forecast(snapshot: list[Candidate], request: PlacementRequest) -> None:
    for candidate in snapshot:
        (before,) = decide("auto", [candidate], request).candidates
        candidate.replace_load(Load(requests=0), Load(1, 10, 10, 10, 1, 50))
        (after,) = decide("auto", [candidate], request).candidates
        assert after.score >= before.score or candidate.capacity_tokens < candidate.context_tokens + request.tokens


def test_forecasts_within_the_tolerance_are_ties() -> None:
    def machine(factor: float) -> Costs:
        return Costs(prefill=(0.01 * factor, 1e-4 * factor, 0), decode=(0.005 * factor, 0, 0), transfer=(0, 0))

    slower, busy = Candidate("slower", costs=machine(1.09)), Candidate("busy", requests=1, costs=machine(1.0))
    slow = Candidate("slow", costs=machine(1.11))
    for decode in (False, True):
        assert auto(slower, busy, slow, decode=decode)[0] == "slower"
        assert auto(busy, slow, decode=decode)[0] == "busy"


def test_the_setting_lists_every_policy() -> None:
    assert tuple(POLICIES) == POLICY_NAMES and EXPLANATIONS.keys() == POLICIES.keys()


def test_of_layers_with_a_window_no_more_than_that_is_moved_or_kept() -> None:
    """A prompt of 4,096 tokens moves its KV of one layer, and of five others the last 512 tokens."""
    costs = Costs(transfer=(0, 1e-6), decode=(0.01, 0, 0), prefill=(0, 1e-3, 0))
    full = Candidate("decode", token_bytes=6, costs=costs, capacity_tokens=8192)
    windows = Candidate("decode", token_bytes=1, windows=((512, 5),), costs=costs, capacity_tokens=6 * 8192)
    long, short = (PlacementRequest(tokens, decode=True) for tokens in (4096, 300))
    moved = [forecast_itl(one, long) - 0.01 for one in (full, windows)]
    assert moved == pytest.approx([4096 * 6e-6, (4096 + 512 * 5) * 1e-6])
    assert forecast_itl(windows, short) == pytest.approx(forecast_itl(full, short))
    split = [place(Candidate("prefill", costs=costs), one, long, None).there_seconds for one in (full, windows)]
    assert split == pytest.approx([4.096 + seconds for seconds in moved])
    full, windows = (replace(one, requests=2, context_tokens=8192, output_tokens=10) for one in (full, windows))
    assert forecast_itl(full, long) > 0.01 + moved[0], "another must end before"
    assert forecast_itl(windows, long) == pytest.approx(0.01 + moved[1]), "the pool has room for more of them"
