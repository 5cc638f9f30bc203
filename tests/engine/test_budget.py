"""The budget of a step: as many tokens of prompts as fit beside those that decode, and never none for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.budget import Budget
from pdserve.engine.sequence import Sequence
from pdserve.request import SamplingParams

# A decode step takes 10 ms and 1 ms for each sequence; a token of a prompt 0.1 ms, and 1 µs for each token that it sees.
COSTS = Costs(prefill=(0.5, 1e-4, 1e-6), decode=(0.01, 0.001, 0.0))


def sequence(tokens: int, computed: int) -> Sequence:
    return Sequence("r", [0] * tokens, tokens, tokens, SamplingParams(), b"", 16, num_computed=computed)


def budget(itl: float | None, decoding: int, tokens: int = 2048, costs: Costs = COSTS) -> Budget:
    return Budget.of(costs, tokens, [sequence(100, 99)] * decoding, itl, least=16)


def test_without_a_target_or_without_anybody_who_decodes_there_is_time_for_all() -> None:
    for one in (budget(None, 8), budget(0.001, 0)):
        assert one.take(sequence(5000, 0)) == 2048
        assert one.take(sequence(5000, 0)) == 0


def test_the_prompt_gets_what_the_decode_step_leaves() -> None:
    one = budget(0.05, 10)  # 30 ms are left
    assert one.take(sequence(100, 99)) == 1, "who decodes is no part of it"
    assert one.take(sequence(5000, 0)) == 164  # 16.4 ms, and 13.4 for what they see of each other
    assert one.take(sequence(5000, 1000)) == 0, "what is left is less than one more takes"
    deep = budget(0.05, 10)
    assert deep.take(sequence(5000, 1000)) == 26  # each takes 1.1 ms


def test_a_target_that_nothing_can_meet_leaves_a_block_per_step() -> None:
    one = budget(0.001, 10)
    assert one.has_time and one.take(sequence(100, 0)) == 16
    assert not one.has_time and one.take(sequence(100, 0)) == 0
    assert one.take(sequence(100, 99)) == 1


@given(
    itl=st.floats(1e-4, 1),
    decoding=st.integers(1, 100),
    prompts=st.lists(st.tuples(st.integers(2, 4000), st.integers(0, 4000)), max_size=6),
    a=st.floats(0, 1e-2),
    b=st.floats(0, 1e-3),
    c=st.floats(0, 1e-5),
)
def test_the_forecast_of_the_step_keeps_the_target(
    itl: float, decoding: int, prompts: list[tuple[int, int]], a: float, b: float, c: float
) -> None:
    costs = Costs(prefill=(0.0, b, c), decode=(a, b, 0.0))
    one = budget(itl, decoding, costs=costs)
    taken = [(one.take(sequence(before + tokens, before)), before) for tokens, before in prompts]
    assert sum(count for count, _ in taken) + one.tokens == 2048
    forecast = costs.step_seconds(decoding, decoding * 100)
    forecast += sum(costs.prefill_seconds(count, before) for count, before in taken if count)
    more_than_the_least = taken and (taken[0][0] > 16 or any(count for count, _ in taken[1:]))
    if more_than_the_least:
        assert forecast <= itl + 1e-9


@pytest.mark.parametrize("costs", [Costs(prefill=(0, 0, 0), decode=(0, 0, 0)), Costs(prefill=(0, 0, 1e-6))])
def test_models_without_a_slope(costs: Costs) -> None:
    assert 1 <= budget(0.5, 1, costs=costs).take(sequence(5000, 0)) <= 2048
