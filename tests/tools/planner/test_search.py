"""Planner: targets, the search over fleets, and what it says, on made-up forecasts; and the command on a tiny profile."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.profile.profile import EngineFacts, Overheads, Profile, TransferModel
from pdserve.tools.bench.requests import Request
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.advice import advise, trade
from pdserve.tools.planner.deploy import Common, env_lines
from pdserve.tools.planner.plan import Planner
from pdserve.tools.planner.search import (
    NOISE,
    VERIFIED,
    Trial,
    best,
    best_in_mean,
    close_to_best,
    headroom,
    judge,
    smallest,
    try_size,
)
from pdserve.tools.planner.targets import FAILED, Target, parse_targets, thin_sentences
from pdserve.tools.simulator.fleet import Fleet, Forecast, draw_requests, mean_rate, simulate

Run = Callable[..., Any]
TARGETS = parse_targets("ttft.p90=500ms,itl.p99=0.05s")
ONE_EACH = {"prefill": 1, "decode": 1, "both": 1}


def make_forecast(fleet: Fleet, ttft_ms: float, itl_ms: float, failed: int = 0, rate: float = 5.0) -> Forecast:
    figures = {"p50_ttft_ms": ttft_ms, "p90_ttft_ms": ttft_ms, "p99_itl_ms": itl_ms, "failed": failed}
    figures["request_throughput"] = rate
    figures |= {"completed": 100 - failed, "total_output_tokens": 5000}
    return Forecast(fleet, figures, {}, 0, False, [])


def machine(
    tried: list[Fleet], prompts: float, streams: float, colocated: float = 1.5
) -> Callable[..., Iterator[Trial]]:
    """Return a simulation in which `prompts` prefill and `streams` decode instances just meet the SLO, and a colocated
    fleet needs `colocated` times their sum."""

    def simulate(fleets: Sequence[Fleet]) -> Iterator[Trial]:
        for fleet in fleets:
            tried.append(fleet)
            if fleet.both:
                ratio = colocated * (prompts + streams) / fleet.both
                yield judge(TARGETS, make_forecast(fleet, 400, 50 * ratio))
            else:
                yield judge(TARGETS, make_forecast(fleet, 500 * prompts / fleet.prefill, 50 * streams / fleet.decode))

    return simulate


def test_targets_are_parsed_with_their_units() -> None:
    assert [Target("ttft", 90, 0.5), Target("itl", 99, 0.05)] == TARGETS
    assert parse_targets("tpot=30ms") == [Target("tpot", 99, 0.03)]


@pytest.mark.parametrize(
    "text", ["", "ttft.p90", "ttft.p42=1s", "speed=1s", "ttft=0ms", "ttft=-1s", "ttft=1s,ttft.p99=2s"]
)
def test_malformed_targets_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="write such as ttft"):
        parse_targets(text)


def test_a_fleet_that_loses_requests_never_meets_the_slo() -> None:
    trials = [judge(TARGETS, make_forecast(Fleet(1, 1), 10, 1, failed=failed)) for failed in (10, 1)]
    assert not any(trial.meets for trial in trials) and best(trials) is trials[1]
    assert trials[1].ratio >= FAILED and trials[1].failure == "refuses or loses 1 requests"


@pytest.mark.parametrize(
    ("busy", "cause"),
    [
        ({"prefill": 0.99, "decode": 0.1}, "prefill is busy 99%"),
        ({"prefill": 0.95, "router": 0.97}, "the router is busy 97%"),
        ({"prefill": 0.5, "router": 0.2, "link": 1.0}, "the link to the KV store is busy 100%"),
        ({"prefill": 0.5, "decode": 0.8, "router": 0.2, "link": 0.8}, ""),  # more requests arrive
    ],
)
def test_a_saturated_fleet_never_meets_the_slo(busy: dict[str, float], cause: str) -> None:
    trial = judge(TARGETS, replace(make_forecast(Fleet(1, 1), 10, 1), saturated=True, busy=busy))
    assert trial.meets is (not cause) is (not trial.failure)
    if cause:
        advice = advise([trial, judge(TARGETS, make_forecast(Fleet(both=2), 1, 1))], TARGETS)
        assert f"the best split, 1P+1D does not keep up: {cause} of the time" in advice


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"overheads": Overheads(router_request_s=0.1)}, "the router is busy"),
        ({"overheads": Overheads(router_token_s=8e-3)}, "the router is busy"),
        ({"transfers": {"shm": TransferModel(1e-3, 1e7, 1e-3, 1e7, 1e7)}}, "the link to the KV store is busy"),
        ({"transfers": {"shm": TransferModel(1e-3, 4e6, 1e-3, 4e6, 1e9)}}, "the link to the KV store is busy"),
        ({}, ""),
    ],
)
def test_a_router_or_a_link_that_does_not_keep_up_is_named(changes: dict[str, Any], cause: str) -> None:
    """Prompts are 24 MB per second, and instances have two streams each."""
    lengths: dict[str, Any] = {"random_input_len": 400, "random_output_len": 20, "local_prefill_tokens": 0}
    transfers = {"shm": TransferModel(1e-3, 1e9, 1e-3, 1e9, 2e9)}
    profile = Profile(model="m", engine=EngineFacts(16, 1 << 16, 1000, max_model_len=4096), transfers=transfers)
    forecast = simulate(PlanConfig(num_prompts=120, **lengths), replace(profile, **changes), {}, Fleet(2, 2), 15)
    trial = judge(parse_targets("ttft.p50=100s"), forecast)
    assert trial.meets is (not cause), (forecast.saturated, forecast.busy)
    assert trial.failure.startswith(f"does not keep up: {cause}" if cause else ""), trial.failure


def test_the_first_requests_warm_the_fleet_up_and_do_not_count(profile: Path) -> None:
    loaded = Profile.load(profile)
    load: dict[str, Any] = {"num_prompts": 60, "random_input_len": 400, "random_output_len": 100}
    whole, warm = (simulate(PlanConfig(**load, warmup_requests=n), loaded, {}, Fleet(both=1), 8.0) for n in (0, 20))
    assert [one.index for one in sorted(whole.samples, key=lambda one: one.index)][20:] == sorted(
        one.index for one in warm.samples
    )
    assert warm.figures["completed"] == 40 and warm.figures["mean_itl_ms"] > whole.figures["mean_itl_ms"]
    late = [one.ttft * 1e3 for one in whole.samples if one.index >= 20]
    assert warm.figures["mean_ttft_ms"] == pytest.approx(sum(late) / 40)
    assert 0.9 < whole.busy["both"] <= warm.busy["both"] <= 1


def test_percentiles_of_few_values_are_named() -> None:
    targets = parse_targets("ttft.p99=1s,ttft.p50=1s,e2el.p90=9s,itl=1s")
    assert thin_sentences(dict(zip(targets, (20, 20, 20, 0), strict=True))) == [
        "TTFT p99 rests on the slowest 1 of 20 requests: it varies by chance with fewer than 500.",
        "E2E latency p90 rests on the slowest 2 of 20 requests: it varies by chance with fewer than 50.",
        "ITL p99 says nothing: there are no gaps.",
    ]


def test_fleets_that_are_close_are_compared_in_the_mean_over_seeds() -> None:
    lucky, steady, far = (
        replace(trial(Fleet(1, n), 1, 1), ratio=ratio) for n, ratio in ((1, 0.80), (2, 0.83), (3, 0.9))
    )
    close = close_to_best([far, steady, lucky])
    assert close == [lucky, steady]
    others = [[replace(lucky, ratio=ratio), steady] for ratio in (0.9, 1.0)]
    assert best_in_mean([close, *others]) is steady
    assert best_in_mean([close]) is lucky
    assert close_to_best([lucky, far]) == [lucky]
    edge = replace(steady, ratio=1.01)
    assert close_to_best([edge, replace(lucky, ratio=0.99)])[1:] == [], "only one of them meets the SLO"


@pytest.mark.parametrize(("prompts", "streams", "size"), [(1, 1, 2), (3, 2, 5), (2, 5, 7), (1, 12, 13), (9, 7, 16)])
def test_the_smallest_fleet_is_found_with_few_trials(prompts: int, streams: int, size: int) -> None:
    tried: list[Fleet] = []
    trials = smallest(16, [None], machine(tried, prompts, streams))
    chosen = best(trials[-1])
    assert chosen.meets and chosen.fleet == Fleet(prompts, streams) and chosen.fleet.size == size
    assert len(tried) == len(set(tried)) <= 2 * sum(range(1, 13))


def test_a_fleet_that_would_be_too_large_is_not_chosen() -> None:
    trials = smallest(4, [None], machine([], 3, 3))
    assert not any(trial.meets for one in trials for trial in one)
    assert best(trials[-1]).fleet == Fleet(2, 2)


def test_splits_of_large_fleets_are_bisected() -> None:
    tried: list[Fleet] = []
    trials = try_size(64, [None], machine(tried, 40, 24))
    assert best(trials).fleet == Fleet(40, 24) and len(tried) <= 11


def sizes_that_suffice(sufficient: Collection[int]) -> Callable[[Sequence[Fleet]], list[Trial]]:
    """Return a simulation in which all fleets of some sizes meet the SLO, and no other."""

    def simulate(fleets: Sequence[Fleet]) -> list[Trial]:
        return [judge(TARGETS, make_forecast(one, 400 if one.size in sufficient else 600, 1)) for one in fleets]

    return simulate


@given(least=st.integers(1, 40), also=st.sets(st.integers(1, VERIFIED - 1)), chance=st.sets(st.integers(1, 40)))
def test_the_search_finds_the_size_that_an_exhaustive_one_would(least: int, also: set[int], chance: set[int]) -> None:
    monotone = set(range(least, 41))
    assert smallest(40, [None], sizes_that_suffice(monotone))[-1][0].fleet.size == least
    rough = {least, *(least + one for one in also), *range(least + VERIFIED, 44)}
    if 40 in rough:
        assert smallest(40, [None], sizes_that_suffice(rough))[-1][0].fleet.size == least
    trials = smallest(40, [None], sizes_that_suffice(chance))
    size = trials[-1][0].fleet.size
    if size in chance:
        assert not chance & set(range(size - VERIFIED, size))
    else:
        assert size == 40 and not chance & {1, 2, 4, 8, 16, 32, 40}


@given(
    size=st.integers(13, 48), share=st.floats(0.02, 0.98), seed=st.integers(0, 999), noise=st.sampled_from([0, 0.03])
)
def test_the_split_is_about_as_good_as_that_of_an_exhaustive_search(
    size: int, share: float, seed: int, noise: float
) -> None:
    """With noise, the split with the least of it wins an exhaustive search: it is ahead by at most twice the noise."""

    def simulate(fleets: Sequence[Fleet]) -> Iterator[Trial]:
        for one in fleets:
            chance = 1 + Random(f"{seed} {one}").uniform(-noise, noise)
            ttft, itl = (500 * size * share / max(1, one.prefill), 50 * size * (1 - share) / max(1, one.decode))
            yield judge(TARGETS, make_forecast(one, *((ttft * chance, itl * chance) if one.prefill else (9999, 999))))

    exhaustive = best(simulate([Fleet(one, size - one) for one in range(1, size)]))
    found = best(try_size(size, [None], simulate))
    assert found.ratio <= exhaustive.ratio * (1 + 2 * noise) * (1 + NOISE)


@pytest.mark.parametrize("prompts", [8, 40])
def test_large_splits_follow_the_busier_role_where_the_target_does_not_tell(prompts: int) -> None:
    targets = parse_targets("e2el.p99=1s")

    def simulate(fleets: Sequence[Fleet]) -> Iterator[Trial]:
        for fleet in fleets:
            prefill, decode = prompts / max(1, fleet.prefill), (48 - prompts) / max(1, fleet.decode)
            figures = make_forecast(fleet, 1, 1).figures | {"p99_e2el_ms": 999 * max(prefill, decode)}
            yield judge(targets, Forecast(fleet, figures, {"prefill": prefill, "decode": decode}, 0, False, []))

    assert best(trial for trial in try_size(48, [None], simulate) if not trial.is_colocated).fleet.prefill == prompts


def test_headroom_is_the_rate_at_which_a_target_breaks() -> None:
    def meets(rate: float) -> Trial:
        return judge(TARGETS, make_forecast(Fleet(1, 1), 200, 50 * rate / 3.3))

    rate, broken = headroom(2.0, meets)
    assert 3.3 / 1.06 < rate <= 3.3 and broken is not None and broken.binding.metric == "itl"
    rate, broken = headroom(0.1, lambda rate: meets(0.1))
    assert rate == pytest.approx(0.759, rel=0.01) and broken is None


def trial(fleet: Fleet, ttft_ms: float, itl_ms: float) -> Trial:
    return judge(TARGETS, make_forecast(fleet, ttft_ms, itl_ms))


@pytest.mark.parametrize(
    ("split", "colocated", "expected"),
    [
        ((300, 40), (300, 90), "Disaggregation pays: 1P+1D: TTFT p90 300 of 500 ms"),
        ((700, 40), (300, 30), "Disaggregation does not pay: 2 both: TTFT p90 300"),
        ((700, 40), (300, 90), "Neither suffices: the nearest, 1P+1D has TTFT p90 700 of 500 ms"),
        ((400, 40), (404, 40), "Both suffice alike"),
        ((200, 20), (400, 40), "Both suffice. Disaggregation has more margin"),
        ((400, 40), (200, 20), "Both suffice. Colocated instances have more margin"),
    ],
)
def test_advice_names_the_winner(split: tuple[int, int], colocated: tuple[int, int], expected: str) -> None:
    trials = [trial(Fleet(1, 1), *split), trial(Fleet(both=2), *colocated)]
    assert advise(trials, TARGETS).startswith(expected)


def test_advice_names_the_price_of_the_choice() -> None:
    """A tenth of the requests misses TTFT p90 in a fleet that meets it: by the SLO, that is no fault."""
    split, colocated = (
        judge(TARGETS, make_forecast(fleet, ttft, itl, rate=rate))
        for fleet, ttft, itl, rate in ((Fleet(1, 1), 300, 20, 4.9), (Fleet(both=2), 200, 60, 5.0))
    )
    for share in (0.9, 0.3):
        assert trade([replace(split, attainment=share), colocated]) == (
            "Beside 1P+1D, 2 both has 1 times the throughput, 0.67 times the TTFT p50, 3 times the ITL p99. "
            "Worst figures beside their targets: 2 both has ITL p99 60 of 50 ms; 1P+1D has TTFT p90 300 of 500 ms."
        )
    without_gaps = judge(TARGETS, make_forecast(Fleet(1, 1), 300, 0))
    assert "ITL p99. " not in trade([without_gaps, colocated]) and trade([split]) == ""
    failed = replace(colocated, failure="refuses or loses 3 requests")
    assert "targets: 2 both refuses or loses 3 requests; 1P+1D has" in trade([split, failed])


def test_lines_for_compose_deploy_the_fleet() -> None:
    lines = env_lines(trial(Fleet(2, 1), 1, 1), ONE_EACH, Common())
    assert lines == ["PREFILL=2", "PREFILL_GPUS=0,1", "DECODE=1", "DECODE_GPUS=2"]
    several = env_lines(trial(Fleet(1, 2), 1, 1), {"prefill": 2, "decode": 1, "both": 4}, Common())
    assert several[:3] == ["PREFILL=1", "PREFILL_GPUS=0,1", "PREFILL_TENSOR_PARALLEL_SIZE=2"]
    assert several[3:] == ["DECODE=2", "DECODE_GPUS=2,3", "DECODE_FLAGS=--convert-kv"]
    colocated = env_lines(trial(Fleet(both=3, itl_target_ms=20), 1, 1), ONE_EACH, Common())
    assert colocated == ["PREFILL=0", "DECODE=0", "BOTH=3", "BOTH_GPUS=0,1,2", "ENGINE_FLAGS=--itl-target-ms 20"]


# ---- the commands -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(pdserve: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: pdserve(*map(str, arguments))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    engine = EngineFacts(block_bytes=4096, num_blocks=1000, max_model_len=4096)
    path = tmp_path / "profile.json"
    Profile(model="m", engine=engine, transfers={"shm": TransferModel(1e-3, 1e9, 1e-3, 1e9, 2e9)}).save(path)
    return path


def size(row: dict[str, Any]) -> int:
    return int(row["prefill"] + row["decode"] + row["both"])


LOAD = ["--num-prompts", 30, "--random-input-len", 200, "--random-output-len", 20, "--jobs", 1]


def test_a_plan_names_a_fleet_and_exits_with_3_if_there_is_none(profile: Path, tmp_path: Path, run: Run) -> None:
    slo, out = "ttft.p90=100ms,itl.p99=100ms", tmp_path / "plan.json"
    done = run("plan", "--profile", profile, *LOAD, "--request-rate", 20, "--slo", slo, "--json", out)
    assert done.returncode == 0 and "Smallest fleet for 20 requests/s" in done.stdout, done.stderr
    plan = json.loads(out.read_text())
    assert len(plan["repetitions"]) == 4 and "With 4 other seeds, the SLO is met" in done.stdout
    assert "TTFT p90 rests on the slowest 3 of 30 requests" in done.stdout
    assert plan["chosen"]["meets"] and plan["chosen"]["p90_ttft_ms"] <= 100
    smaller = [row for row in plan["trials"] if size(row) < size(plan["chosen"])]
    assert not any(row["meets"] for row in smaller) and plan["highest_rate"] >= 20
    impossible = run(
        "plan", "--profile", profile, *LOAD, "--request-rate", 5, "--slo", "ttft=1ms", "--max-instances", 2
    )
    assert impossible.returncode == 3 and "What binds is TTFT p99" in impossible.stdout


def test_a_plan_changes_the_lengths_and_the_ramp_that_it_was_given(profile: Path) -> None:
    def draw(rate: float, **changes: Any) -> list[Request]:
        return draw_requests(PlanConfig(profile=str(profile), num_prompts=40, random_output_len=20, **changes), rate)

    ramp: dict[str, Any] = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0}
    natural, twice = draw(math.inf, **ramp), draw(2 * mean_rate(PlanConfig(num_prompts=40, **ramp)), **ramp)
    assert (natural[-1].at or 0) - (natural[0].at or 0) == pytest.approx(
        2 * ((twice[-1].at or 0) - (twice[0].at or 0)), rel=0.2
    )
    seen = list[float]()

    class Recorder(Planner):
        def _one(self, fleet: Fleet, config: PlanConfig, rate: float) -> Trial:
            seen.append(config.stretch_prompts)
            return judge(TARGETS, make_forecast(fleet, 1, 1))

    config = PlanConfig(profile=str(profile), request_rate=5, stretch_prompts=2, num_prompts=10, random_input_len=100)
    Recorder(config, Profile.load(profile), TARGETS, lambda text: None)._sensitivity(Fleet(1, 1))
    assert sorted(set(seen)) == [1.6, 2, 2.4]


def test_simulate_prints_a_row_per_fleet(profile: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.json"
    fleets = ["--prefill", "1..2", "--decode", 1, "--itl-target-ms", "off,30", "--json", out, "--goodput", "ttft:500"]
    done = run("simulate", "--profile", profile, *LOAD, "--request-rate", 10, *fleets)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["fleet"] for row in rows] == ["1P+1D", "1P+1D --itl-target-ms 30", "2P+1D", "2P+1D --itl-target-ms 30"]
    assert all(row["completed"] == 30 for row in rows) and done.stdout.count("P+1D") == 4
    assert "TTFT p99 rests on the slowest 1 of 30 requests" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "--profile", "nowhere.json"], "--profile nowhere.json cannot be read"),
        (["simulate", "--prefill", "0"], "no such fleet can serve"),
        (["simulate", "--decode", "two"], "--decode: 'two' is no number of instances"),
        (["simulate", "--request-rate", "-1"], "--request-rate must be at least 1e-06"),
        (["simulate", "--request-rate", "5e-324", "--burstiness", "0.5"], "--request-rate must be at least 1e-06"),
        (["simulate", "--connector", "redis"], "--connector redis: the profile has shm"),
        (["simulate", "--goodput", "ttft"], "--goodput: 'ttft' is no objective"),
        (["simulate", "--itl-target-ms", "0"], "--itl-target-ms: '0' is not such as"),
        (["plan", "--slo", "ttft"], "--slo: 'ttft' is no objective"),
        (["simulate", "--trace-speed", 2], "--trace-speed has no effect without --dataset-name"),
        (["plan"], "--slo: there is no target"),
        (["plan", "--slo-file", "nowhere.toml"], "--slo-file nowhere.toml cannot be read"),
        (["plan", "--slo", "ttft=1s"], "give the load a --request-rate"),
        (
            ["plan", "--slo", "ttft=1s", "--request-rate", 5, "--random-input-len", 4090, "--num-prompts", 7],
            "7 of 7 requests need up to 4218 tokens, and an instance takes 4096",
        ),
        (["plan", "--slo", "ttft=1s", "--instances", "0"], "--instances must be at least 1"),
        (["simulate", "--num-prompts", 9, "--warmup-requests", 9], "--warmup-requests 9 leaves none of 9 requests"),
    ],
)
def test_mistakes_are_one_line(profile: Path, run: Run, arguments: list[str], expected: str) -> None:
    given = arguments if "--profile" in arguments else [*arguments, "--profile", profile]
    done = run(*given)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_profile_without_the_number_of_blocks_needs_the_flag(tmp_path: Path, run: Run) -> None:
    Profile(model="m", engine=EngineFacts(block_bytes=4096)).save(tmp_path / "profile.json")
    arguments = ["simulate", "--profile", tmp_path / "profile.json", *LOAD, "--request-rate", 10]
    done = run(*arguments)
    assert done.returncode == 2 and "give --num-blocks" in done.stderr and "Traceback" not in done.stderr
    assert run(*arguments, "--num-blocks", 1000).returncode == 0


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"schema": 1, "model": 3}')
    done = run("simulate", "--profile", path)
    assert done.returncode == 2 and f"{path} is not a profile: model" in done.stderr
