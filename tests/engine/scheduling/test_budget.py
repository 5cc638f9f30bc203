"""Step budget: prompts get the time that decoding sequences leave, and always make progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.scheduling.budget import StepBudget
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.request import SamplingParams

# A decode step takes 10 ms and 1 ms per sequence; a prompt token 0.1 ms, and 1 µs per token that it attends to.
COSTS = Costs(prefill=(0.5, 1e-4, 1e-6), decode=(0.01, 0.001, 0.0))


def sequence(tokens: int, computed: int) -> Sequence:
    return Sequence.new(
        "r", token_array([0] * tokens), tokens, tokens, SamplingParams(), b"", 16, num_computed=computed
    )


def budget(itl: float | None, decoding: int, tokens: int = 2048, costs: Costs = COSTS) -> StepBudget:
    return StepBudget.for_step(costs, tokens, [sequence(100, 99)] * decoding, itl, min_chunk=16, plan=StepPlan())


def test_time_is_unlimited_without_target_or_decoding_sequences() -> None:
    for step in (budget(None, 8), budget(0.001, 0)):
        assert step.allocate(sequence(5000, 0)) == 2048
        assert step.allocate(sequence(5000, 0)) == 0


def test_prompt_gets_the_time_that_decoding_leaves() -> None:
    step = budget(0.05, 10)  # 30 ms are left
    assert step.allocate(sequence(100, 99)) == 1, "decoding sequences do not use prompt time"
    assert step.allocate(sequence(5000, 0)) == 164  # 16.4 ms, and 13.4 ms for their attention to each other
    assert step.allocate(sequence(5000, 1000)) == 0, "the rest is less than one token takes"
    step = budget(0.05, 10)
    assert step.allocate(sequence(5000, 1000)) == 26  # each takes 1.1 ms


def test_unreachable_target_leaves_a_minimal_chunk_per_step() -> None:
    step = budget(0.001, 10)
    assert step.min_chunk > 0 and step.allocate(sequence(100, 0)) == 16
    assert step.min_chunk == step.affordable(0) == 0 and step.allocate(sequence(100, 0)) == 0
    assert step.allocate(sequence(100, 99)) == 1


@given(
    itl=st.floats(1e-4, 1),
    decoding=st.integers(1, 100),
    prompts=st.lists(st.tuples(st.integers(2, 4000), st.integers(0, 4000)), max_size=6),
    a=st.floats(0, 1e-2),
    b=st.floats(0, 1e-3),
    c=st.floats(0, 1e-5),
)
def test_forecast_of_the_step_meets_the_target(
    itl: float, decoding: int, prompts: list[tuple[int, int]], a: float, b: float, c: float
) -> None:
    costs = Costs(prefill=(0.0, b, c), decode=(a, b, 0.0))
    step = budget(itl, decoding, costs=costs)
    taken = [(step.allocate(sequence(before + tokens, before)), before) for tokens, before in prompts]
    assert sum(count for count, _ in taken) + step.tokens == 2048
    forecast = costs.step_seconds(decoding, decoding * 100)
    forecast += sum(costs.prefill_seconds(count, before) for count, before in taken if count)
    exceeds_min_chunk = taken and (taken[0][0] > 16 or any(count for count, _ in taken[1:]))
    if exceeds_min_chunk:
        assert forecast <= itl + 1e-9


@pytest.mark.parametrize("costs", [Costs(prefill=(0, 0, 0), decode=(0, 0, 0)), Costs(prefill=(0, 0, 1e-6))])
def test_costs_without_slope(costs: Costs) -> None:
    assert 1 <= budget(0.5, 1, costs=costs).allocate(sequence(5000, 0)) <= 2048


def test_what_is_set_aside_for_a_prompt_is_there_whatever_another_one_takes() -> None:
    """A tenant gets at least a token, and one behind a long context may take longer than its share has left."""
    step, long = budget(None, 1), sequence(100, 0)
    step.shares = {long.tenant: 5e-4}
    assert step.room(long) == 4
    step.keep_half(long)
    assert step.allocate(sequence(4002, 4000)) == 1, "it takes 4.1 ms"
    assert step.allocate(long) == 2
