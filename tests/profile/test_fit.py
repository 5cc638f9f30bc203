"""Fits recover the coefficients that made the timings, and drift from a profile is noticed."""

import random
from dataclasses import replace

import pytest

from pdserve.profile.drift import MIN_STEPS, drift, drift_of
from pdserve.profile.fit import Timing, fit_steps, fit_transfer, least_squares
from pdserve.profile.profile import Profile, StepModel
from pdserve.tools.profiling.steps import grid, random_steps

TRUE = StepModel(
    decode=((1, 0.002), (3, 0.0021), (12, 0.004), (64, 0.006)),
    context_s=2e-7,
    prefill=((4, 0.003), (64, 0.004), (1024, 0.02)),
    pair_s=3e-8,
    cached_s=4e-7,
    prompt_s=1e-4,
    mixed=(-0.001, 0.95, 1.05),
)
LIMITS = (4095, 1024, 64)


def timings(step: StepModel) -> list[Timing]:
    return [(work, step.seconds(work)) for work in grid(*LIMITS, quick=False)]


def test_known_coefficients_are_recovered() -> None:
    step, residuals = fit_steps(timings(TRUE))
    assert step.context_s == pytest.approx(TRUE.context_s, rel=1e-3)
    assert (step.pair_s, step.cached_s, step.prompt_s) == pytest.approx((3e-8, 4e-7, 1e-4), rel=1e-3)
    assert step.mixed == pytest.approx(TRUE.mixed, rel=0.02)
    for work in random_steps(*LIMITS, 60, seed=5):
        assert step.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.03), work
    assert residuals.keys() == {"decode", "prefill", "mixed"}
    assert all(one.p99 < 0.02 and abs(one.bias) < 0.01 for one in residuals.values())


def test_noise_is_reported_as_residuals_and_no_coefficient_is_negative() -> None:
    chosen = random.Random(1)
    noisy = [(work, seconds * chosen.choice((0.8, 1.25))) for work, seconds in timings(TRUE)]
    step, residuals = fit_steps(noisy)
    assert all(0.1 < one.p50 < 0.4 for one in residuals.values())
    assert min(step.context_s, step.pair_s, step.cached_s, step.prompt_s, *(y for _, y in step.decode)) >= 0


def test_steps_of_one_kind_only_are_not_enough() -> None:
    with pytest.raises(ValueError, match="no timings of prefill steps"):
        fit_steps([([(1, 10)], 0.01)])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="not a positive number"):
        fit_steps([([(1, 10)], 0.01), ([(100, 0)], seconds)])


def test_single_points_are_constant() -> None:
    step, residuals = fit_steps([([(1, 10)], 0.01), ([(100, 0)], 0.1)])
    assert step.seconds([(1, 10)]) == pytest.approx(0.01) and step.seconds([(100, 0)]) == pytest.approx(0.1)
    assert residuals["decode"].n == 1


def test_transfers_are_a_latency_and_a_bandwidth() -> None:
    loads = [(float(size), 1e-3 + size / 2e9) for size in (1e5, 1e6, 1e7)]
    stores = [(float(size), 2e-3 + size / 1e9) for size in (1e5, 1e6, 1e7)]
    model, residuals = fit_transfer(loads, stores, 5e9)
    assert (model.latency_s, model.bytes_per_s) == pytest.approx((1e-3, 2e9))
    assert (model.store_latency_s, model.store_bytes_per_s) == pytest.approx((2e-3, 1e9))
    assert model.link_bytes_per_s == 5e9 and residuals.p99 < 1e-9


def test_least_squares_drop_what_would_be_negative() -> None:
    rows, seconds = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0]
    assert least_squares(rows, seconds, set())[1] < 0
    assert least_squares(rows, seconds, {0, 1})[1] == 0


def test_drift_is_said_in_a_sentence_and_noise_is_not() -> None:
    profile = Profile(model="demo", step=TRUE, residuals=fit_steps(timings(TRUE))[1])
    steady = timings(TRUE)
    assert drift(profile, steady) == []
    assert drift(profile, [(work, seconds * 1.1) for work, seconds in steady]) == []
    slow = replace(TRUE, decode=tuple((n, 2 * seconds) for n, seconds in TRUE.decode), context_s=4e-7)
    sentences = drift(profile, [timing for timing in timings(slow) if all(count == 1 for count, _ in timing[0])])
    assert sentences == ["The profile has drifted: decode steps take 2.00 times as long as it says."]
    assert drift_of(profile, TRUE) == [] and drift_of(profile, slow) == sentences
    assert drift(profile, [(work, seconds / 2) for work, seconds in steady][: MIN_STEPS - 1]) == []


def test_the_grid_stays_within_the_limits_of_the_engine() -> None:
    for longest, tokens, sequences in [(2, 4, 1), (20, 8, 2), (4095, 2048, 64), (131071, 8192, 256)]:
        for work in [*grid(longest, tokens, sequences, quick=True), *random_steps(longest, tokens, sequences, 30, 1)]:
            assert sum(count for count, _ in work) <= tokens and len(work) <= max(sequences, 4)
            assert all(before >= 0 and before + count <= max(longest, 2) for count, before in work)
