"""Cells: their split, their share of the requests, and forecasts beside those of whole fleets."""

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel
from pdserve.tools.autoscaler import forecast
from pdserve.tools.autoscaler.cell import MAX_INSTANCES, MAX_SHARED, cell_share, make_cell
from pdserve.tools.autoscaler.change import Change
from pdserve.tools.autoscaler.command import make_controller
from pdserve.tools.autoscaler.forecast import Forecaster
from pdserve.tools.autoscaler.situation import Situation
from pdserve.tools.bench.requests import Request
from pdserve.tools.load_config import AutoscaleConfig
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.simulator.fleet import instance_model

PROFILE = Profile(
    model="slow",
    engine=EngineFacts(16, 16384, 2000, 2048, 16, 4096),
    step=StepModel(decode=((1, 0.6), (8, 0.8), (16, 1.6)), context_s=0.0, prefill=((1, 0.2), (1000, 2.0)), pair_s=0.0),
    transfers={"shm": TransferModel(2e-3, 5e8, 2e-3, 5e8, 1e9)},
)


def situation(prefill: int, decode: int, rate: float = 1.0, seed: int = 0, moved: int = 0) -> Situation:
    """Return one with conversations of up to four turns. `moved` instances of prefill have gone to decode."""
    random = Random(seed)
    members = {f"{role}-{n}": role for role, count in (("prefill", prefill), ("decode", decode)) for n in range(count)}
    moves = [(5.0, f"prefill-{n}", "decode") for n in range(moved)]
    at, loads = 0.0, list[Request]()
    while (at := at + random.expovariate(rate)) < 40:
        talk = random.randrange(int(15 * rate) + 1)
        blocks = (("system", 50), *((f"talk-{talk}-{turn}", 100) for turn in range(random.randrange(1, 5))))
        tokens = sum(size for _, size in blocks)
        loads.append(Request(len(loads), random.randrange(1, 9), blocks, input_tokens=tokens, at=at))
    received = [one for one in loads if one.at is not None and one.at < 20]
    waiting = frozenset(one.index for one in received[-3:])
    return Situation(0.0, 20.0, members, moves, received, waiting, loads[len(received) :], 40.0)


@given(st.integers(2, 60), st.integers(2, 60), st.integers(0, 20), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_cell_has_the_split_of_its_fleet_and_its_share_of_the_requests(
    prefill: int, decode: int, moved: int, seed: int
) -> None:
    whole = situation(prefill, decode, 4.0, seed, min(moved, prefill - 1))
    share = cell_share(whole.counts)
    cell, change = make_cell(whole, Change("decode", "prefill", 8))
    if share == 1.0:
        assert cell is whole and change is not None and change.count == 8
        return
    assert change is not None and change.count == max(1, round(8 * share))
    for role, count in whole.counts.items():
        assert abs(cell.counts[role] - share * count) < 2 and cell.counts[role] >= 1
    assert cell.counts.total() <= max(MAX_INSTANCES, round(share * whole.counts.total()))
    assert cell.names <= whole.names and set(cell.moves) <= set(whole.moves)
    kept = [*cell.received, *cell.expected]
    assert [one.index for one in kept] == list(range(len(kept)))
    assert all(one.at is not None and (one.at < 20) == (one.index < len(cell.received)) for one in kept)
    turns: dict[str, Counter[bool]] = defaultdict(Counter)
    times = {one.at for one in kept}
    loads = [*whole.received, *whole.expected]
    for one in loads:
        turns[one.blocks[1][0]][one.at in times] += 1
    whole_ones = [found for found in turns.values() if found.total() <= MAX_SHARED * len(loads)]
    assert all(len(found) == 1 for found in whole_ones), "a conversation is whole, or left out"
    tokens = [
        sum(one.input_tokens + one.output_tokens for one in part) for part in (kept, [*whole.received, *whole.expected])
    ]
    largest = max(found.total() for found in turns.values())
    share = len(cell.names) / len(whole.names)  # exactly
    assert share * tokens[1] - 1 <= tokens[0] <= share * tokens[1] + 458 * largest, "up to the last conversation"
    times_waiting = {one.at for one in whole.received if one.index in whole.waiting}
    assert {kept[index].at for index in cell.waiting} == times_waiting & times


def test_forecasts_of_cells_are_those_of_whole_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoscaleConfig(slo="ttft.p90=4s,itl.p99=2.5s", local_prefill_tokens=0)
    _, deployment = make_controller(config, PROFILE, can_start=False)
    forecaster = Forecaster(deployment, instance_model(config, PROFILE), parse_targets(config.slo), 0)
    whole = situation(20, 12, 9.0)

    def ratings() -> list[float]:
        changes = (None, Change("prefill", "decode", 8))
        return [forecaster.forecast(whole, change).attainment for change in changes]

    of_cells = ratings()
    monkeypatch.setattr(forecast, "make_cell", lambda situation, change: (situation, change))
    of_fleets = ratings()
    assert of_cells == pytest.approx(of_fleets, abs=0.1)
    assert replace(whole) == whole and (of_cells[0] > of_cells[1]) == (of_fleets[0] > of_fleets[1])


def test_a_start_helps_only_if_it_is_ready_in_time() -> None:
    """The instance is forecast to be as slow to start as the last one was, if the profile promises more."""
    config = AutoscaleConfig(slo="ttft.p90=4s", local_prefill_tokens=0)
    _, fleet = make_controller(config, PROFILE, can_start=True)
    model = replace(instance_model(config, PROFILE), start_up_s=1.0)
    forecaster = Forecaster(fleet, model, parse_targets("ttft.p90=4s"), seed=0)
    busy = situation(1, 1, rate=3.0)
    without, soon, late = (
        forecaster.forecast(replace(busy, start_up_s=seconds), change)
        for seconds, change in ((0.0, None), (0.5, Change("", "prefill")), (3600.0, Change("", "prefill")))
    )
    assert soon.ratio < 0.8 * without.ratio and late.ratio == without.ratio
