"""The data of a profile: its file, its formulas, and what it refuses."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.profile.profile import Machine, Profile, Residuals, StepModel, TransferModel

MACHINE = Machine("EPYC", 1, "cpu", "2.13.0", "cpu-avx512")
PROFILE = Profile(
    model="demo",
    model_fingerprint="abc",
    machine=MACHINE,
    step=StepModel(
        ((1, 0.01), (4, 0.04), (8, 0.05)), 1e-6, ((16, 0.02), (512, 0.2)), 1e-8, 0.0, 0.001, (-0.01, 1.0, 0.9)
    ),
    transfers={"shm": TransferModel(0.001, 1e9, 0.002, 2e9, 3e9)},
    residuals={"decode": Residuals(3, 0.1, 0.2, 0.3, 0.01)},
    assumed=("swap",),
)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_a_file_from_before_drafts_were_measured_has_none(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    raw = json.loads((tmp_path / "profile.json").read_text())
    del raw["draft"]
    (tmp_path / "profile.json").write_text(json.dumps(raw))
    assert Profile.load(tmp_path / "profile.json").draft is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": None}, "its schema is None"),
        ({"step": {"pair_s": math.nan}}, "the coefficients of a step must be finite numbers, and not negative"),
        ({"step": {"decode": [[1, -0.1]]}}, "the seconds of decode must be finite"),
        ({"step": {"mixed": [math.inf, 1, 1]}}, "the fixed part of a mixed step must be finite"),
        ({"engine": {"block_size": 0}}, "block_size, max_num_batched_tokens and max_num_seqs must be at least 1"),
        ({"engine": {"num_blocks": -1}}, "block_bytes, num_blocks, num_pages and max_model_len must not be negative"),
        ({"transfers": {"shm": {"bytes_per_s": 0}}}, "the bytes per second of a transfer must be more than 0"),
        ({"overheads": {"frame_s": -1}}, "the overheads must be finite"),
        ({"swap": [0, math.nan]}, "the seconds of swap, start-up and role change must be finite"),
        ({"schema": 2, "step": "other"}, "its schema is 2, and this version reads schema 1"),
        ({"schema": 2}, "its schema is 2, and this version reads schema 1"),
        ({"step": {"context_s": "much"}}, "step.context_s: Input should be a valid number"),
        ({"step": {"decode": []}}, "the knots of decode must have ascending amounts"),
        ({"model": None}, "model: Input should be a valid string"),
    ],
)
def test_another_file_is_refused_in_a_sentence(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"schema": 1, "model": "demo"} | change))
    with pytest.raises(ValueError, match=r"profile.json is not a profile: .*") as error:
        Profile.load(file)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_nested_too_deeply_is_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not a profile: it is nested too deeply"):
        Profile.load(file)


def test_a_file_without_a_schema_is_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"model": "demo"}')
    with pytest.raises(ValueError, match="it has no schema"):
        Profile.load(file)


def test_more_never_takes_less_time_than_the_largest_measured_step() -> None:
    noisy = StepModel(decode=((1, 0.01),), prefill=((16, 0.02), (512, 0.2), (1024, 0.19)))
    assert noisy.prefill_seconds(100_000, 0) == 0.19 and noisy.decode_seconds(5000, 0) == 0.01
    assert noisy.prefill_seconds(768, 0) == pytest.approx(0.195)


def test_steps_follow_the_formulas() -> None:
    step = PROFILE.step
    assert step.seconds([(1, 99)]) == pytest.approx(0.01 + 100e-6)
    assert step.seconds([(1, 99)] * 6) == step.decode_seconds(6, 600) == pytest.approx(0.045 + 600e-6)
    assert step.decode_seconds(12, 0) == pytest.approx(0.06), "straight on beyond the last knot"
    assert step.decode_seconds(8192, 0) == pytest.approx(0.05 + (8192 - 8) * 0.0025)
    assert step.decode_seconds(0, 0) == step.seconds([]) == 0
    assert step.seconds([(264, 100)]) == pytest.approx(0.11 + 264 * 232e-8)
    assert step.seconds([(132, 100)] * 2) == pytest.approx(0.11 + 264 * 166e-8 + 0.001)
    mixed = -0.01 + 0.04 + 4e-6 + 0.9 * step.prefill_seconds(264, 264 * 232)
    assert step.seconds([(264, 100), *[(1, 0)] * 4]) == pytest.approx(mixed)
    cheap = replace(step, mixed=(0.0, 0.0, 0.0))
    assert cheap.seconds([(264, 100), (1, 0)]) == cheap.seconds([(264, 100)]), "a mixed step has no less to do"


def test_transfers_have_a_latency_and_a_bandwidth() -> None:
    model = PROFILE.transfer("shm")
    assert model.seconds(0) == 0
    assert model.seconds(10**9) == pytest.approx(1.001)
    assert PROFILE.transfer("redis") == TransferModel()


def test_costs_are_the_nearest_lines() -> None:
    straight = replace(PROFILE, step=StepModel(((1, 0.011), (11, 0.021)), 1e-6, ((10, 0.03), (20, 0.05)), 1e-8))
    costs = straight.costs
    assert costs.decode == pytest.approx((0.01, 0.001, 1e-6), rel=1e-6)
    assert costs.prefill == pytest.approx((0.01, 0.002, 1e-8), rel=1e-6)
    assert costs.transfer == pytest.approx((0.001, 1e-9))


def test_the_data_need_no_torch() -> None:
    code = "import sys, pdserve.profile.profile; print({'torch', 'pydantic', 'scipy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert result.stdout.strip() == "set()"


def test_a_batch_saturates_where_a_step_takes_twice_as_long() -> None:
    assert StepModel(decode=((1, 0.01), (11, 0.02), (64, 0.08))).saturation == 11
    assert StepModel(decode=((1, 0.01), (64, 0.015))).saturation == 0
