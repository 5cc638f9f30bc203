"""Roofline profiles: published points, common sense, and the shapes of models."""

import importlib.util
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import SetupError
from pdserve.tools.load_config import PlanConfig, SimulateConfig
from pdserve.tools.planner.command import run
from pdserve.tools.planner.gpus import cheapest, costs, fitting, thrifty
from pdserve.tools.planner.plan import Planner
from pdserve.tools.planner.search import Trial, judge
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.roofline.devices import DEVICES, WEIGHTS
from pdserve.tools.roofline.estimate import MEDIAN_ERROR, WORST_ERROR, Estimate
from pdserve.tools.roofline.shape import built_in, kv_spec, load
from pdserve.tools.simulator.fleet import Fleet, Forecast, load_profile, num_gpus

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "roofline.py"
SMALL = "Qwen/Qwen3-8B"


def rows() -> list[Any]:
    spec = importlib.util.spec_from_file_location("roofline_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = sys.modules["roofline_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found: list[Any] = script.rows()
    return found


def test_published_points_are_met_as_well_as_plans_say() -> None:
    counted = [row for row in rows() if row.counts]
    errors = [abs(row.error) for row in counted]
    assert len(counted) >= 40 and len({row.point["source"] for row in counted}) == 6
    assert statistics.median(errors) == pytest.approx(MEDIAN_ERROR, abs=0.005) and MEDIAN_ERROR <= 0.2
    assert max(errors) == pytest.approx(WORST_ERROR, abs=0.005) and WORST_ERROR <= 0.5


def decode_ms(gpu: str, gpus: int = 1, **settings: Any) -> float:
    return 1e3 * Estimate(load(SMALL), gpu, gpus, **settings).step.decode_seconds(1, 1000)


def test_common_sense() -> None:
    one = decode_ms("h100")
    assert 5 < one < 9 and 1.2 < one / decode_ms("h200") < 1.6 and 1.4 < one / decode_ms("h100", 2) < 2
    assert decode_ms("l40s") > decode_ms("a100") > one > decode_ms("b200")
    assert one > decode_ms("h100", weights="fp8") > decode_ms("h100", weights="w4a16")


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        ("qwen3-8b", 8.2, 8.2),
        ("Qwen/Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.6, 70.6),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("deepseek-ai/DeepSeek-V3", 671, 37),
        ("facebook/opt-66b", 66, 66),
    ],
)
def test_shapes_have_the_parameters_that_their_names_say(model: str, billions: float, active: float) -> None:
    shape = load(model)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.03)
    assert shape.active + 2 * shape.output == pytest.approx(active * 1e9, rel=0.05)
    assert shape.read(1) == pytest.approx(shape.active) and shape.read(1e6) == pytest.approx(
        shape.parameters - 2 * shape.output
    )


def test_matrices_of_the_vocabulary_stay_in_16_bits() -> None:
    shape = load(SMALL)
    left = [Estimate(shape, "h100", weights=one).kv_tokens * shape.kv_numbers(1) * 2 for one in ("bf16", "fp8")]
    assert left[1] - left[0] == pytest.approx(shape.dense, rel=1e-3), "a byte less of each other parameter"


def test_kv_is_that_of_the_spec() -> None:
    assert load(SMALL).kv_numbers(1000) == 36 * 2 * 8 * 128
    assert load("deepseek-ai/DeepSeek-V3").kv_numbers(1000) == 61 * 576
    mistral = load("mistralai/Mistral-7B-v0.1")
    assert mistral.kv_numbers(8192) == mistral.kv_numbers(4096) / 2 and mistral.attended(8192) == 0.5
    config = built_in()[SMALL] | {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 18}
    assert [len(group.layers) for group in kv_spec(config).groups] == [18, 18] and kv_spec(config).window is None


NEXT: dict[str, Any] = {  # of Qwen3-Next-80B-A3B
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
}


def test_recurrent_layers_have_states_and_no_rows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    shape = load(str(tmp_path))
    assert shape.kv_numbers(1000) == 12 * 2 * 2 * 256 and len(shape.kv.states) == 36
    assert shape.parameters == pytest.approx(80e9, rel=0.03)
    assert shape.active + 2 * shape.output == pytest.approx(3.9e9, rel=0.1)
    profile = Estimate(shape, "h200", 2).profile()
    rows, states = profile.engine.groups
    assert rows.block_bytes == 16 * 12 * 2 * 2 * 256 * 2
    assert states.block_bytes == pytest.approx(75 * 2**20, rel=0.02), "which is worth 3,200 tokens of rows"
    other = Estimate(replace(shape, kv=replace(shape.kv, states={})), "h200", 2).step
    more = profile.step.decode_seconds(64, 0) - other.decode_seconds(64, 0)
    assert more == pytest.approx(64 * 2 * 75 * 2**20 / (2 * 0.8 * 4.8e12), rel=0.05)
    (tmp_path / "config.json").write_text(json.dumps(NEXT | {"layer_types": ["conv"] * 48}))
    load.cache_clear()
    with pytest.raises(SetupError, match="its config has no usable 'kinds of layers: conv'"):
        load(str(tmp_path))


def test_windows_are_groups_of_a_profile() -> None:
    """So that a simulation keeps and moves of each layer what its tokens reach, however long prompts are."""
    config = built_in()[SMALL] | {"sliding_window": 512, "layer_types": ["sliding_attention"] * 30 + ["attention"] * 6}
    shape = replace(load(SMALL), kv=kv_spec(config))
    facts, plain = Estimate(shape, "h100").profile().engine, Estimate(load(SMALL), "h100").profile().engine
    assert [(one.window, one.block_bytes) for one in facts.groups] == [(0, 6 * 65536), (512, 30 * 65536)]
    assert facts.block_bytes == plain.block_bytes == 36 * 65536 and not plain.groups
    assert facts.num_pages * 30 * 65536 == pytest.approx(plain.num_pages * plain.block_bytes, rel=0.01)
    mistral = Estimate(load("mistralai/Mistral-7B-v0.1"), "h100").profile().engine
    assert [one.window for one in mistral.groups] == [4096] and mistral.window == 4096


def test_a_config_of_a_directory_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(built_in()[SMALL]))
    assert replace(load(str(tmp_path)), name=SMALL) == load(SMALL)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(SetupError, match="its config has no usable 'hidden_size'"):
        load(str(other))
    for number, text in enumerate(
        (json.dumps(built_in()[SMALL] | {"num_attention_heads": 0, "head_dim": 0}), "[" * 100_000)
    ):
        (other := tmp_path / str(number)).mkdir()
        (other / "config.json").write_text(text)
        with pytest.raises(SetupError, match=r"its config has no usable|is not JSON"):
            load(str(other))
    with pytest.raises(SetupError, match="which is not downloaded, and no built-in shape; there are Qwen/"):
        load("nobody/nothing")


def test_only_numbers_of_gpus_that_divide_the_heads_are_planned(tmp_path: Path) -> None:
    """An instance with others refuses to start."""
    config = built_in()[SMALL] | {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PlanConfig(model=str(tmp_path), gpu="h100", tensor_parallel_size="auto")
    assert fitting(plan) == [1, 2]
    with pytest.raises(SetupError, match=r"the 14 heads of .* cannot be divided among 4 GPUs"):
        load_profile(replace(plan, tensor_parallel_size="4"))
    assert [load(SMALL).can_divide(gpus) for gpus in (3, 4, 8, 16, 32, 64)] == [False, True, True, True, True, False]


@given(
    model=st.sampled_from(sorted(built_in())),
    gpu=st.sampled_from(sorted(DEVICES)),
    gpus=st.sampled_from([1, 2, 4, 8]),
    weights=st.sampled_from(sorted(WEIGHTS)),
    tokens=st.integers(1, 8191),
)
def test_more_tokens_never_take_less_time(model: str, gpu: str, gpus: int, weights: str, tokens: int) -> None:
    one = Estimate(load(model), gpu, gpus, weights)
    step = one.step
    assert 0 < step.prefill_seconds(tokens, 0) <= step.prefill_seconds(tokens + 1, 0)
    assert 0 < step.decode_seconds(tokens, 0) <= step.decode_seconds(tokens + 1, 0)
    assert one.kv_tokens <= Estimate(load(model), gpu, 2 * gpus, weights).kv_tokens


def trial(fleet: Fleet, ratio: float) -> Trial:
    figures = {"p99_ttft_ms": 1e3 * ratio, "failed": 0}
    return judge(parse_targets("ttft=1s"), Forecast(fleet, figures, {}, 0, False, []))


CONFIG = PlanConfig(model=SMALL, gpu="h100", tensor_parallel_size="4", slo="ttft=1s", request_rate=5)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({1: (5, 0.9), 2: (2, 0.9), 4: (2, 0.5)}, "2"),
        ({1: (4, 0.9), 4: (1, 0.5)}, "4"),
        ({1: (9, 1.4), 2: (9, 1.2)}, "2"),
        ({1: (4, 0.8), 2: (2, 0.9)}, "1"),
    ],
)
def test_the_fewest_gpus_are_chosen(sizes: dict[int, tuple[int, float]], expected: str) -> None:
    def screen(config: PlanConfig) -> Trial:
        size, ratio = sizes[int(config.tensor_parallel_size)]
        return trial(Fleet(both=size), 1.0 if ratio <= 1 and size <= config.max_instances else 2.0)

    def best_of(config: PlanConfig, size: int) -> Trial:
        assert size == sizes[int(config.tensor_parallel_size)][0]
        return trial(Fleet(both=size), sizes[int(config.tensor_parallel_size)][1])

    assert cheapest(CONFIG, sorted(sizes), screen, best_of).tensor_parallel_size == expected


def test_a_role_gets_fewer_gpus_while_the_slo_is_met() -> None:
    def simulate(fleet: Fleet) -> Trial:
        gpus = {"prefill": 4, "decode": 4} | {name.partition("_")[0]: value for name, value in fleet.settings}
        return trial(fleet, 0.9 if gpus["prefill"] >= 2 and gpus["decode"] >= 4 else 1.5)

    chosen = thrifty(CONFIG, trial(Fleet(1, 2), 0.5), [1, 2, 4], simulate)
    assert dict(chosen.fleet.settings) == {"prefill_tensor_parallel_size": 2} and num_gpus(CONFIG, chosen.fleet) == 10
    assert thrifty(CONFIG, trial(Fleet(both=2), 0.5), [1, 2, 4], simulate).fleet == Fleet(both=2)


def planned(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    load = {"num_prompts": 20, "random_input_len": 500, "random_output_len": 16, "jobs": 1}
    assert (
        run(PlanConfig(**load | {"model": SMALL, "gpu": "h100", "slo": "ttft.p90=150ms,itl.p90=15ms"} | settings)) == 0
    )
    return capsys.readouterr().out


def test_a_plan_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, request_rate=4, tensor_parallel_size="auto", itl_target_ms="off", instances=2, price=2.5)
    assert text.startswith("Best fleet for 4 requests/s on 2 x h100, by roofline: ")
    assert f"{MEDIAN_ERROR:.0%} off in the median" in text and "over rdma" in text and "costs 5.00 per hour" in text


def test_ten_times_the_rate_needs_more_instances() -> None:
    def size(rate: float) -> int:
        load: dict[str, Any] = {"num_prompts": 60, "random_input_len": 500, "random_output_len": 16, "jobs": 1}
        config = PlanConfig(
            **load, model=SMALL, gpu="h100", slo="ttft.p90=150ms", request_rate=rate, itl_target_ms="off"
        )
        return Planner(config, load_profile(config), parse_targets(config.slo), lambda text: None).screen().fleet.size

    assert size(6) < size(60)


def test_only_a_plan_chooses_gpus() -> None:
    with pytest.raises(SetupError, match="auto is of `pdserve plan`"):
        load_profile(SimulateConfig(model=SMALL, gpu="h100", tensor_parallel_size="auto"))
    with pytest.raises(
        SetupError, match=r"Qwen3-32B in bf16 does not fit on 1 x l40s: give more by --tensor-parallel-size"
    ):
        load_profile(SimulateConfig(model="Qwen/Qwen3-32B", gpu="l40s"))
    with pytest.raises(ValueError, match="--gpu needs --model"):
        SimulateConfig(gpu="h100")


def test_costs_are_of_all_gpus_and_of_each_role() -> None:
    def cost(fleet: Fleet, **changes: float) -> str:
        figures: dict[str, Any] = {
            "total_input_tokens": 3_600_000,
            "total_output_tokens": 400_000,
            "duration": 4500.0,  # the last answers take longer than the requests arrive
            "completed": 18_000,
            "p99_ttft_ms": 1,
        } | changes
        one = judge(parse_targets("ttft=1s"), Forecast(fleet, {"failed": 0} | figures, {}, 0, False, []))
        return costs(replace(CONFIG, price=2.0), one, rate=5.0)

    assert cost(Fleet(both=2)) == "2 both costs 16.00 per hour, 4 per million tokens."
    split = Fleet(1, 2, settings=(("prefill_tensor_parallel_size", 2),))
    assert cost(split) == "1P+2D costs 20.00 per hour, 5 per million tokens (1.11 of prompts, 40 of answers)."
    assert cost(Fleet(both=2), failed=600, duration=7200.0) == "2 both costs 16.00 per hour, 8 per million tokens."
    none = {"total_input_tokens": 0, "total_output_tokens": 0}
    assert cost(Fleet(both=2), **none) == "2 both costs 16.00 per hour.", "it refuses all, or is given up before"
