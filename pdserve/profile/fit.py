"""Fits a step model to timings, by relative least squares, and says how well it describes them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pdserve.profile.profile import Knots, Residuals, StepModel, TransferModel

Array = npt.NDArray[np.float64]
Work = Sequence[tuple[int, int]]  # (tokens computed, cached tokens before them) of each sequence of a step
Timing = tuple[Work, float]  # a step and its seconds
MIN_MIXED = 6  # steps, for three coefficients
KNOT_RATIO = 1.4  # between knots: closer ones would follow the noise


def fit_steps(timings: Sequence[Timing]) -> tuple[StepModel, dict[str, Residuals]]:
    """Return the model of these steps, and its residuals by kind of step.

    Raises:
        ValueError: there are no decode steps, or no prefill steps, or a time that cannot be.
    """
    if not all(0 < seconds < math.inf for _, seconds in timings):
        raise ValueError("a time that is not a positive number")
    kinds: dict[str, list[tuple[_Sums, float]]] = {"decode": [], "prefill": [], "mixed": []}
    for work, seconds in timings:
        sums = _Sums(work)
        kinds[sums.kind].append((sums, seconds))
    for kind in ("decode", "prefill"):
        if not kinds[kind]:
            raise ValueError(f"no timings of {kind} steps")
    decode, (context_s,) = _fit_knots(kinds["decode"], lambda one: one.sequences, lambda one: [one.context])
    prefill, (pair_s, cached_s, prompt_s) = _fit_knots(
        kinds["prefill"], lambda one: one.tokens, lambda one: [one.pairs, one.cached, one.prompts - 1]
    )
    step = StepModel(decode, context_s, prefill, pair_s, cached_s, prompt_s)
    if len(kinds["mixed"]) >= MIN_MIXED:
        step = replace(step, mixed=_fit_mixed(step, kinds["mixed"]))
    return step, step_residuals(step, timings)


def step_residuals(step: StepModel, timings: Iterable[Timing]) -> dict[str, Residuals]:
    """Return the residuals of a model on these steps, by kind of step."""
    errors: dict[str, list[float]] = {}
    for work, seconds in timings:
        errors.setdefault(_Sums(work).kind, []).append(step.seconds(work) / seconds - 1)
    return {kind: residuals(values) for kind, values in errors.items()}


def residuals(errors: Sequence[float]) -> Residuals:
    """Summarise relative errors."""
    p50, p90, p99 = (float(np.percentile(np.abs(errors), p)) for p in (50, 90, 99))
    return Residuals(len(errors), p50, p90, p99, float(np.mean(errors)))


def fit_transfer(
    loads: Sequence[tuple[float, float]], stores: Sequence[tuple[float, float]], link_bytes_per_s: float
) -> tuple[TransferModel, Residuals]:
    """Return the model of a connector from (bytes, seconds) of single operations, and its residuals on the loads."""
    (load_latency, load_byte), (store_latency, store_byte) = (
        least_squares([[1.0, nbytes] for nbytes, _ in points], [seconds for _, seconds in points], {0, 1})
        for points in (loads, stores)
    )
    speeds = (1 / max(load_byte, 1e-15), 1 / max(store_byte, 1e-15))
    model = TransferModel(load_latency, speeds[0], store_latency, speeds[1], max(link_bytes_per_s, speeds[0]))
    return model, residuals([model.seconds(nbytes) / seconds - 1 for nbytes, seconds in loads])


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float], positive: set[int]) -> list[float]:
    """Return coefficients with the least squares of (forecast / seconds - 1); those in `positive` are not negative."""
    matrix: Array = np.array(rows, float) / np.array(seconds)[:, None]
    scale = np.abs(matrix).max(axis=0)
    used = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    while True:
        solution = np.zeros(matrix.shape[1])
        found, *_ = np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(matrix)), rcond=None)
        solution[used] = found / scale[used]
        negative = [column for column in used if column in positive and solution[column] < 0]
        if not negative:
            return [float(value) for value in solution]
        used.remove(min(negative, key=lambda column: solution[column] * scale[column]))


def kind_of(work: Work) -> str:
    """Return "decode", "prefill" or "mixed"."""
    return _Sums(work).kind


class _Sums:
    """The amounts of one step that the model's coefficients multiply."""

    def __init__(self, work: Work) -> None:
        decoding = [before + 1 for count, before in work if count == 1]
        chunks = [(count, before) for count, before in work if count > 1]
        self.sequences, self.context = len(decoding), sum(decoding)
        self.prompts, self.tokens = len(chunks), sum(count for count, _ in chunks)
        self.cached = sum(before for _, before in chunks)
        self.pairs = sum(count * (before + count / 2) for count, before in chunks)
        self.kind = "decode" if not chunks else "mixed" if decoding else "prefill"


def _fit_knots(
    timings: Sequence[tuple[_Sums, float]], amount: Callable[[_Sums], int], others: Callable[[_Sums], list[float]]
) -> tuple[Knots, list[float]]:
    """Fit seconds = f(amount) + Σ coefficient × other amount, f linear between knots. Returns the knots and coefficients."""
    knots = _choose_knots({amount(sums) for sums, _ in timings})
    rows = [[*_hats(knots, amount(sums)), *others(sums)] for sums, _ in timings]
    values = least_squares(rows, [seconds for _, seconds in timings], set(range(len(rows[0]))))
    return tuple(zip(knots, values, strict=False)), values[len(knots) :]


def _choose_knots(amounts: set[int]) -> list[int]:
    knots: list[int] = []
    for amount in sorted(amounts):
        if not knots or amount >= knots[-1] * KNOT_RATIO:
            knots.append(amount)
    if len(knots) > 1:  # the largest amount is always a knot
        knots[-1] = max(amounts)
    return knots


def _hats(knots: Sequence[int], amount: int) -> list[float]:
    """Return the weight of each knot's value in the value at `amount`."""
    weights = [0.0] * len(knots)
    for i, (left, right) in enumerate(pairwise(knots)):
        if left <= amount <= right:
            weights[i], weights[i + 1] = (right - amount) / (right - left), (amount - left) / (right - left)
            return weights
    weights[0] = 1.0
    return weights


def _fit_mixed(step: StepModel, timings: Sequence[tuple[_Sums, float]]) -> tuple[float, float, float]:
    rows = []
    for one, _ in timings:
        decode = step.decode_seconds(one.sequences, one.context)
        rows.append([1.0, decode, step.prefill_seconds(one.tokens, one.pairs, one.prompts, one.cached)])
    fixed, decode_share, prefill_share = least_squares(rows, [seconds for _, seconds in timings], {1, 2})
    return fixed, decode_share, prefill_share
