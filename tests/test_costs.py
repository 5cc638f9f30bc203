"""The cost models: what they learn of a machine whose costs are known, and what cannot break them."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.costs import HALF_LIFE_S, Costs, Fit, Meter, attended

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


def work(rng: random.Random) -> Iterator[list[tuple[int, int]]]:
    """Steps as an instance might make them: (tokens, tokens before them) of each sequence."""
    while True:
        yield [rng.choice(PREFILLS)]
        sequences, context = rng.choice(DECODES)
        yield [(1, context // sequences - 1)] * sequences


def seconds_of(machine: Costs, step: list[tuple[int, int]]) -> float:
    if step[0][0] > 1:
        return sum(machine.prefill_seconds(*one) for one in step)
    return machine.step_seconds(len(step), sum(before + 1 for _, before in step))


def watch(
    meter: Meter, machine: Costs, seed: int, steps: int = 200, noise: float = 0.0, pauses: float = 0.0, now: float = NOW
) -> None:
    rng = random.Random(seed)
    for step, _ in zip(work(rng), range(steps), strict=False):
        strange = rng.uniform(10, 100) if rng.random() < pauses else rng.uniform(1 - noise, 1 + noise)
        meter.stepped(step, True, seconds_of(machine, step) * strange, now)
        size = rng.choice(SIZES)
        meter.moved(size, machine.transfer_seconds(size) * strange, now)


def worst_ratio(found: Costs, machine: Costs) -> float:
    """By how much forecasts are off at worst, as a ratio from 1 on."""
    forecasts = [(found.prefill_seconds(*one), machine.prefill_seconds(*one)) for one in PREFILLS]
    forecasts += [(found.step_seconds(*one), machine.step_seconds(*one)) for one in DECODES]
    forecasts += [(found.transfer_seconds(size), machine.transfer_seconds(size)) for size in SIZES]
    return max(max(a / b, b / a) for a, b in forecasts)


@settings(max_examples=50, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_a_machine_that_keeps_time_is_known_exactly(machine: Costs, seed: int) -> None:
    meter = Meter()
    watch(meter, machine, seed)
    assert worst_ratio(meter.costs(NOW), machine) < 1.001


@settings(max_examples=50, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_noise_and_pauses_do_not_break_it(machine: Costs, seed: int) -> None:
    meter = Meter()
    watch(meter, machine, seed, steps=1000, noise=0.2, pauses=0.1)
    assert worst_ratio(meter.costs(NOW), machine) < 1.25


@settings(max_examples=20, deadline=None)
@given(machine=MACHINES, factor=st.floats(0.2, 5.0))
def test_a_machine_that_changes_is_followed(machine: Costs, factor: float) -> None:
    meter = Meter()
    watch(meter, machine, seed=1, steps=1000, noise=0.1)
    later = NOW + 10 * HALF_LIFE_S
    changed = Costs(*(tuple(factor * value for value in values) for values in vars(machine).values()))
    watch(meter, changed, seed=2, steps=200, noise=0.1, now=later)
    assert worst_ratio(meter.costs(later), changed) < 1.25


AMOUNT = st.floats(0, 1e12)
SECONDS = st.just(0.0) | st.floats(1e-9, 1e6)


@settings(max_examples=200, deadline=None)
@given(observations=st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT, SECONDS), max_size=30), batch=st.booleans())
def test_whatever_is_observed_no_coefficient_is_negative(
    observations: list[tuple[float, float, float, float]], batch: bool
) -> None:
    fit = Fit(0, 1, 2)
    for *amounts, seconds in observations:
        fit.observe(amounts, seconds, NOW)
        if not batch:
            fit.coefficients(NOW)
    found = fit.coefficients(NOW)
    assert (found is None) == (not any(seconds for *_, seconds in observations))
    assert all(value >= 0 and math.isfinite(value) for value in found or ())


@given(machine=MACHINES, a=st.integers(1, 10_000), b=st.integers(1, 10_000), cached=st.integers(0, 10_000))
def test_more_work_never_takes_less(machine: Costs, a: int, b: int, cached: int) -> None:
    assert machine.prefill_seconds(a + b, cached) >= machine.prefill_seconds(a, cached + b)
    assert machine.prefill_seconds(a, cached + b) >= machine.prefill_seconds(a, cached)
    assert machine.step_seconds(a + b, cached) >= machine.step_seconds(a, cached)
    assert machine.transfer_seconds(a + b) >= machine.transfer_seconds(a) > 0 == machine.transfer_seconds(0)


def test_chunks_attend_as_much_as_the_whole() -> None:
    assert attended(300, 50) == attended(100, 50) + attended(200, 150)


def test_what_was_known_at_the_start_holds_where_nothing_else_was_seen() -> None:
    machine = Costs(decode=(0.01, 1e-3, 1e-7))
    meter = Meter()
    for sequences, context in DECODES:
        step = [(1, context // sequences - 1)] * sequences
        meter.knew(step, seconds_of(machine, step))
    for _ in range(5000):  # one stream, for a long time
        meter.stepped([(1, 49)], True, 1.5 * seconds_of(machine, [(1, 49)]), NOW)
    found, later = meter.costs(NOW), meter.costs(NOW + 100 * HALF_LIFE_S)
    assert later.step_seconds(1, 50) == pytest.approx(machine.step_seconds(1, 50)), (
        "of what has gone by nothing is left"
    )
    assert found.step_seconds(1, 50) == pytest.approx(1.5 * machine.step_seconds(1, 50), rel=0.05)
    assert found.step_seconds(64, 64_000) == pytest.approx(machine.step_seconds(64, 64_000), rel=0.6)


def test_a_step_of_both_kinds_teaches_nothing() -> None:
    meter = Meter()
    meter.stepped([(1, 10), (50, 0)], True, 9.0, NOW)
    assert meter.costs(NOW) == Costs()
    meter.stepped([(50, 0), (30, 100)], True, 0.5, NOW)
    assert meter.costs(NOW).prefill != Costs().prefill and meter.costs(NOW).decode == Costs().decode


def test_one_observation_goes_to_the_coefficient_that_says_most() -> None:
    meter = Meter()
    meter.stepped([(100, 0)], True, 1.0, NOW)
    meter.stepped([(1, 50)], True, 0.1, NOW)
    meter.moved(1000, 0.5, NOW)
    a, b, c = meter.costs(NOW).prefill
    assert (a, c) == (0, 0) and b == pytest.approx(0.01)
    a, b, c = meter.costs(NOW).decode
    assert (b, c) == (0, 0) and a == pytest.approx(0.1)
    latency, per_byte = meter.costs(NOW).transfer
    assert latency == 0 and per_byte == pytest.approx(0.0005)


def test_steps_that_are_timed_together_are_told_apart() -> None:
    machine, meter = Costs(prefill=(0.05, 1e-4, 1e-8)), Meter()
    for chunks in (1, 2, 5):
        for size in (100, 700):
            steps = [[(size, i * size)] for i in range(chunks)]
            for step in steps[:-1]:
                meter.stepped(step, False, 0.0, NOW)
            meter.stepped(steps[-1], True, sum(seconds_of(machine, step) for step in steps), NOW)
            meter.stepped([], False, 1.0, NOW)  # idle
    assert meter.costs(NOW).prefill == pytest.approx(machine.prefill, rel=1e-3)
