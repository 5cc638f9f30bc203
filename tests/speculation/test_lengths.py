"""Lengths: as many drafts as pay, by costs and measured acceptance."""

from pdserve.costs import Costs
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams
from pdserve.speculation.lengths import Acceptance, chances, compare, worthwhile
from pdserve.speculation.matches import Draft

CHEAP = Costs(decode=(0.01, 1e-4, 0.0))  # a row costs a hundredth of a step
DEAR = Costs(decode=(0.0, 0.01, 0.0))  # a step costs nothing but its rows


def sequence(length: int = 10) -> Sequence:
    return Sequence.new("a", token_array(range(length)), length, length, SamplingParams(), b"", 16)


def test_drafts_are_as_long_as_pays() -> None:
    seq = sequence()
    assert worthwhile({seq: [0.9, 0.8, 0.7, 0.6]}, [seq], CHEAP, None) == {seq: 4}
    assert worthwhile({seq: [0.9, 0.8, 0.7]}, [seq], CHEAP, None) == {seq: 2}, "a power of two"
    assert worthwhile({seq: [0.9, 0.001, 0.001]}, [seq], CHEAP, None) == {seq: 1}
    assert worthwhile({seq: [0.001]}, [seq], CHEAP, None) == {}
    assert worthwhile({seq: [0.99] * 3}, [seq], DEAR, None) == {}, "a step of two rows takes as long as two steps"


def test_drafts_stop_where_a_step_would_take_too_long() -> None:
    seq, other = sequence(), sequence()
    assert worthwhile({seq: [0.9] * 9}, [seq, other], CHEAP, 0.01062) == {seq: 4}


def test_likelier_drafts_go_first_and_long_contexts_cost_more() -> None:
    costs, one, other = Costs(decode=(0.01, 0.0, 1e-5)), sequence(), sequence(2000)
    assert worthwhile({other: [0.9], one: [0.9]}, [one, other], costs, None) == {one: 1}
    limit = CHEAP.step_seconds(3, 0)
    assert worthwhile({one: [0.5], other: [0.9]}, [one, other], CHEAP, limit) == {other: 1}


def test_under_load_only_what_is_likely_pays() -> None:
    seqs = [sequence() for _ in range(100)]
    lengths = worthwhile({seq: [0.3] * 4 for seq in seqs}, seqs, CHEAP, None)
    assert not lengths, (
        "a hundred rows take as long as the rest of the step, so a draft must be right every second time"
    )
    assert worthwhile({seqs[0]: [0.9, 0.3]}, seqs, CHEAP, None) == {seqs[0]: 1}


def test_acceptance_is_measured_by_match_and_forgotten() -> None:
    own, all_of_them = Acceptance(), Acceptance()
    draft = Draft([1, 2, 3], 3, [1.0] * 3)
    before = chances(draft, own, all_of_them)
    assert before == [0.5, 0.25, 0.125]
    for _ in range(20):
        compare(draft, [1, 2, 9], own, all_of_them)
    first, second, third = chances(draft, own, all_of_them)
    assert first > 0.95 and second > 0.9 and third < 0.1
    for _ in range(20):
        compare(draft, [9, 9, 9], own, all_of_them)
    assert chances(draft, own, all_of_them)[0] < 0.6
    before_that = own.counts[4]
    compare(draft, [1], own, all_of_them)
    assert own.counts[4] == before_that, "what has not followed yet is not compared"
