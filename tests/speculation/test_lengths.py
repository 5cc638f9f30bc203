"""Lengths: as many drafts as pay, by costs and measured acceptance."""

from collections.abc import Callable

import pytest

from pdserve.costs import Costs
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams
from pdserve.speculation.lengths import Acceptance, Step, bucket, chances, common_length, worthwhile
from pdserve.speculation.matches import Draft

CHEAP = Costs(decode=(0.01, 1e-4, 0.0))  # a row costs a hundredth of a step
DEAR = Costs(decode=(0.0, 0.01, 0.0))  # a step costs nothing but its rows


def sequence(length: int = 10, computed: int = -1) -> Sequence:
    return Sequence.new(
        "a", token_array(range(length)), length, length, SamplingParams(), b"", 16, num_computed=length + computed
    )


def lengths(
    expected: dict[Sequence, list[float]],
    seqs: list[Sequence],
    costs: Costs,
    most_seconds: float | None = None,
    extra: Callable[[int], float] = lambda rows: 0.0,
) -> dict[Sequence, int]:
    return worthwhile(Step.forecast(dict.fromkeys(seqs, 1), costs, most_seconds, extra), expected)


def test_drafts_are_as_long_as_pays() -> None:
    seq = sequence()
    assert lengths({seq: [0.9, 0.8, 0.7, 0.6]}, [seq], CHEAP) == {seq: 4}
    assert lengths({seq: [0.9, 0.8, 0.7]}, [seq], CHEAP) == {seq: 2}, "a power of two"
    assert lengths({seq: [0.9, 0.001, 0.001]}, [seq], CHEAP) == {seq: 1}
    assert lengths({seq: [0.001]}, [seq], CHEAP) == {}
    assert lengths({seq: [0.99] * 3}, [seq], DEAR) == {}, "a step of two rows takes as long as two steps"


def test_drafts_stop_where_a_step_would_take_too_long() -> None:
    seq, other = sequence(), sequence()
    assert lengths({seq: [0.9] * 9}, [seq, other], CHEAP, 0.01062) == {seq: 4}
    assert Step.forecast({seq: 1}, CHEAP, 0.0101, lambda rows: 0.0).least_chance == 1


def test_drafts_of_a_model_are_as_long_as_pays_with_its_own_steps() -> None:
    step = Step.forecast({sequence(): 1, sequence(): 1}, CHEAP, None, Step.extra_seconds)
    row = 2 * step.row
    assert common_length(step, [0.99, 0.99], 8, row) == 8
    assert common_length(step, [0.99, 0.99], 8, row + step.seconds) == 0, "it is as slow as the model itself"
    assert [common_length(step, [chance, 0.6], 8, row + step.seconds / 10) for chance in (0.1, 0.6, 0.9)] == [2, 3, 6]
    assert common_length(step, [0.01, 0.01], 8, row) == 0
    assert common_length(Step(1, 0.0, 0.0, 0.0), [0.5], 3, 0.0) == 3, "nothing takes time, as in a simulation"


def test_likelier_drafts_go_first_and_long_contexts_cost_more() -> None:
    costs, one, other = Costs(decode=(0.01, 0.0, 1e-5)), sequence(), sequence(2000)
    assert lengths({other: [0.9], one: [0.9]}, [one, other], costs) == {one: 1}
    limit = CHEAP.step_seconds(3, 0)
    assert lengths({one: [0.5], other: [0.9]}, [one, other], CHEAP, limit) == {other: 1}


def test_under_load_only_what_is_likely_pays() -> None:
    seqs = [sequence() for _ in range(100)]
    assert not lengths({seq: [0.3] * 4 for seq in seqs}, seqs, CHEAP), (
        "a hundred rows take as long as the rest of the step, so a draft must be right every second time"
    )
    assert lengths({seqs[0]: [0.9, 0.3]}, seqs, CHEAP) == {seqs[0]: 1}
    least = Step.forecast(dict.fromkeys(seqs, 1), CHEAP, None, lambda rows: 0.0).least_chance
    assert 0.5 < least < 0.6 and Step.forecast({seqs[0]: 1}, DEAR, None, lambda rows: 0.0).least_chance > 1


def test_steps_that_are_not_recorded_must_give_more() -> None:
    seq = sequence()

    def recorded(*sizes: int) -> Callable[[int], float]:
        return lambda rows: 0.0 if rows in sizes else 0.01  # as long as the step itself

    assert lengths({seq: [0.9] * 4}, [seq], CHEAP, extra=recorded(1, 2, 5)) == {seq: 4}
    assert lengths({seq: [0.9] * 2}, [seq], CHEAP, extra=recorded(1, 2, 5)) == {seq: 1}, "3 rows are not recorded"
    assert lengths({seq: [0.9]}, [seq], CHEAP, extra=recorded(1)) == {}
    assert lengths({seq: [0.9] * 16}, [seq], CHEAP, extra=recorded(1)) == {seq: 16}, "it pays nevertheless"
    assert lengths({seq: [0.9]}, [seq], CHEAP, extra=recorded(9)) == {seq: 1}, "neither is the step without"


def test_beside_a_prompt_a_draft_costs_little() -> None:
    seq, prompt = sequence(), sequence(900, computed=-500)
    costs = Costs(prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.01, 0.0))
    alone = Step.forecast({seq: 1}, costs, None, lambda rows: 9.0)
    beside = Step.forecast({seq: 1, prompt: 500}, costs, None, lambda rows: 9.0)
    assert (alone.seconds, beside.seconds) == pytest.approx((0.01, 0.51)) and beside.num_seqs == 1
    assert worthwhile(alone, {seq: [0.9]}) == {} and worthwhile(beside, {seq: [0.9]}) == {seq: 1}


def test_acceptance_is_measured_by_match_and_forgotten() -> None:
    own, all_of_them = Acceptance(), Acceptance()
    draft = Draft([1, 2, 3, 4], 3, [1.0, 0.5, 1.0, 1.0])
    assert chances(draft, own, all_of_them) == [0] * 4, "nothing is expected of what has never proved right"
    predicted = Draft([1, 2], 3, [1.0] * 2, is_predicted=True)
    assert chances(predicted, own, all_of_them) == [0.5, 0.25], "a client is trusted"
    for table in (own, all_of_them):
        for is_right in [True] * 20:
            table.record(bucket(4), is_right)
    first, second, third, fourth = chances(draft, own, all_of_them)
    assert 0.9 < first < 1 and second == first**2 / 2 and third == first**3 / 2, (
        "half of the places have the second token"
    )
    assert fourth == pytest.approx(third * first, rel=0.05), "longer matches are no worse than shorter ones"
    for _ in range(100):
        own.record(bucket(5), False)
    assert chances(draft, own, all_of_them)[0] < 0.1 < chances(draft, Acceptance(), all_of_them)[0]
    assert [bucket(match) for match in (0, 3, 5, 6, 11, 12, 23, 24, 99)] == [1, 1, 1, 2, 2, 3, 3, 4, 4]
