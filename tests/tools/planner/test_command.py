"""Reports of a plan: charts, forecasts beside measurements, and the parts of TTFT."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.lifetime import Stage
from pdserve.profile.profile import Machine, Profile
from pdserve.tools import machine
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.charts import frontier, pareto
from pdserve.tools.planner.command import run
from pdserve.tools.planner.gpus import prices
from pdserve.tools.planner.here import Here, config_here, needed_by
from pdserve.tools.planner.measured import compare, load_measured
from pdserve.tools.planner.plan import Planner
from pdserve.tools.planner.search import Trial, judge
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.simulator.breakdown import breakdown
from pdserve.tools.simulator.fleet import Fleet, Forecast, draw_requests, parse_fleet, parse_itl_targets, simulate

TARGETS = parse_targets("ttft.p90=100ms")
LOAD = [Request(0, 20, input_tokens=200), Request(1, 20, input_tokens=400)]
RESULT = {"completed": 10, "total_input_tokens": 3100, "total_output_tokens": 200, "request_rate": 4.0}


def trial(fleet: Fleet, ttft_ms: float = 90, **figures: Any) -> Trial:
    return judge(TARGETS, Forecast(fleet, {"p90_ttft_ms": ttft_ms, "failed": 0} | figures, {}, 0, False, []))


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        path = tmp_path / "result.json"
        path.write_text(json.dumps(RESULT | changes))
        return f"2P+1D={path}"

    return write


def drafts(count: int, drafted: int, accepted: int) -> dict[str, int]:
    counts = {"num_drafts": count, "draft_tokens": drafted, "accepted_tokens": accepted}
    return {f"spec_decode_{name}": value for name, value in counts.items()}


def test_a_forecast_stands_beside_the_measurement_of_its_fleet(result: Callable[..., str]) -> None:
    figures = {"p50_ttft_ms": 80.0, "p90_ttft_ms": 120.0, "p50_itl_ms": 20.0, "request_throughput": 4.0}
    (measured,) = load_measured(result(**figures), LOAD)
    assert (measured.fleet, measured.rate) == (Fleet(2, 1), 4.0)
    forecast = {"p50_ttft_ms": 88.0, "p50_itl_ms": 20.0, "request_throughput": 4.0}
    runs: list[tuple[Fleet, float]] = []

    def simulate(fleet: Fleet, rate: float) -> Trial:
        runs.append((fleet, rate))
        return trial(fleet, 150, **forecast)

    found = compare(measured, simulate)
    assert runs == [(Fleet(2, 1), 4.0)] and ("TTFT p50", 88.0, 80.0) in found.rows and len(found.rows) == 4
    assert "2P+1D against result.json: median error 5%" in str(found)
    assert "furthest is TTFT p90, 150 forecast and 120 measured" in str(found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"completed": 0}, "is no result of `pdserve bench serve --save-result` with answers"),
        ({"total_input_tokens": 10**400}, "is no result of `pdserve bench serve --save-result` with answers"),
        ({"total_input_tokens": 9000}, "its prompts have 900 tokens in the mean, and those of the plan's load 300"),
        ({"total_output_tokens": 20}, "its answers have 2 tokens in the mean, and those of the plan's load 20"),
        (drafts(9, 99, 100), "has 100 accepted tokens of 99 in 9 drafts"),
        (drafts(0, 120, 100), "has 100 accepted tokens of 120 in 0 drafts"),
    ],
)
def test_a_measurement_of_another_load_is_refused(
    result: Callable[..., str], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SetupError) as caught:
        load_measured(result(**changes), LOAD)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("result.json", "'result.json' is no fleet; write such as 2P+1D, or 3B"),
        ("1P=result.json", "'1P' is no fleet"),
        ("1P+2P+1D=result.json", "'1P+2P+1D' is no fleet"),
        ("1P+1D=nowhere.json", "the file cannot be read: No such file"),
        ("1P+1D=deep.json", "the file is not JSON: it is nested too deeply"),
    ],
)
def test_a_malformed_measurement_is_named(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="--measured") as caught:
        load_measured(text, LOAD)
    assert expected in str(caught.value)


def test_fleets_are_parsed() -> None:
    assert [parse_fleet(text) for text in ("2P+1D", "3B", "1P+1D+1B")] == [Fleet(2, 1), Fleet(both=3), Fleet(1, 1, 1)]


def named(drawn: str) -> list[str]:
    """Return the names beside the points of a chart."""
    return re.findall(r'class="name"[^>]*>([^<]+)', drawn)


def test_no_fleet_of_the_front_is_beaten_by_a_smaller_one() -> None:
    def with_attainment(fleet: Fleet, share: float) -> Trial:
        return replace(trial(fleet), attainment=share)

    shares = {Fleet(both=1): 0.5, Fleet(1, 1): 0.4, Fleet(both=2): 0.7, Fleet(2, 1): 0.7, Fleet(1, 2): 0.9}
    trials = [with_attainment(*pair) for pair in shares.items()]
    drawn = pareto(trials)
    assert named(drawn) == ["1 both", "2 both", "1P+2D"] and "instances" in drawn and ">3</span>" in drawn


def test_a_fleet_is_drawn_at_the_price_of_all_its_gpus() -> None:
    config = PlanConfig(model="Qwen/Qwen3-32B", gpu="h100", tensor_parallel_size="2", price=2.5)
    assert prices(config, Fleet(1, 2)) == {"prefill": 5.0, "decode": 10.0, "both": 0.0}
    trials = [replace(trial(Fleet(both=size)), attainment=size / 2) for size in (1, 2)]
    drawn = pareto(trials, lambda fleet: sum(prices(config, fleet).values()))
    assert "price per hour" in drawn and '">10</span>' in drawn


def test_the_frontier_names_what_no_fleet_beats_in_all_figures() -> None:
    figures = {
        Fleet(1, 1): (300, 20, 5.0),
        Fleet(both=2): (100, 60, 5.0),
        Fleet(both=2, itl_target_ms=9.0): (110, 70, 4),
    }
    trials = [
        trial(fleet, p50_ttft_ms=ttft, p99_itl_ms=itl, request_throughput=rate)
        for fleet, (ttft, itl, rate) in figures.items()
    ]
    assert named(frontier(trials)) == ["1P+1D, 5 req/s", "2 both, 5 req/s"]
    assert frontier(trials).count("<title>2 both, 4 req/s") == 1 and named(frontier(trials[1:])) == ["2 both, 5 req/s"]


def test_the_parts_of_ttft_are_those_of_the_timeline() -> None:
    stages = [Stage.RECEIVED, Stage.ROUTED, Stage.PREFILL_STARTED, Stage.FIRST_TOKEN, Stage.KV_READY]
    split = dict(zip(stages, [0.0, 0.01, 0.11, 0.31, 0.35], strict=True))
    alone = dict(zip(stages[:4], [0.0, 0.0, 0.0, 0.1], strict=True))
    samples = [
        Sample(0, 0, ended=1, token_times=[0.31, 0.37, 0.4], status=200),
        Sample(1, 0, ended=1, token_times=[0.1, 0.12], status=200),
        Sample(2, 0, error="refused"),
    ]
    found = breakdown(samples, {0: split, 1: alone})
    expected = {"router": 10, "prefill queue": 100, "prefill": 200, "hand-over": 40, "first decode step": 20}
    assert found["slowest tenth"] == pytest.approx(expected)
    assert found["mean"]["prefill"] == pytest.approx(150) and found["mean"]["first decode step"] == pytest.approx(20)
    assert breakdown([], {}) == {}


def plan_config(profile: Path, **settings: Any) -> PlanConfig:
    """Return settings of a plan that takes little time; its figures go into `plan.json` beside the profile."""
    load = {"num_prompts": 10, "random_input_len": 100, "random_output_len": 10, "jobs": 1}
    return PlanConfig(profile=str(profile), json=str(profile.parent / "plan.json"), **load | settings)


def test_a_plan_writes_its_reports(tiny_profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_profile.parent
    measured = folder / "measured.json"
    figures = {"total_input_tokens": 2000, "p50_ttft_ms": 50.0, "p99_itl_ms": 12.0, "request_throughput": 5.0}
    figures |= {"tokens_together_fraction": 0.2, **drafts(25, 125, 100)}
    measured.write_text(json.dumps(RESULT | figures))
    config = plan_config(
        tiny_profile,
        slo="ttft.p90=100ms,itl.p99=100ms",
        request_rate=20,
        num_prompts=20,
        random_input_len=200,
        random_output_len=20,
        measured=f"1P+1D={measured}",
        try_policy="auto,round_robin",
        html=str(folder / "plan.html"),
    )
    assert not run(config)
    printed = capsys.readouterr().out
    assert "Forecast of 1P+1D against measured.json" in printed and "cores" not in printed, "the profile knows of none"
    plan = json.loads((folder / "plan.json").read_text())
    curve = plan["attainment_by_rate"][plan["chosen"]["fleet"]]
    assert [rate for rate, _ in curve] == sorted(rate for rate, _ in curve) and curve[0][0] == 10.0
    assert sum(list(plan["chosen"]["ttft_parts_ms"]["mean"].values())[:3]) == pytest.approx(
        plan["chosen"]["mean_ttft_ms"], rel=1e-3
    )
    text = (folder / "plan.html").read_text()
    for part in (
        "requests/s; dashed: as planned",
        "the best for its size",
        "ms until the second token",
        "ITL p99, ms",
        "load changes",
        "by --policy",
        "<th>forecast</th><th>measured</th><th>error</th>",
        "came together with the one before",
        "50% of the tokens in measured.json were drafts: forecasts know them by --acceptance 0.93, or measure",
    ):
        assert part in text, part
    assert "report heat" not in text.partition("</style>")[2]
    order = [text.index(part) for part in ("Smallest fleet", "<table", "<figure", "PREFILL=")]
    assert order == sorted(order) and len(text) < 100_000


def test_a_plan_says_that_it_is_the_router_that_does_not_keep_up(
    tiny_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile.load(tiny_profile)
    slow = replace(profile, overheads=replace(profile.overheads, router_request_s=0.05))
    slow.save(tiny_profile)
    load = {"slo": "ttft=500ms", "request_rate": 40, "num_prompts": 60, "max_instances": 2, "random_output_len": 2}
    config = plan_config(tiny_profile, **load)
    assert run(config) == 3
    lines = capsys.readouterr().out.splitlines()
    advice = re.search(r"Instances do not help a router that is busy \d+% of the time: try --routers (\d)\.", lines[2])
    assert advice and lines[0].startswith("No fleet of up to 2 instances meets the SLO")
    assert run(replace(config, routers=int(advice[1]))) == 0


def test_lengths_are_changed_relative_to_those_given(tiny_profile: Path) -> None:
    assert not run(plan_config(tiny_profile, slo="ttft=9s", request_rate=5, stretch_prompts=2.0))
    plan = json.loads((tiny_profile.parent / "plan.json").read_text())
    assert plan["chosen"]["total_input_tokens"] == 2000
    assert plan["sensitivity"]["prompts +20%"]["total_input_tokens"] == 2400


def test_a_load_of_months_is_refused(tiny_profile: Path) -> None:
    """Idle instances send heartbeats, so a simulation of it would not end."""
    with pytest.raises(SetupError, match=r"the load takes 46\.\d days, of at most 31: raise its rate"):
        run(plan_config(tiny_profile, slo="ttft=9s", num_prompts=4, request_rate=1e-6))


def have_cores(path: Path, monkeypatch: pytest.MonkeyPatch, *, cores: int, busy: float = 0.0) -> None:
    """Let the profile be of this machine, which has so many cores and busy threads."""
    profile = Profile.load(path)
    monkeypatch.setattr(machine, "processor", lambda: "P")
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    monkeypatch.setattr(machine, "busy_threads", lambda: busy)
    replace(profile, machine=Machine(processor="P", threads=1, cores=cores)).save(path)


def test_a_plan_says_that_it_lacks_cores(
    tiny_profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have_cores(tiny_profile, monkeypatch, cores=8, busy=7.5)
    assert run(plan_config(tiny_profile, slo="ttft.p90=40ms", request_rate=20, num_prompts=30, instances=2)) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("Best fleet for 20 requests/s: ")
    assert (
        second.startswith("On this machine it ") and "need 4 cores, and there are 8, of which 0.5 are free;" in second
    )
    plan = json.loads((tiny_profile.parent / "plan.json").read_text())
    assert plan["here"]["p90_ttft_ms"] > plan["chosen"]["p90_ttft_ms"]
    assert ("it cannot hold" in second) is (plan["here"]["p90_ttft_ms"] > 40)


@pytest.mark.parametrize(
    ("cores", "busy", "sentence"),
    [
        (2, 0.0, "need 4 cores, and there are 2; with shared cores"),
        (2, 4.0, "need 4 cores, and there are 2, of which 0.0 are free; with shared cores"),
        (8, 4.5, "need 4 cores, and there are 8, of which 3.5 are free; with shared cores"),
        (8, 4.0, None),
        (16, 3.0, None),
    ],
)
def test_cores_that_others_use_are_not_free(
    cores: int, busy: float, sentence: str | None, tiny_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_cores(tiny_profile, monkeypatch, cores=cores, busy=busy)
    config = config_here(plan_config(tiny_profile), Profile.load(tiny_profile), Fleet(1, 1))
    assert (config is None) is (sentence is None)
    if config is not None and sentence is not None:
        assert config.cores == cores
        assert sentence in Here("it", 4, cores, config.busy_threads, trial(Fleet(1, 1))).sentence(TARGETS)


def test_instances_on_gpus_need_a_core_each_and_not_all_threads_of_torch() -> None:
    gpu = Profile(model="m", machine=Machine(threads=16, cores=16, device="cuda:0"))
    cpu = Profile(model="m", machine=Machine(threads=16, cores=16, device="cpu"))
    needed = [needed_by(PlanConfig(), profile, Fleet(3, 5)) for profile in (gpu, cpu)]
    assert needed == [8 + 2, 8 * 16 + 2] and config_here(PlanConfig(), gpu, Fleet(3, 5)) is None


def measured_with(times: float, profile: Path) -> PlanConfig:
    """Return settings of a plan with a measurement from a machine that is slower than its profile by a factor."""
    config = plan_config(profile, slo="ttft=20s", instances=2, num_prompts=40, request_rate=4.0)
    slower = Profile.load(profile).scaled(prefill=times, decode=times)
    result = profile.parent / "result.json"
    result.write_text(json.dumps(simulate(config, slower, {}, Fleet(1, 1), 4.0).figures | {"request_rate": 4.0}))
    return replace(config, measured=f"1P+1D={result}")


@pytest.mark.parametrize("times", [1.0, 1.3, 3.0])
def test_measurements_correct_the_profile(times: float, tiny_profile: Path) -> None:
    config = measured_with(times, tiny_profile)
    planner = Planner(config, Profile.load(tiny_profile), parse_targets(config.slo), lambda _: None)
    correction = planner.correct(load_measured(config.measured, draw_requests(config, planner.rate)))
    assert correction.is_worthless is (times == 3)
    if times == 1:
        assert not correction.factors and len(correction.sentences()) == 1
    else:
        assert correction.factors == {kind: pytest.approx(times, rel=0.15) for kind in ("prefill", "decode")}
        assert "So this plan takes prefill steps" in correction.sentences()[1]


def test_measurements_come_first(tiny_profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(measured_with(3.0, tiny_profile)) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Forecast of 1P+1D against result.json: median error ")
    assert "So this plan takes prefill steps" in second
    assert json.loads((tiny_profile.parent / "plan.json").read_text())["corrected"]["decode"] > 2


def test_a_token_that_comes_with_the_one_before_it_has_no_error(result: Callable[..., str]) -> None:
    (measured,) = load_measured(result(p50_itl_ms=0.0, p50_ttft_ms=80.0), LOAD)
    found = compare(measured, lambda fleet, rate: trial(fleet, p50_itl_ms=20.0, p50_ttft_ms=100.0))
    assert found.error == pytest.approx(0.25) and found.factor("ITL p50") == 1.0 and "TTFT p50" in str(found)


def test_a_result_without_any_figure_is_named(result: Callable[..., str]) -> None:
    (measured,) = load_measured(result(), LOAD)
    assert "no figure to compare with" in str(compare(measured, lambda fleet, rate: trial(fleet)))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("tensor_parallel_size", "0"), ("stretch_prompts", math.inf), ("trace_length_scale", math.inf), ("num_blocks", 1)],
)
def test_settings_that_can_never_work_are_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{setting.replace('_', '-')} must be"):
        PlanConfig(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model", "Qwen/Qwen3-32B"),
        ("weights", "fp8"),
        ("tensor_parallel_size", "auto"),
        ("prefill_tensor_parallel_size", 2),
        ("decode_tensor_parallel_size", 1),
    ],
)
def test_a_setting_of_gpus_is_not_ignored_beside_a_profile(setting: str, value: Any) -> None:
    """The plan would be of the profile's model, and of its ranks."""
    with pytest.raises(ValueError, match=f"--{setting.replace('_', '-')} {value} needs --gpu"):
        PlanConfig(**{setting: value})
    own: dict[str, Any] = {"model": "m", setting: value}
    assert PlanConfig(**own, gpu="h100").gpu


@pytest.mark.parametrize("slo", ["ttft.p90=0.0008ms,itl.p99=1ms", "itl.p99=5e9s"])
def test_an_extreme_slo_has_a_plan(slo: str, tiny_profile: Path) -> None:
    """Targets that are derived from it may not be such that instances and routers refuse them."""
    code = run(plan_config(tiny_profile, slo=slo, request_rate=5, instances=2))
    assert code == (0 if "5e9" in slo else 3)


def test_a_single_request_has_a_plan_and_a_report(tiny_profile: Path) -> None:
    html = tiny_profile.parent / "plan.html"
    load: dict[str, Any] = {"num_prompts": 1, "random_output_len": 1, "request_rate": 0.5}
    assert run(plan_config(tiny_profile, slo="ttft.p90=1s,itl.p99=1s", instances=1, html=str(html), **load)) == 0
    assert "1 both" in html.read_text()


def test_a_measurement_at_no_rate_is_refused(result: Callable[..., str]) -> None:
    with pytest.raises(SetupError, match=r"its request_rate is -1; write one above 0"):
        load_measured(result(request_rate=-1), LOAD)


def test_an_itl_target_is_one_that_routers_take() -> None:
    for text in ("inf", "1e300", "-1"):
        with pytest.raises(SetupError, match="--itl-target-ms"):
            parse_itl_targets(text)
