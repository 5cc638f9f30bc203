"""Matches: earlier occurrences of a sequence's last tokens, and what followed them. A function of the tokens alone.

Shape legend: T tokens, E occurrences.
"""

from dataclasses import dataclass

import numpy as np

from pdserve.keys import Tokens

MIN_MATCH = 3  # tokens; shorter ones recur by chance
MAX_MATCH = 24  # tokens
MAX_VOTES = 16  # occurrences that are looked at, the latest ones


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow.

    Attributes:
        match: how many of the last tokens, up to MAX_MATCH, stood before these, too.
        shares: of each token, which share of the occurrences that agree with those before it has it.
    """

    tokens: list[int]
    match: int
    shares: list[float]


def occurrences(tokens: Tokens, least: int = MIN_MATCH, most: int = MAX_MATCH) -> tuple[int, list[int]]:
    """Return how many of the last tokens, from `least` to `most`, occur earlier, and the positions behind, the last first.

    Returns 0 and no positions if fewer than `least` do.
    """
    ids_T = np.frombuffer(tokens, np.uint32)
    last = len(ids_T) - 1
    ends_E = np.flatnonzero(ids_T[:last] == ids_T[last])
    length = 1
    while len(ends_E) > 0 and length < most:
        if len(ends_E) == 1:  # numpy would take several microseconds for each token
            end, longest = int(ends_E[0]), min(most, int(ends_E[0]) + 1)
            while length < longest and tokens[end - length] == tokens[last - length]:
                length += 1
            break
        longer_E = ends_E[1:] if ends_E[0] < length else ends_E  # an occurrence at the very beginning ends there
        longer_E = longer_E[ids_T[longer_E - length] == ids_T[last - length]]
        if not len(longer_E):
            break
        ends_E, length = longer_E, length + 1
    if length < least or not len(ends_E):
        return 0, []
    return length, [end + 1 for end in ends_E[: -MAX_VOTES - 1 : -1].tolist()]


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
