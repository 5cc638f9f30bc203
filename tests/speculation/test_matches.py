"""Matches: what is found of a text's last words, and what is taken to follow."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.keys import token_array
from pdserve.speculation.matches import (
    MAX_VOTES,
    Draft,
    continue_by_votes,
    continue_last,
    continue_predicted,
    occurrences,
)


@pytest.mark.parametrize(
    ("tokens", "match", "positions"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, [3]),
        ([9, 2, 3, 4, 5, 1, 2, 3], 0, []),  # two tokens are too few
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 3, [7, 3]),
        ([5, 1, 2, 3, 7, 4, 1, 2, 3, 8, 5, 1, 2, 3], 4, [4]),
        ([6, 6, 6, 6, 6], 4, [4]),
        ([1], 0, []),
    ],
)
def test_the_longest_matches_are_found(tokens: list[int], match: int, positions: list[int]) -> None:
    assert occurrences(token_array(tokens)) == (match, positions)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 5), st.integers(5, 9))
def test_matches_are_those_of_a_plain_search(tokens: list[int], least: int, most: int) -> None:
    match, positions = occurrences(token_array(tokens), least, most)
    size = len(tokens)
    ends = {n: [e for e in range(n, size) if tokens[e - n : e] == tokens[size - n :]] for n in range(1, most + 1)}
    longest = max((n for n, found in ends.items() if found), default=0)
    expected = ends[longest][::-1][:MAX_VOTES] if longest >= least else []
    assert positions == expected and match == (longest if expected else 0)


def test_what_reaches_the_end_repeats_itself() -> None:
    tokens = token_array([1, 2, 3, 1, 2, 3])
    assert continue_last(tokens, 3, [3], 7).tokens == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    ("answer", "match", "drafts"),
    [
        ([1], 1, [2, 3, 4]),  # its beginning
        ([2], 0, None),  # not its beginning, and too few
        ([8, 9, 2, 3, 4], 3, [5, 1, 2]),  # elsewhere
        ([9, 2], 1, [3, 4, 5]),  # one token is another, and those behind it are where they were expected
        ([8, 8, 8, 8, 8, 8, 2, 3, 4], 3, [6]),  # the place nearer to that of the answer
        ([2, 3, 4, 6], 0, None),  # it ends there
        ([7], 0, None),
    ],
)
def test_what_a_client_has_predicted_is_found(answer: list[int], match: int, drafts: list[int] | None) -> None:
    prediction, prompt = token_array([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]), [1, 2, 3, 4, 9]
    draft = continue_predicted(prediction, token_array(prompt + answer), len(prompt), 3)
    assert draft == (None if drafts is None else Draft(drafts, match, [1.0] * len(drafts), is_predicted=True))


def test_what_follows_most_often_is_proposed() -> None:
    tokens = token_array([1, 5, 6, 1, 5, 7, 1, 5, 6, 1, 8, 9, 1])
    draft = continue_by_votes(tokens, 3, [10, 7, 4, 1], 3)
    assert draft.tokens == [5, 6, 1]
    assert draft.shares == [3 / 4, 2 / 3, 1.0] and all(0 < share <= 1 for share in draft.shares)


@given(st.lists(st.integers(0, 1), min_size=6, max_size=60), st.integers(1, 16))
def test_as_many_tokens_as_asked_for_are_found_wherever_there_is_a_match(tokens: list[int], most: int) -> None:
    array = token_array(tokens)
    match, positions = occurrences(array)
    if positions:
        draft = continue_by_votes(array, match, positions, most)
        assert len(draft.tokens) == len(draft.shares) == most
        assert all(a > b for a, b in pairwise(positions))
