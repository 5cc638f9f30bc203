"""What computing and moving KV takes on one instance: four small models of seconds, fitted to what it took.

    prefill    a + b × tokens + c × tokens × (tokens before them + half of themselves)
    decode     a + b × sequences + c × tokens of their contexts                            for one step
    transfer   a + b × bytes
    swap       a + b × blocks, to host memory or back

An instance measures itself when it starts, goes on while it works, and tells routers its coefficients. Forecasts of whatever
kind (who gets a request, whether a hand-over pays, whether an SLO will hold) read the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Work = Sequence[tuple[int, int]]  # (tokens computed, tokens before them) of each sequence of a step
HALF_LIFE_S = 10.0  # after which an observation counts half
TINY = 1e-9  # of the largest number around: what counts as 0 when equations are solved


@dataclass(frozen=True)
class Costs:
    """The coefficients (a, b, c) of each model, none below 0. The defaults stand for an instance that has said nothing."""

    prefill: tuple[float, float, float] = (0.01, 1e-4, 0.0)
    decode: tuple[float, float, float] = (0.01, 1e-4, 0.0)
    transfer: tuple[float, float] = (0.002, 1e-9)
    swap: tuple[float, float] = (1e-4, 1e-3)

    def prefill_seconds(self, tokens: float, cached: float = 0) -> float:
        """Of so many tokens that come after `cached` ones."""
        return self.prefills_seconds(1, tokens, attended(tokens, cached))

    def prefills_seconds(self, prompts: float, tokens: float, attended_tokens: float) -> float:
        """Of several prompts, one after the other."""
        a, b, c = self.prefill
        return a * prompts + b * tokens + c * attended_tokens

    def step_seconds(self, sequences: float, context_tokens: float) -> float:
        """Of one decode step. 0 if there are no sequences."""
        a, b, c = self.decode
        return a + b * sequences + c * context_tokens if sequences else 0.0

    def transfer_seconds(self, nbytes: float) -> float:
        a, b = self.transfer
        return a + b * nbytes if nbytes else 0.0

    def swap_seconds(self, blocks: float) -> float:
        """Of a copy in one direction."""
        a, b = self.swap
        return a + b * blocks


def attended(tokens: float, cached: float) -> float:
    """How many (token, token before it) pairs the attention over new tokens has."""
    return tokens * (cached + tokens / 2)


class Fit:
    """Coefficients ≥ 0 of seconds = Σ coefficient × amount, from a stream of observations.

    It minimises the square of (forecast / observed - 1). So short and long ones count alike, and one that took long for
    reasons of its own (another process, a page fault) counts next to nothing: its forecast is off by 1 at most.
    Observations count less and less as time goes by, but for those of `know`: these say how the machine behaves where it has
    not been for a while. The clock is the caller's: `now` is in seconds, monotonic.

    Args:
        order: of the coefficients, the most telling first: it gets all as long as nothing tells them apart.
    """

    def __init__(self, *order: int) -> None:
        size = len(order) + 1
        self._order = order
        self._known, self._recent = np.zeros((size, size)), np.zeros((size, size))
        self._new: list[tuple[float, list[float]]] = []
        self._at = 0.0

    def observe(self, amounts: Sequence[float], seconds: float, now: float) -> None:
        """It took so long. Nothing is learnt from no time at all."""
        if seconds > 0:
            self._new.append((now, _row(amounts, seconds)))

    def know(self, amounts: Sequence[float], seconds: float) -> None:
        """As `observe`, and never forgotten."""
        if seconds > 0:
            row = np.array(_row(amounts, seconds))
            self._known += np.outer(row, row)

    def coefficients(self, now: float) -> tuple[float, ...] | None:
        """None before the first observation."""
        self._recent *= 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._at = now
        if self._new:
            rows = np.array([row for _, row in self._new])
            weights = 0.5 ** ((now - np.array([at for at, _ in self._new])) / HALF_LIFE_S)
            self._recent += (rows.T * weights) @ rows
            self._new.clear()
        equations = self._known + self._recent
        return _least_squares(equations[:-1, :-1], equations[:-1, -1], self._order) if equations[-1, -1] else None


def _row(amounts: Sequence[float], seconds: float) -> list[float]:
    """An equation: the amounts' shares of the seconds, with their coefficients, add up to 1, the last number."""
    return [*(amount / seconds for amount in amounts), 1.0]


def _least_squares(matrix: Array, right: Array, order: Sequence[int]) -> tuple[float, ...]:
    """The non-negative solution: that of the best subset of unknowns whose free solution has no negative one. Fewer
    unknowns, and those earlier in the order, are better unless others are better by more than rounding."""
    scale = np.sqrt(np.diag(matrix))
    scale[scale == 0] = 1.0
    matrix = matrix / np.outer(scale, scale) + TINY * np.eye(len(scale))
    right = right / scale
    best = np.zeros(len(scale))
    best_loss = 0.0
    for chosen in (list(some) for count in range(len(order)) for some in combinations(order, count + 1)):
        solution = np.zeros(len(scale))
        solution[chosen] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], right[chosen])
        loss = float(solution @ matrix @ solution - 2 * solution @ right)
        if loss < best_loss * (1 + TINY) - TINY and solution.min() >= 0:
            best, best_loss = solution, loss
    return tuple(float(value) for value in best / scale)


class Meter:
    """Watches one instance at work."""

    def __init__(self) -> None:
        self._prefill, self._decode = Fit(1, 0, 2), Fit(0, 1, 2)
        self._transfer, self._swap = Fit(1, 0), Fit(1, 0)
        self._begun: list[Work] = []
        self._begun_seconds = 0.0

    def knew(self, work: Work, seconds: float) -> None:
        """A step took so long when nothing else was going on. This is never forgotten."""
        self._fit(work).know(_amounts([work]), seconds)

    def stepped(self, work: Work, sampled: bool, seconds: float, now: float) -> None:
        """A step took so long. One that did both, decoding and more, teaches nothing.

        A GPU has only begun with a step from which nothing was sampled; the next one that samples has waited for both.
        """
        if not work:
            return
        self._begun.append(work)
        self._begun_seconds += seconds
        if sampled:
            steps, seconds = self._begun, self._begun_seconds
            self._begun, self._begun_seconds = [], 0.0
            if len({count == 1 for step in steps for count, _ in step}) == 1:
                self._fit(work).observe(_amounts(steps), seconds, now)

    def moved(self, nbytes: int, seconds: float, now: float) -> None:
        """A transfer took so long."""
        self._transfer.observe((1, nbytes), seconds, now)

    def knew_swap(self, blocks: int, seconds: float) -> None:
        """A swap took so long when nothing else was going on. This is never forgotten."""
        self._swap.know((1, blocks), seconds)

    def swapped(self, blocks: int, seconds: float, now: float) -> None:
        """A swap took so long."""
        self._swap.observe((1, blocks), seconds, now)

    def costs(self, now: float) -> Costs:
        """What is known by now; the defaults where nothing is."""
        fits: dict[str, Fit] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "transfer": self._transfer,
            "swap": self._swap,
        }
        found: dict[str, Any] = {name: fit.coefficients(now) for name, fit in fits.items()}
        return replace(Costs(), **{name: values for name, values in found.items() if values is not None})

    def _fit(self, work: Work) -> Fit:
        return self._decode if work[0][0] == 1 else self._prefill


def _amounts(steps: Sequence[Work]) -> tuple[float, float, float]:
    """What the coefficients stand before: of decoding if every sequence has one token."""
    work = [one for step in steps for one in step]
    tokens = sum(count for count, _ in work)
    if work[0][0] == 1:
        return len(steps), tokens, sum(before + 1 for _, before in work)
    return len(steps), tokens, sum(attended(*one) for one in work)
