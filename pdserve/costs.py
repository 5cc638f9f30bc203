"""Cost models of one instance: the seconds that computing and moving KV take, fitted online to measurements.

    prefill    a + b × tokens + c × tokens × (cached tokens before them + half of themselves)
    decode     a + b × sequences + c × context tokens                                         for one step
    transfer   a + b × bytes
    swap       a + b × blocks, to host memory or back

An instance calibrates its models when it starts, refines them while it works, and sends the coefficients to its routers. All
forecasts (routing, break-even of a hand-over, SLO admission) use these models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Work = Sequence[tuple[int, int]]  # (tokens computed, cached tokens before them) of each sequence of a step
HALF_LIFE_S = 10.0  # an observation of this age has half its weight
EPSILON = 1e-9  # relative to the largest value: treated as 0 when the equations are solved


@dataclass(frozen=True)
class Costs:
    """The coefficients (a, b, c) of each model, all ≥ 0. The defaults stand for an instance that has not reported any."""

    prefill: tuple[float, float, float] = (0.01, 1e-4, 0.0)
    decode: tuple[float, float, float] = (0.01, 1e-4, 0.0)
    transfer: tuple[float, float] = (0.002, 1e-9)
    swap: tuple[float, float] = (1e-4, 1e-3)

    def prefill_seconds(self, tokens: float, cached: float = 0) -> float:
        """Return the seconds to prefill `tokens` tokens that follow `cached` ones."""
        return self.total_prefill_seconds(1, tokens, attention_pairs(tokens, cached))

    def total_prefill_seconds(self, prompts: float, tokens: float, attended_tokens: float) -> float:
        """Return the seconds to prefill several prompts one after the other, given the sums over all of them."""
        a, b, c = self.prefill
        return a * prompts + b * tokens + c * attended_tokens

    def step_seconds(self, sequences: float, context_tokens: float) -> float:
        """Return the seconds of one decode step; 0 without sequences."""
        a, b, c = self.decode
        return a + b * sequences + c * context_tokens if sequences else 0.0

    def transfer_seconds(self, nbytes: float) -> float:
        """Return the seconds to move `nbytes` bytes through the connector; 0 for no bytes."""
        a, b = self.transfer
        return a + b * nbytes if nbytes else 0.0

    def swap_seconds(self, blocks: float) -> float:
        """Return the seconds to copy `blocks` blocks in one direction."""
        a, b = self.swap
        return a + b * blocks


def attention_pairs(tokens: float, cached: float) -> float:
    """Return the number of (new token, earlier token) pairs that attention over new tokens computes."""
    return tokens * (cached + tokens / 2)


class OnlineFit:
    """Non-negative least squares over a stream of observations, with exponential forgetting.

    The model is seconds = Σ coefficient × amount, every coefficient ≥ 0. The loss is the square of (forecast / observed - 1):
    short and long durations then have the same weight, and an outlier that took long for an unrelated reason (another
    process, a page fault) hardly counts, because its error is at most 1. Observations decay with `HALF_LIFE_S`, except those
    of `calibrate`: these describe the machine under loads that it has not seen for a while. The caller supplies the clock:
    `now` is in seconds, monotonic.

    Args:
        order: indices of the coefficients, the most significant first. As long as the observations do not tell two
            coefficients apart, the first of them explains everything.
    """

    def __init__(self, *order: int) -> None:
        size = len(order) + 1
        self._order = order
        self._calibrated, self._recent = np.zeros((size, size)), np.zeros((size, size))  # normal equations
        self._pending: list[tuple[float, ...]] = []  # (time, *amounts, seconds) of new observations
        self._decayed_at = 0.0
        self._fitted: tuple[float, ...] | None = None
        self._has_calibration = self._decays = False

    def observe(self, amounts: Sequence[float], seconds: float, now: float) -> None:
        """Add an observation that decays. Durations of 0 are ignored."""
        if seconds > 0:
            self._pending.append((now, *amounts, seconds))

    def calibrate(self, amounts: Sequence[float], seconds: float) -> None:
        """Add an observation that does not decay. Durations of 0 are ignored."""
        if seconds > 0:
            row = np.array([*(amount / seconds for amount in amounts), 1.0])
            self._calibrated += np.outer(row, row)
            self._has_calibration, self._fitted = True, None

    def coefficients(self, now: float) -> tuple[float, ...] | None:
        """Return the fitted coefficients, or None before the first observation."""
        if self._fitted is not None and not self._pending and not (self._decays and self._has_calibration):
            return self._fitted  # time changes nothing: all observations decay alike, or none does
        self._recent *= 0.5 ** ((now - self._decayed_at) / HALF_LIFE_S)
        self._decayed_at = now
        if self._pending:
            self._decays = True
            observed = np.array(self._pending)
            rows = (
                observed[:, 1:] / observed[:, -1:]
            )  # Σ coefficient × (amount / seconds) = 1, the right-hand side last
            weights = 0.5 ** ((now - observed[:, 0]) / HALF_LIFE_S)
            self._recent += (rows.T * weights) @ rows
            self._pending.clear()
        equations = self._calibrated + self._recent
        if not equations[-1, -1]:
            return None
        self._fitted = _least_squares(equations[:-1, :-1], equations[:-1, -1], self._order)
        return self._fitted


def _least_squares(matrix: Array, right: Array, order: Sequence[int]) -> tuple[float, ...]:
    """Solve the normal equations for coefficients ≥ 0.

    The result is the best unconstrained solution, over all subsets of the unknowns, that has no negative value. A subset
    with fewer unknowns, or with unknowns earlier in `order`, is preferred unless another is better by more than rounding.
    """
    # Plain Python: the matrices are at most 3 × 3, for which a call of numpy costs more than the arithmetic.
    indices, rows, sides, scale = range(len(order)), matrix.tolist(), right.tolist(), [1.0] * len(order)
    for i in indices:
        scale[i] = math.sqrt(rows[i][i]) or 1.0
        sides[i] /= scale[i]
    for i in indices:
        for j in indices:
            rows[i][j] = rows[i][j] / (scale[i] * scale[j]) + (EPSILON if i == j else 0.0)
    best, best_loss, chosen = sides, 0.0, tuple[int, ...]()
    for count in indices:
        for subset in combinations(order, count + 1):
            solution, loss = _solve(rows, sides, subset), 0.0
            for i in subset:
                loss -= solution[i] * sides[i]  # of these equations
            if loss < best_loss * (1 + EPSILON) - EPSILON and min(map(solution.__getitem__, subset)) >= 0:
                best, best_loss, chosen = solution, loss, subset
    coefficients = [0.0] * len(order)
    for i in chosen:
        coefficients[i] = best[i] / scale[i]
    return tuple(coefficients)


def _solve(matrix: list[list[float]], right: list[float], subset: Sequence[int]) -> list[float]:
    """Solve those of the equations that are in a subset for the unknowns in it, by elimination.

    The matrix is positive definite. Returns a list of all unknowns, of which those in the subset count.
    """
    rows, solution = [*map(list, matrix)], [*right]
    for at, i in enumerate(subset, 1):
        for j in subset[at:]:
            factor = rows[j][i] / rows[i][i]
            for k in subset[at:]:
                rows[j][k] -= factor * rows[i][k]
            solution[j] -= factor * solution[i]
    for at in range(len(subset), 0, -1):
        i, known = subset[at - 1], 0.0
        for k in subset[at:]:
            known += rows[i][k] * solution[k]
        solution[i] = (solution[i] - known) / rows[i][i]
    return solution


class CostMeter:
    """Measures one instance at work and fits its cost models.

    Attributes:
        on_steps: called with the steps of one phase that were measured together, and their seconds, if it is set.
    """

    on_steps: Callable[[Sequence[Work], float], None] | None = None

    def __init__(self) -> None:
        self._prefill, self._decode = OnlineFit(1, 0, 2), OnlineFit(0, 1, 2)
        self._transfer, self._swap = OnlineFit(1, 0), OnlineFit(1, 0)
        self._pending_steps: list[Work] = []
        self._pending_seconds = 0.0

    def calibrate_step(self, work: Work, seconds: float) -> None:
        """Record a step that ran alone on the machine. It does not decay."""
        if (amounts := _amounts([work])) is not None:
            self._fit(work).calibrate(amounts, seconds)

    def calibrate_swap(self, blocks: int, seconds: float) -> None:
        """Record a swap that ran alone on the machine. It does not decay."""
        self._swap.calibrate((1, blocks), seconds)

    def record_step(self, work: Work, sampled: bool, seconds: float, now: float) -> None:
        """Record a step. Steps that mix decode with prefill are ignored.

        On a GPU a step that samples nothing is only launched; the next one that samples waits for both. So steps are
        collected until one samples, and count together.
        """
        if not work:
            return
        self._pending_steps.append(work)
        self._pending_seconds += seconds
        if sampled:
            steps, seconds = self._pending_steps, self._pending_seconds
            self._pending_steps, self._pending_seconds = [], 0.0
            if (amounts := _amounts(steps)) is not None:
                self._fit(work).observe(amounts, seconds, now)
                if self.on_steps is not None:
                    self.on_steps(steps, seconds)

    def record_decode_step(self, sequences: int, context: int, seconds: float, now: float) -> None:
        """Record a step in which all sequences decoded, by their number and the sum of their contexts."""
        self._decode.observe((1, sequences, context), seconds, now)

    def record_transfer(self, nbytes: int, seconds: float, now: float) -> None:
        self._transfer.observe((1, nbytes), seconds, now)

    def record_swap(self, blocks: int, seconds: float, now: float) -> None:
        self._swap.observe((1, blocks), seconds, now)

    def costs(self, now: float) -> Costs:
        """Return the fitted models; a model without observations has the default coefficients."""
        fits = (
            ("prefill", self._prefill),
            ("decode", self._decode),
            ("transfer", self._transfer),
            ("swap", self._swap),
        )
        fitted: dict[str, Any] = {}
        for name, fit in fits:
            if (values := fit.coefficients(now)) is not None:
                fitted[name] = values
        return Costs(**fitted)

    def _fit(self, work: Work) -> OnlineFit:
        return self._decode if work[0][0] == 1 else self._prefill


def _amounts(steps: Sequence[Work]) -> tuple[float, float, float] | None:
    """Return the factors of a, b and c: of the decode model if each sequence has one token, else of the prefill model.

    None if some sequences have one token and others more.
    """
    decodes, tokens, pairs = steps[0][0][0] == 1, 0, 0.0
    for step in steps:
        for count, before in step:
            if (count == 1) != decodes:
                return None
            tokens += count
            pairs += before + 1 if decodes else attention_pairs(count, before)
    return len(steps), tokens, pairs
