"""Matches: what is found of a text's last words, and what is taken to follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.keys import token_array
from pdserve.speculation.matches import (
    LEVELS,
    MAX_VOTES,
    SEPARATOR,
    Draft,
    Match,
    continue_by_votes,
    continue_last,
    continue_predicted,
    find,
)


def own(tokens: list[int]) -> Match | None:
    """Return where tokens match best in what comes before them."""
    text = token_array(tokens)
    return find(text, text)


@pytest.mark.parametrize(
    ("tokens", "length", "positions"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, [3]),
        ([9, 2, 3, 4, 5, 1, 2, 3], 0, []),  # two tokens are too few
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 3, [7, 3]),
        ([*range(6), 7, 3, 4, 5, 9, *range(6)], 6, [6]),  # longer matches count alone
        ([6, 6, 6, 6, 6], 3, [4, 3]),
        ([0, 0, 1, 0], 0, []),
        ([1], 0, []),
    ],
)
def test_the_longest_matches_are_found(tokens: list[int], length: int, positions: list[int]) -> None:
    match = own(tokens)
    assert ((match.length, match.positions) if match else (0, [])) == (length, positions)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(0, 2), max_size=60))
def test_matches_are_those_of_a_plain_search(tokens: list[int], text: list[int]) -> None:
    for found, where, ends in (
        (own(tokens), tokens, range(len(tokens))),
        (find(token_array([*text, SEPARATOR]), token_array(tokens)), text, range(len(text) + 1)),
    ):
        latest = [e for e in ends if e >= 3 and where[e - 3 : e] == tokens[-3:]][-MAX_VOTES:]
        by_level = {n: [e for e in latest if e >= n and where[e - n : e] == tokens[-n:]] for n in LEVELS}
        longest = max((n for n, positions in by_level.items() if positions and len(tokens) >= n), default=0)
        if found is None:
            assert not longest
        else:
            assert (found.length, found.positions) == (longest, by_level[longest][::-1])


def test_of_many_matches_the_latest_count_and_the_text_may_grow() -> None:
    text = token_array([1, 2, 3] * 40)
    for length in (120, 123):
        match = find(text, text, 2)
        assert match == Match(text, 24, [length - 3, length - 6])
        text.extend([1, 2, 3])


def test_what_reaches_the_end_repeats_itself_and_what_reaches_another_answer_ends() -> None:
    match = Match(token_array([1, 2, 3, 1, 2, 3]), 3, [3])
    assert continue_last(match, 7).tokens == continue_by_votes(match, 7).tokens == [1, 2, 3, 1, 2, 3, 1]
    text = token_array([1, 2, SEPARATOR, 1, 2, 3, SEPARATOR, 1, 2, SEPARATOR])
    assert continue_last(Match(text, 3, [4]), 4).tokens == [2, 3]
    assert continue_by_votes(Match(text, 3, [8, 4, 1]), 4) == Draft([2], 3, [1.0])
    assert continue_last(Match(text, 3, [2]), 4).tokens == []


@pytest.mark.parametrize(
    ("answer", "match", "drafts", "position"),
    [
        ([1], 1, [2, 3, 4], 1),  # its beginning
        ([2], 0, None, 0),  # not its beginning, and too few
        ([8, 9, 2, 3, 4], 3, [5, 1, 2], 4),  # elsewhere
        ([9, 2], 1, [3, 4, 5], 2),  # one token is another, and those behind it are where they were expected
        ([8, 8, 8, 8, 8, 8, 2, 3, 4], 3, [6], 9),  # the place nearer to that of the answer
        ([2, 3, 4, 6], 0, None, 0),  # it ends there
        ([7], 0, None, 0),
    ],
)
def test_what_a_client_has_predicted_is_found(
    answer: list[int], match: int, drafts: list[int] | None, position: int
) -> None:
    prediction, tokens = token_array([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]), token_array([1, 2, 3, 4, 9, *answer])
    draft = continue_predicted(prediction, tokens, 5, 3)
    expected = (
        None if drafts is None else Draft(drafts, match, [1.0] * len(drafts), is_predicted=True, position=position)
    )
    assert draft == expected


def test_what_follows_most_often_is_proposed() -> None:
    tokens = token_array([1, 5, 6, 1, 5, 7, 1, 5, 6, 1, 8, 9, 1])
    draft = continue_by_votes(Match(tokens, 3, [10, 7, 4, 1]), 3)
    assert draft.tokens == [5, 6, 1]
    assert draft.shares == [3 / 4, 2 / 3, 1.0] and all(0 < share <= 1 for share in draft.shares)


@given(st.lists(st.integers(0, 1), min_size=6, max_size=60), st.integers(1, 16))
def test_as_many_tokens_as_asked_for_are_found_wherever_there_is_a_match(tokens: list[int], most: int) -> None:
    if (match := own(tokens)) is not None:
        draft = continue_by_votes(match, most)
        assert len(draft.tokens) == len(draft.shares) == most
