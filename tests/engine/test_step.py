"""Step: which rows of a plan are needed, and what comes of the tokens sampled in them."""

import pytest

from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.sequence import Feature, Sequence
from pdserve.engine.step import Accepted, StepPlan
from pdserve.keys import token_array
from pdserve.request import SamplingParams, TokenLogprobs


def sequence(name: str, tokens: int, computed: int = 0, *features: Feature, max_tokens: int = 9) -> Sequence:
    ids, sampling, blocks = token_array(range(tokens)), SamplingParams(max_tokens=max_tokens), block_table([0] * 4)
    stops = frozenset({99})
    return Sequence.new(
        name,
        ids,
        tokens,
        tokens,
        sampling,
        b"",
        16,
        block_ids=blocks,
        num_computed=computed,
        stop_token_ids=stops,
        features=features,
    )


def test_only_rows_of_complete_sequences_are_sampled() -> None:
    part, prompt, decoding = sequence("a", 8), sequence("b", 5, 2), sequence("c", 7, 6)
    rows = StepPlan({part: 4, prompt: 3, decoding: 1}).rows()
    assert (rows.last, rows.sampled, rows.ahead) == ([6, 7], [prompt, decoding], [0, 0])
    assert not rows.read and not rows.hidden and not rows.completed


def test_sequences_that_wait_for_a_prompt_are_sampled_from_its_row() -> None:
    first, other = sequence("a", 3), sequence("b", 3)
    first.lead([other])
    rows = StepPlan({sequence("c", 2, 1): 1, first: 3}).rows()
    assert rows.last == [0, 3] and rows.sampled_from == [0, 1, 1] and rows.sampled[1:] == [first, other]


class Instead(Feature):
    has_output = False

    def hidden_rows(self, seq: Sequence, count: int) -> range:
        return range(1, count)


def test_a_feature_in_place_of_an_output_is_completed_and_not_sampled() -> None:
    feature, before = Instead(), sequence("a", 2)
    seq = sequence("b", 6, 0, feature)
    first, last = StepPlan({before: 2, seq: 4}).rows(), StepPlan({before: 2, seq: 6}).rows()
    assert first.hidden == [(feature, seq, range(3, 6))] and not first.completed
    assert last.completed == [(feature, seq)] and last.sampled == [before]


@pytest.mark.parametrize(("sampled", "computed"), [([5, 6, 7], 3), ([5, 8, 7], 2), ([4, 6, 7], 1)])
def test_drafts_are_accepted_as_far_as_the_model_samples_them(sampled: list[int], computed: int) -> None:
    seq = sequence("a", 4, 3)
    plan = StepPlan({seq: 1}, {seq: [5, 6]})
    assert plan.num_tokens(seq) == 3 and plan.rows().last == [0, 1, 2]
    logprobs = TokenLogprobs(-1.0, ())
    outcome = plan.outcome([(seq, token, logprobs) for token in sampled])
    assert outcome == {seq: Accepted(computed, sampled[:computed], [logprobs] * computed)}


def test_nothing_is_accepted_behind_a_token_that_ends_the_sequence() -> None:
    accepted = Accepted(3, [5, 99, 7])
    accepted.cut_at_end(sequence("a", 4, 3))
    assert accepted == Accepted(2, [5, 99])


def test_of_several_tokens_that_end_the_sequence_the_first_one_counts() -> None:
    accepted = Accepted(5, [5, 99, 7, 99, 8])
    accepted.cut_at_end(sequence("a", 4, 3))
    assert accepted == Accepted(2, [5, 99])
