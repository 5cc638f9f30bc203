"""Matches: other occurrences of a sequence's last tokens, and what follows them. A function of the tokens alone."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pdserve.keys import Tokens

LEVELS = (3, 6, 12, 24)  # tokens of a match, as far as matches are told apart; shorter ones recur by chance
MAX_VOTES = 16  # occurrences that are looked at, the latest ones
SEPARATOR = 2**32 - 1  # between texts; no token, so that nothing matches across it
_GRAM = 2 ** (32 * LEVELS[0]) - 1


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


class Index:
    """The positions behind each few tokens of a text (as many as the first level), which may grow.

    Attributes:
        gram: the last tokens that are indexed, as one number.
    """

    def __init__(self, text: Tokens) -> None:
        self.text = text
        self.gram = _GRAM
        self._last: dict[int, int] = {}  # the last position behind a gram
        self._earlier = array("I")  # of the gram that ends with each token, the position before; 0: none

    def extend(self, most: int | None = None) -> bool:
        """Index the tokens that have been appended, at most so many. Returns whether these are all."""
        gram, last, earlier = self.gram, self._last, self._earlier
        start = len(earlier)
        for position, token in enumerate(self.text[start : None if most is None else start + most], start + 1):
            gram = (gram << 32 | token) & _GRAM
            earlier.append(last.get(gram, 0))
            last[gram] = position
        self.gram = gram
        return len(earlier) == len(self.text)

    def find(self, tokens: Tokens, gram: int, *, last: bool = False) -> Match | None:
        """Return where tokens that end with a gram match best, but for the end of the text itself; None if nowhere.

        Of the occurrences, the latest `MAX_VOTES` count, or the last one alone.
        """
        position = self._last.get(gram, 0) if len(tokens) >= LEVELS[0] else 0
        if position and position == len(self.text):
            position = self._earlier[position - 1]
        if not position:
            return None
        length, positions = LEVELS[0], [position]
        if not last:
            positions = [*islice(self._chain(position), MAX_VOTES)]
        for level in LEVELS[1:]:
            tail = tokens[-level:]
            if not (longer := [at for at in positions if self.text[max(0, at - level) : at] == tail]):
                break
            if len(tail) < level:
                break
            length, positions = level, longer
        return Match(self.text, length, positions)

    def _chain(self, position: int) -> Iterator[int]:
        while position:
            yield position
            position = self._earlier[position - 1]


def continue_predicted(predicted: Index, tokens: Tokens, gram: int, num_prompt: int, most: int) -> Draft | None:
    """Return what follows in a predicted answer where it has the last tokens of the answer, which begins at `num_prompt`.

    Of several places, the one counts that is about as far from the beginning. If it is just as far, one token suffices.
    Returns None if there is no such place.
    """
    text, generated = predicted.text, len(tokens) - num_prompt
    match = predicted.find(tokens, gram) if generated >= LEVELS[0] else None
    if match is not None:
        length, position = match.length, min(match.positions, key=lambda at: abs(at - generated))
    elif text[generated - 1 : generated] == tokens[-1:]:
        length, position = 1, generated
    else:
        return None
    found = text[position : position + most].tolist()
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
