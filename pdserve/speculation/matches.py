"""Prompt lookup: earlier occurrences of a sequence's last tokens, and the tokens after them. A function of the tokens alone.

Shape legend: T tokens, E occurrences.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.keys import Tokens

MIN_MATCH = 3  # tokens; shorter ones recur by chance
MAX_MATCH = 24  # tokens
MAX_VOTES = 16  # latest occurrences that are compared


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of a sequence.

    Attributes:
        match: how many of the last tokens, up to MAX_MATCH, stood before these, too.
        shares: of each token, which share of the occurrences that agree with those before it has it.
        is_predicted: they are of the answer that the client has predicted.
    """

    tokens: list[int]
    match: int
    shares: list[float]
    is_predicted: bool = False


def occurrences(tokens: Tokens, least: int = MIN_MATCH, most: int = MAX_MATCH) -> tuple[int, list[int]]:
    """Return how many of the last tokens, from `least` to `most`, occur earlier, and the positions behind, the last first.

    Returns 0 and no positions if fewer than `least` do.
    """
    length, ends_E = _longest(tokens, tokens, most)
    if length < least or not len(ends_E):
        return 0, []
    return length, [end + 1 for end in ends_E[: -MAX_VOTES - 1 : -1].tolist()]


def _longest(tokens: Tokens, text: Tokens, most: int) -> tuple[int, NDArray[np.intp]]:
    """Return how many of the last tokens, up to `most`, occur in a text before its last token, and where they end there."""
    text_T, last = np.frombuffer(text, np.uint32), len(tokens) - 1
    ends_E = np.flatnonzero(text_T[:-1] == tokens[last])
    length = 1
    while len(ends_E) > 0 and length < most:
        if len(ends_E) == 1:  # numpy would take several microseconds for each token
            end, longest = int(ends_E[0]), min(most, int(ends_E[0]) + 1)
            while length < longest and text[end - length] == tokens[last - length]:
                length += 1
            break
        longer_E = ends_E[1:] if ends_E[0] < length else ends_E  # an occurrence at the very beginning ends there
        longer_E = longer_E[text_T[longer_E - length] == tokens[last - length]]
        if not len(longer_E):
            break
        ends_E, length = longer_E, length + 1
    return length, ends_E


def continue_predicted(prediction: Tokens, tokens: Tokens, num_prompt: int, most: int) -> Draft | None:
    """Return what follows in a predicted answer where it has the last tokens of the answer, which begins at `num_prompt`.

    Of several places, the one counts that is about as far from the beginning. If it is just as far, as at the beginning,
    fewer tokens than MIN_MATCH suffice. Returns None if there is no such place.
    """
    generated = len(tokens) - num_prompt
    match, ends_E = _longest(tokens, prediction, min(generated, MAX_MATCH))
    if not len(ends_E):
        return None
    end = int(ends_E[np.abs(ends_E - (generated - 1)).argmin()])
    if match < MIN_MATCH and end != generated - 1:
        return None
    found = prediction[end + 1 : end + 1 + most].tolist()
    return Draft(found, match, [1.0] * len(found), is_predicted=True)


def continue_last(tokens: Tokens, match: int, positions: list[int], most: int) -> Draft:
    """Return what follows the latest position, as prompt lookup does. Where that is all there is, it repeats itself."""
    found = tokens[positions[0] : positions[0] + most].tolist()
    while len(found) < most:
        found += found[: most - len(found)]
    return Draft(found, match, [1.0] * len(found))


def continue_by_votes(tokens: Tokens, match: int, positions: list[int], most: int) -> Draft:
    """Return what most often follows some positions, token by token, as SuffixDecoding does: a path down its tree.

    The latest position counts where two are equal. It is the only one that may reach the end, from which it repeats itself.
    """
    drafts: list[int] = []
    shares: list[float] = []
    while len(positions) > 1 and len(drafts) < most:
        at, votes = len(drafts), dict[int, list[int]]()
        for position in positions:
            if position + at < len(tokens):
                votes.setdefault(tokens[position + at], []).append(position)
        if not votes:
            break
        token, agreeing = max(votes.items(), key=lambda one: len(one[1]))
        shares.append(len(agreeing) / len(positions))
        drafts.append(token)
        positions = agreeing
    if len(drafts) < most:
        rest = continue_last(tokens, match, positions, most)
        drafts += rest.tokens[len(drafts) :]
    return Draft(drafts, match, shares + [1.0] * (len(drafts) - len(shares)))
