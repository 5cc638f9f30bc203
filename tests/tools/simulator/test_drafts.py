"""Simulated speculation: drafts that are right as often as the settings say shorten answers, at the cost of their rows."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from pdserve.costs import Costs
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.load_config import FleetConfig, parse_acceptance
from pdserve.tools.simulator.simulation import Deployment, Simulation
from tests.tools.simulator.test_simulation import make_model

CHEAP = Costs(decode=(0.02, 1e-4, 0.0))  # a row costs a two-hundredth of a step
DEAR = Costs(decode=(1e-3, 0.02, 0.0))
TOKENS = 171  # ten steps of 17 behind the first one


def play(acceptance: Mapping[str, float], costs: Costs = CHEAP, keys: Sequence[str] = ("", "")) -> list[Sample]:
    """Return samples of requests that come one after the other to a prefill and a decode instance, one for each key."""
    model = make_model(
        decode_seconds=costs.step_seconds,
        step_seconds=lambda work: costs.step_seconds(len(work), sum(before + 1 for _, before in work)),
    )
    loads = [Load(i, TOKENS, ((f"own-{i}", 40),), at=30.0 * i, key=key) for i, key in enumerate(keys)]
    samples = Simulation(Deployment(), replace(model, acceptance=acceptance)).play(loads).samples
    assert all(sample.ok and sample.output_tokens == TOKENS for sample in samples)
    return samples


def tpot(samples: list[Sample]) -> float:
    return statistics.fmean(sample.tpot for sample in samples)


def test_without_drafts_nothing_changes() -> None:
    plain = play({})
    assert [sample.token_times for sample in play({"*": 0.0})] == [sample.token_times for sample in plain]
    assert [sample.token_times for sample in play({"*": 1.0}, DEAR)] == [
        sample.token_times for sample in play({}, DEAR)
    ]


def test_answers_come_as_fast_as_drafts_are_right() -> None:
    step = CHEAP.step_seconds(1, 0)
    ratios = [tpot(play({"*": share})) / step for share in (0.0, 0.5, 0.9, 1.0)]
    assert ratios[0] == pytest.approx(1, rel=0.02)
    assert ratios[3] == pytest.approx(CHEAP.step_seconds(17, 0) / step / 17, rel=0.05), "17 tokens a step"
    assert ratios[0] > 1.5 * ratios[1] > 2.5 * ratios[2] > 1.5 * ratios[3]
    assert len(play({"*": 1.0})[0].token_times) == 11, "the tokens of a step are one event, as clients measure them"


def test_each_class_of_traffic_has_its_own_share() -> None:
    edit, other = play({"edit": 1.0, "*": 0.0}, keys=("edit", "other"))
    assert tpot([edit]) < 0.3 * tpot([other])


@pytest.mark.parametrize("text", ["1.5", "a=b", "edit", "edit=0.5,-1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not such as 0\.7"):
        FleetConfig(acceptance=text)


def test_shares_are_read_by_key() -> None:
    assert parse_acceptance("") == {}
    assert parse_acceptance("0.7") == {"*": 0.7}
    assert parse_acceptance("edit=0.9,*=0.1") == {"edit": 0.9, "*": 0.1}
