"""Beam search over candidates with log probabilities: which beams go on, and which answers are found. Plain Python.

Equals the beam search of transformers 5 (`GenerationMixin._beam_search`) without sampling, its float32 arithmetic included,
but for continuations whose log probability is not finite: they are excluded, and so a search whose constraints allow too few
tokens has fewer answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from pdserve.request import Count, TokenLogprobs

_Node = tuple[
    int, list[TokenLogprobs], "_Node | None"
]  # the newest token, what is reported of it, and the ones before it
Candidate = tuple[int, float, *tuple[TokenLogprobs, ...]]  # a token, its log probability, perhaps with a report


@dataclass(frozen=True)
class Branch:
    """A beam of the next step: beam number `parent`, continued by a token."""

    parent: int
    token: int


class Hypothesis(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An answer.

    Attributes:
        token_ids: the output, its stop token included.
        score: sum of the tokens' log probabilities, divided by their number to the power of the length penalty. Finite: what
            exceeds float32 is its lowest number.
        finish_reason: `stop` after a stop token, else `length`.
        logprobs: one entry for each token if candidates came with them, else empty.
    """

    token_ids: tuple[Count, ...]
    score: float
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class _Beam:
    score: np.float32
    tokens: _Node | None = field(repr=False)


class BeamSearch:
    """One search. `step` is given the candidates of every beam and returns the beams that go on, until it returns none.

    Args:
        width: number of beams.
        stop_token_ids: a beam that ends with one of these is an answer.
        max_tokens: tokens of the longest answer.
        length_penalty: above 0 favours long answers, below 0 short ones.
        early_stopping: True ends the search with `width` answers; False when no beam could become better than the worst
            of them if it ended now; `never` when none could with any number of tokens.

    Attributes:
        num_candidates: how many of the most likely tokens of each beam `step` needs.
    """

    def __init__(
        self,
        width: int,
        stop_token_ids: frozenset[int],
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool | str,
    ) -> None:
        self.num_candidates = max(2, 1 + len(stop_token_ids)) * width
        self.num_steps = 0
        self.is_over = False
        self._width = width
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._beams = [_Beam(np.float32(0), None)]
        self._answers: list[_Beam] = []  # best first, at most `width`

    def step(self, candidates: Sequence[Sequence[Candidate]]) -> list[Branch]:
        """Return the beams of the next step, best first; none if the search is over.

        Args:
            candidates: of each beam, in the order in which the last step returned them; of the prompt in the first step.
        """
        scored = [
            (beam.score + np.float32(logprob), parent, token, report)
            for parent, (beam, tokens) in enumerate(zip(self._beams, candidates, strict=True))
            for token, logprob, *report in tokens
            if math.isfinite(logprob)
        ]
        best = sorted(scored, key=lambda one: -one[0])[: self.num_candidates]
        self.num_steps += 1
        is_last = self.num_steps == self._max_tokens
        beams, branches, found = list[_Beam](), list[Branch](), list[_Beam]()
        for place, (score, parent, token, report) in enumerate(best):
            tokens = token, report, self._beams[parent].tokens
            if is_last or token in self._stop_token_ids:
                if place < self._width:  # the others are only there so that enough beams go on
                    found.append(_Beam(self._normalized(score, self.num_steps), tokens))
            elif len(beams) < self._width:
                beams.append(_Beam(score, tokens))
                branches.append(Branch(parent, token))
        self._answers = sorted(self._answers + found, key=lambda one: -one.score)[: self._width]
        self._beams = beams
        self.is_over = is_last or not beams or self._cannot_improve()
        return [] if self.is_over else branches

    def hypotheses(self, count: int) -> list[Hypothesis]:
        """Return the best answers of a search that is over, at most `count`."""
        assert self.is_over
        return [self._hypothesis(answer) for answer in self._answers[:count]]

    def _normalized(self, score: np.float32, num_tokens: int) -> np.float32:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # a penalty of -10 and some thousand tokens
            normalized = np.float32(score / np.float32(num_tokens**self._length_penalty))
        return np.float32(np.nan_to_num(normalized))

    def _cannot_improve(self) -> bool:
        """Return whether there are enough answers that no running beam can be expected to surpass."""
        if len(self._answers) < self._width:
            return False
        if self._early_stopping is True:
            return True
        at_best = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if at_best else self.num_steps
        return bool(self._normalized(self._beams[0].score, length) <= self._answers[-1].score)

    def _hypothesis(self, answer: _Beam) -> Hypothesis:
        ids, logprobs, node = list[int](), list[TokenLogprobs](), answer.tokens
        while node is not None:
            token, report, node = node
            ids.append(token)
            logprobs += report
        finish_reason = "stop" if ids[0] in self._stop_token_ids else "length"
        return Hypothesis(tuple(reversed(ids)), float(answer.score), finish_reason, tuple(reversed(logprobs)))
