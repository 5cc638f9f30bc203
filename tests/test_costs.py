"""Cost models: they converge to the costs of a simulated machine, and stay valid under any observations."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.costs import HALF_LIFE_S, CostMeter, Costs, OnlineFit, attention_pairs

NOW = 100.0
SHARE = st.floats(0.0, 1.0)
MACHINES = st.builds(
    Costs,
    prefill=st.tuples(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7)),
    decode=st.tuples(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-6)),
    transfer=st.tuples(st.floats(1e-5, 0.1), st.floats(1e-11, 1e-8)),
)
PREFILLS = [(16, 0), (64, 0), (500, 0), (2048, 0), (64, 4000), (2048, 30_000), (512, 512)]
DECODES = [(1, 50), (8, 1000), (64, 64_000), (32, 200), (2, 30_000)]
SIZES = [1 << 15, 1 << 21, 1 << 27]


def random_steps(rng: random.Random) -> Iterator[list[tuple[int, int]]]:
    """Yield plausible steps: (tokens, cached tokens before them) of each sequence."""
    while True:
        yield [rng.choice(PREFILLS)]
        sequences, context = rng.choice(DECODES)
        yield [(1, context // sequences - 1)] * sequences


def seconds_of(machine: Costs, step: list[tuple[int, int]]) -> float:
    if step[0][0] > 1:
        return sum(machine.prefill_seconds(*one) for one in step)
    return machine.step_seconds(len(step), sum(before + 1 for _, before in step))


def simulate(
    meter: CostMeter,
    machine: Costs,
    seed: int,
    steps: int = 200,
    noise: float = 0.0,
    pauses: float = 0.0,
    now: float = NOW,
) -> None:
    rng = random.Random(seed)
    for step, _ in zip(random_steps(rng), range(steps), strict=False):
        slowdown = rng.uniform(10, 100) if rng.random() < pauses else rng.uniform(1 - noise, 1 + noise)
        meter.record_step(step, True, seconds_of(machine, step) * slowdown, now)
        size = rng.choice(SIZES)
        meter.record_transfer(size, machine.transfer_seconds(size) * slowdown, now)


def worst_ratio(fitted: Costs, machine: Costs) -> float:
    """Return the largest error of the forecasts, as a ratio of at least 1."""
    forecasts = [(fitted.prefill_seconds(*one), machine.prefill_seconds(*one)) for one in PREFILLS]
    forecasts += [(fitted.step_seconds(*one), machine.step_seconds(*one)) for one in DECODES]
    forecasts += [(fitted.transfer_seconds(size), machine.transfer_seconds(size)) for size in SIZES]
    return max(max(a / b, b / a) for a, b in forecasts)


@settings(max_examples=50, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_fit_is_exact_for_a_deterministic_machine(machine: Costs, seed: int) -> None:
    meter = CostMeter()
    simulate(meter, machine, seed)
    assert worst_ratio(meter.costs(NOW), machine) < 1.001


@settings(max_examples=50, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_fit_is_robust_to_noise_and_pauses(machine: Costs, seed: int) -> None:
    meter = CostMeter()
    simulate(meter, machine, seed, steps=1000, noise=0.2, pauses=0.1)
    assert worst_ratio(meter.costs(NOW), machine) < 1.25


@settings(max_examples=20, deadline=None)
@given(machine=MACHINES, factor=st.floats(0.2, 5.0))
def test_fit_follows_a_machine_that_changes(machine: Costs, factor: float) -> None:
    meter = CostMeter()
    simulate(meter, machine, seed=1, steps=1000, noise=0.1)
    later = NOW + 10 * HALF_LIFE_S
    changed = Costs(*(tuple(factor * value for value in values) for values in vars(machine).values()))
    simulate(meter, changed, seed=2, steps=200, noise=0.1, now=later)
    assert worst_ratio(meter.costs(later), changed) < 1.25


AMOUNT = st.floats(0, 1e12)
SECONDS = st.just(0.0) | st.floats(1e-9, 1e6)


@settings(max_examples=200, deadline=None)
@given(observations=st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT, SECONDS), max_size=30), batch=st.booleans())
def test_coefficients_are_never_negative(observations: list[tuple[float, float, float, float]], batch: bool) -> None:
    fit = OnlineFit(0, 1, 2)
    for *amounts, seconds in observations:
        fit.observe(amounts, seconds, NOW)
        if not batch:
            fit.coefficients(NOW)
    fitted = fit.coefficients(NOW)
    assert (fitted is None) == (not any(seconds for *_, seconds in observations))
    assert all(value >= 0 and math.isfinite(value) for value in fitted or ())


@given(machine=MACHINES, a=st.integers(1, 10_000), b=st.integers(1, 10_000), cached=st.integers(0, 10_000))
def test_more_work_never_costs_less(machine: Costs, a: int, b: int, cached: int) -> None:
    assert machine.prefill_seconds(a + b, cached) >= machine.prefill_seconds(a, cached + b)
    assert machine.prefill_seconds(a, cached + b) >= machine.prefill_seconds(a, cached)
    assert machine.step_seconds(a + b, cached) >= machine.step_seconds(a, cached)
    assert machine.transfer_seconds(a + b) >= machine.transfer_seconds(a) > 0 == machine.transfer_seconds(0)


def test_attention_pairs_of_chunks_add_up_to_those_of_the_whole() -> None:
    assert attention_pairs(300, 50) == attention_pairs(100, 50) + attention_pairs(200, 150)


def test_the_first_observation_changes_a_fit_that_was_constant() -> None:
    fit = OnlineFit(1, 0)
    fit.calibrate((1, 10), 1.0)
    calibrated = fit.coefficients(NOW)
    assert fit.coefficients(NOW + 1) == calibrated is not None
    fit.observe((1, 10), 2.0, NOW + 1)
    observed = fit.coefficients(NOW + 1)
    assert observed is not None and observed[1] > calibrated[1]
    later = fit.coefficients(NOW + 5 * HALF_LIFE_S)
    assert later is not None and calibrated[1] < later[1] < observed[1], "it decays"


def test_calibration_holds_where_nothing_else_was_observed() -> None:
    machine = Costs(decode=(0.01, 1e-3, 1e-7))
    meter = CostMeter()
    for sequences, context in DECODES:
        step = [(1, context // sequences - 1)] * sequences
        meter.calibrate_step(step, seconds_of(machine, step))
    for _ in range(5000):  # one stream, for a long time
        meter.record_step([(1, 49)], True, 1.5 * seconds_of(machine, [(1, 49)]), NOW)
    found, later = meter.costs(NOW), meter.costs(NOW + 100 * HALF_LIFE_S)
    assert later.step_seconds(1, 50) == pytest.approx(machine.step_seconds(1, 50)), "old observations have decayed"
    assert found.step_seconds(1, 50) == pytest.approx(1.5 * machine.step_seconds(1, 50), rel=0.05)
    assert found.step_seconds(64, 64_000) == pytest.approx(machine.step_seconds(64, 64_000), rel=0.6)


def test_mixed_steps_are_ignored() -> None:
    meter = CostMeter()
    meter.record_step([(1, 10), (50, 0)], True, 9.0, NOW)
    assert meter.costs(NOW) == Costs()
    meter.record_step([(50, 0), (30, 100)], True, 0.5, NOW)
    assert meter.costs(NOW).prefill != Costs().prefill and meter.costs(NOW).decode == Costs().decode


def test_a_single_observation_is_explained_by_the_most_significant_coefficient() -> None:
    meter = CostMeter()
    meter.record_step([(100, 0)], True, 1.0, NOW)
    meter.record_step([(1, 50)], True, 0.1, NOW)
    meter.record_transfer(1000, 0.5, NOW)
    a, b, c = meter.costs(NOW).prefill
    assert (a, c) == (0, 0) and b == pytest.approx(0.01)
    a, b, c = meter.costs(NOW).decode
    assert (b, c) == (0, 0) and a == pytest.approx(0.1)
    latency, per_byte = meter.costs(NOW).transfer
    assert latency == 0 and per_byte == pytest.approx(0.0005)


def test_chunks_timed_together_are_separated() -> None:
    machine, meter = Costs(prefill=(0.05, 1e-4, 1e-8)), CostMeter()
    for chunks in (1, 2, 5):
        for size in (100, 700):
            steps = [[(size, i * size)] for i in range(chunks)]
            for step in steps[:-1]:
                meter.record_step(step, False, 0.0, NOW)
            meter.record_step(steps[-1], True, sum(seconds_of(machine, step) for step in steps), NOW)
            meter.record_step([], False, 1.0, NOW)  # idle
    assert meter.costs(NOW).prefill == pytest.approx(machine.prefill, rel=1e-3)
