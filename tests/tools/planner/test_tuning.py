"""Settings of fleets as dimensions: how they are given, the search over them on made-up forecasts, and what it says."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.profile.profile import Profile, TransferModel
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.deploy import Common, env_lines
from pdserve.tools.planner.search import Trial, best, judge, smallest
from pdserve.tools.planner.settings import Dimension, dimensions
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.planner.tuning import ROUNDS, tune, tune_sizes
from pdserve.tools.simulator.fleet import Fleet, Forecast

TARGETS = parse_targets("ttft.p90=100ms")
CHUNK = Dimension("max_num_batched_tokens", (2048, 512, 1024))
POLICY = Dimension("policy", ("auto", "round_robin"))
ITL = Dimension("itl_target_ms", (None, 20.0))
PROFILE = Profile(model="m", transfers={"shm": TransferModel(), "redis": TransferModel()})


class Machine:
    """A simulation whose TTFT follows from a formula; remembers the fleets."""

    def __init__(self, ttft: Callable[[Fleet], float]) -> None:
        self.tried: list[Fleet] = []
        self._ttft = ttft

    def __call__(self, fleets: Sequence[Fleet]) -> Iterator[Trial]:
        for fleet in fleets:
            self.tried.append(fleet)
            figures = {"p90_ttft_ms": self._ttft(fleet), "failed": 0}
            yield judge(TARGETS, Forecast(fleet, figures, {}, 0, False, []))


def ttft(fleet: Fleet) -> float:
    """Three instances suffice with the best settings, four without; chunks of 512 help most, and then round robin."""
    chunk, policy = CHUNK.value(fleet), POLICY.value(fleet)
    factor = {2048: 1.0, 1024: 0.9, 512: 0.8}[chunk] * (0.85 if policy == "round_robin" and chunk == 512 else 1.0)
    return 390 / fleet.size * factor * (1.0 if fleet.prefill == 1 else 1.2)


def test_settings_of_a_fleet_are_its_flags() -> None:
    fleet = ITL.put(CHUNK.put(POLICY.put(Fleet(1, 1), "round_robin"), 512), 20.0)
    assert str(fleet) == "1P+1D --itl-target-ms 20 --max-num-batched-tokens 512 --policy round_robin"
    assert (CHUNK.label(fleet), ITL.label(fleet), ITL.label(Fleet(1, 1))) == ("512", "20", "off")
    assert CHUNK.put(POLICY.put(ITL.put(fleet, None), "auto"), 2048) == Fleet(1, 1)  # nothing but defaults
    assert [CHUNK.value(one) for one in CHUNK.variants(CHUNK.put(fleet, 1024))] == [1024, 2048, 512]


def test_one_setting_after_the_other_is_chosen_with_few_runs() -> None:
    machine = Machine(ttft)
    tuned = tune(list(machine([Fleet(1, 2)])), [POLICY, CHUNK], machine)
    assert dict(tuned.trial.fleet.settings) == {"max_num_batched_tokens": 512, "policy": "round_robin"}
    assert [round(one.ratio, 2) for one in tuned.worth[CHUNK]] == [0.88, 1.3, 1.17]  # 512 first: it was chosen
    assert len(machine.tried) <= 1 + ROUNDS * (2 + len(POLICY.values) + len(CHUNK.values))


def test_a_split_moves_by_one_instance() -> None:
    machine = Machine(lambda fleet: 100 + 10 * abs(fleet.prefill - 3))
    assert tune(list(machine([Fleet(1, 4)])), [], machine).trial.fleet == Fleet(3, 2)


def test_settings_may_save_an_instance() -> None:
    machine = Machine(ttft)
    found = smallest(8, [None], machine)
    assert best(found[-1]).fleet.size == 4
    trials, worth = tune_sizes(found, [POLICY, CHUNK], machine, may_shrink=True)
    chosen = best(trials[-1])
    assert chosen.meets and chosen.fleet.size == 3 and chosen.fleet.prefill == 1 and CHUNK.value(chosen.fleet) == 512
    assert list(worth) == [POLICY, CHUNK]
    fixed, _ = tune_sizes(found, [POLICY, CHUNK], machine, may_shrink=False)
    assert best(fixed[-1]).fleet.size == 4


def test_of_equal_fleets_the_one_with_the_fewest_flags_is_best() -> None:
    machine = Machine(lambda fleet: 90 if fleet.settings else 91)
    assert not best(machine(POLICY.variants(Fleet(1, 1)))).fleet.settings
    edge = Machine(lambda fleet: 99.5 if fleet.settings else 100.5)  # only one of them meets the SLO
    assert best(edge(POLICY.variants(Fleet(1, 1)))).fleet.settings


def test_dimensions_begin_with_the_plain_setting() -> None:
    config = PlanConfig(
        try_connector="all", try_policy="auto,prefix_aware", try_max_num_batched_tokens="512", connector="redis"
    )
    assert dimensions(config, PROFILE, [None]) == [
        Dimension("connector", ("redis", "shm")),
        Dimension("policy", ("auto", "prefix_aware")),
        Dimension("max_num_batched_tokens", (2048, 512)),
    ]
    local = dimensions(PlanConfig(try_local_prefill_tokens="0,256"), PROFILE, [None, 10.0])
    assert local == [Dimension("itl_target_ms", (None, 10.0)), Dimension("local_prefill_tokens", (None, 0, 256))]
    (elastic,) = dimensions(PlanConfig(), PROFILE, [None, 10.0], ttft_target=250.0)
    split, colocated = Fleet(2, 1), Fleet(both=3)
    assert elastic.variants(split) == [split, Fleet(2, 1, itl_target_ms=10.0, settings=(("ttft_target_ms", 250.0),))]
    assert elastic.variants(colocated) == [colocated, Fleet(both=3, itl_target_ms=10.0)]
    assert elastic.put(elastic.put(split, 10.0), None) == split
    (policies,) = dimensions(PlanConfig(try_policy="all"), PROFILE, [None])
    assert "session" not in policies.values and "least_loaded" in policies.values


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"try_connector": "nixl"}, "--try-connector: there is no 'nixl'; there are shm, redis"),
        ({"try_policy": "session"}, "--try-policy: there is no 'session'; there are auto"),
        ({"try_max_num_batched_tokens": "512,0"}, "--try-max-num-batched-tokens: '512,0' is not such as 512,2048"),
        ({"try_local_prefill_tokens": "off"}, "--try-local-prefill-tokens: 'off' is not such as auto,0,256"),
    ],
)
def test_malformed_values_are_named(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(SetupError) as caught:
        dimensions(PlanConfig(**settings), PROFILE, [None])
    assert str(caught.value).startswith(expected)


def test_lines_for_compose_have_the_flags_of_instances_and_routers() -> None:
    settings: tuple[tuple[str, Any], ...] = (("connector", "redis"), ("max_num_batched_tokens", 512))
    settings += (("policy", "least_loaded"), ("ttft_target_ms", 250.0))
    (trial,) = Machine(lambda fleet: 1)([Fleet(1, 1, itl_target_ms=20, settings=settings)])
    assert env_lines(trial, {"prefill": 1, "decode": 1, "both": 1}, Common(scheme="shm"))[4:] == [
        "ENGINE_FLAGS=--itl-target-ms 20 --max-num-batched-tokens 512",
        "ROUTER_FLAGS=--policy least_loaded --ttft-target-ms 250",
        "CONNECTOR=redis://redis:6379/0",
        "REDIS_MEMORY=8589934592",
    ]


def test_a_plan_compares_settings(tiny_profile: Path, pdserve: Callable[..., Any]) -> None:
    out = tiny_profile.parent / "plan.json"
    load = ["--num-prompts", 20, "--random-input-len", 900, "--random-output-len", 20, "--request-rate", 6, "--jobs", 1]
    settings = ["--try-connector", "all", "--try-policy", "auto,round_robin", "--connector", "redis"]
    arguments = ["plan", "--profile", tiny_profile, *load, "--slo", "tpot.p90=400ms", "--instances", 2, *settings]
    done = pdserve(*map(str, [*arguments, "--json", out]))
    assert done.returncode == 0 and "--policy" in done.stdout, done.stderr
    plan = json.loads(out.read_text())
    connectors = {row["value"]: row["worst_ratio"] for row in plan["settings"]["connector"]}
    assert set(connectors) == {"shm", "redis"} and set(plan["settings"]) == {"connector", "policy"}
