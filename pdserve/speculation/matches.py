"""Matches: other places of a sequence's last tokens, and what follows there. A function of the tokens alone.

A lookup reads all tokens before, four bytes of each; a step's attention reads kilobytes of each. So there is no index of
them, which would cost more where prompts are long and answers short.
"""

from dataclasses import dataclass

import numpy as np

from pdserve.keys import Tokens

LEVELS = (3, 6, 12, 24)  # tokens of a match, as far as matches are told apart; shorter ones recur by chance
MAX_VOTES = 16  # occurrences that are looked at, the latest ones
SEPARATOR = 2**32 - 1  # behind each of several texts; no token, so that nothing matches across it


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow.

    Attributes:
        match: how many of the last tokens stood before these, too: a level, or fewer.
        shares: of each token, which share of the occurrences that agree with those before it has it.
        is_predicted: they are of the answer that the client has predicted, in which the first is at `position`.
    """

    tokens: list[int]
    match: int
    shares: list[float]
    is_predicted: bool = False
    position: int = 0


@dataclass(frozen=True)
class Match:
    """Positions in a text behind what a sequence ends with, the last first; `length` tokens are alike, a level."""

    text: Tokens
    length: int
    positions: list[int]


def find(text: Tokens, tokens: Tokens, most: int = MAX_VOTES) -> Match | None:
    """Return where a text has what a sequence ends with, best matches only, but for the text's own end; None if nowhere.

    Args:
        most: occurrences that count, the latest ones.
    """
    if len(tokens) < LEVELS[0] or len(text) <= LEVELS[0]:
        return None
    third, second, last = tokens[-3:]
    text_N = np.frombuffer(text, np.uint32)
    (at_M,) = (text_N[2:-1] == last).nonzero()
    if len(at_M):
        at_M = at_M[text_N[at_M + 1] == second]
        at_M = at_M[text_N[at_M] == third]
    if not len(at_M):
        return None
    length, positions = LEVELS[0], (at_M[: -most - 1 : -1] + LEVELS[0]).tolist()
    for level in LEVELS[1:]:
        tail = tokens[-level:]
        longer = [at for at in positions if text[max(0, at - level) : at] == tail]
        if len(tail) < level or not longer:
            break
        length, positions = level, longer
    return Match(text, length, positions)


def continue_predicted(predicted: Tokens, tokens: Tokens, num_prompt: int, most: int) -> Draft | None:
    """Return what follows in a predicted answer where it has the last tokens of the answer, which begins at `num_prompt`.

    Of several places, the one counts that is about as far from the beginning. If it is just as far, one token suffices.
    Returns None if there is no such place.
    """
    generated = len(tokens) - num_prompt
    match = find(predicted, tokens) if generated >= LEVELS[0] else None
    if match is not None:
        length, position = match.length, min(match.positions, key=lambda at: abs(at - generated))
    elif predicted[generated - 1 : generated] == tokens[-1:]:
        length, position = 1, generated
    else:
        return None
    found = predicted[position : position + most].tolist()
    return Draft(found, length, [1.0] * len(found), is_predicted=True, position=position) if found else None


def continue_last(match: Match, most: int) -> Draft:
    """Return what follows the latest position, as prompt lookup does. Where that is all there is, it repeats itself."""
    found = match.text[match.positions[0] : match.positions[0] + most].tolist()
    if SEPARATOR in found:
        del found[found.index(SEPARATOR) :]
        return Draft(found, match.length, [1.0] * len(found))
    while len(found) < most:
        found += found[: most - len(found)]
    return Draft(found, match.length, [1.0] * len(found))


def continue_by_votes(match: Match, most: int) -> Draft:
    """Return what most often follows some positions, token by token, as SuffixDecoding does: a path down its tree.

    The latest position counts where two are equal. It is the only one that may reach the end, from which it repeats itself.
    """
    drafts: list[int] = []
    shares: list[float] = []
    text, positions = match.text, match.positions
    while len(positions) > 1 and len(drafts) < most:
        at, votes = len(drafts), dict[int, list[int]]()
        for position in positions:
            if position + at < len(text):
                votes.setdefault(text[position + at], []).append(position)
        if not votes:
            break
        token, agreeing = max(votes.items(), key=lambda one: len(one[1]))
        if token == SEPARATOR:
            return Draft(drafts, match.length, shares)
        shares.append(len(agreeing) / len(positions))
        drafts.append(token)
        positions = agreeing
    if len(drafts) < most:
        rest = continue_last(Match(text, match.length, positions), most).tokens[len(drafts) :]
        drafts += rest
        shares += [1.0] * len(rest)
    return Draft(drafts, match.length, shares)
