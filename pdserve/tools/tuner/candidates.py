"""Candidates of `pdserve bench tune`: which fleet to measure next. Plain decisions on forecasts and measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from pdserve.errors import SetupError
from pdserve.tools.planner.search import fleets_of
from pdserve.tools.simulator.fleet import Fleet, parse_itl_targets

SEARCH_SHARE = 2 / 3  # of the budget, after which the best are measured again
LIKENESS = 0.25  # weight of a measurement for a fleet that differs in one more setting
TRUST = 0.1  # weight of the forecast of a fleet that is like none of the measured ones
LEAST, WORST = 0.01, 10.0  # ratios beyond which it makes no difference how far beyond
PROMISING = 1.25  # ratio to the best measured one, up to which a fleet is worth a run if forecasts are right
FINALISTS, REPETITIONS = 3, 3  # fleets that are measured again, and how often each is measured at most


def grid(instances: int, itl_targets: str, sizes: Mapping[str, str]) -> list[Fleet]:
    """Return all splits of so many instances, and colocated ones, with all combinations of settings.

    Args:
        itl_targets: such as `off,20`.
        sizes: by setting, such as `256,512`; empty: its default.

    Raises:
        SetupError: a value has another form.
    """
    values = {name: _numbers(name, text) for name, text in sorted(sizes.items()) if text}
    settings = [tuple(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [
        replace(fleet, itl_target_ms=target, settings=own)
        for fleet in fleets_of(instances, [None])
        for target in parse_itl_targets(itl_targets)
        for own in settings
    ]


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise SetupError(f"--try-{name.replace('_', '-')}: {text!r} is not such as 16,64")
    return [int(part) for part in parts]


def differences(one: Fleet, other: Fleet) -> int:
    """Return in how many settings two fleets differ; the split is one of them."""
    changed = len(set(one.settings) ^ set(other.settings)) // 2
    return changed + (one.shape != other.shape) + (one.itl_target_ms != other.itl_target_ms)


@dataclass
class Candidates:
    """Fleets with the ratios of their worst figures to the targets, as forecast and as measured.

    Attributes:
        forecasts: in the order in which fleets are tried if all forecasts are alike.
        measured: several, where a fleet was measured again.
    """

    forecasts: Mapping[Fleet, float]
    measured: dict[Fleet, list[float]] = field(default_factory=dict)

    def num_runs(self, fleet: Fleet) -> int:
        return len(self.measured.get(fleet, ()))

    def add(self, fleet: Fleet, ratio: float) -> None:
        self.measured.setdefault(fleet, []).append(ratio)

    def expected(self, fleet: Fleet) -> float:
        """Return the ratio that a fleet would have: its forecast, as far off as those of measured fleets, the likest most."""
        weights = {one: LIKENESS ** differences(fleet, one) for one in self.measured}
        logs = sum(weight * self._log_error(one) for one, weight in weights.items())
        return _capped(self.forecasts[fleet]) * math.exp(logs / (sum(weights.values()) + TRUST))

    def _log_error(self, fleet: Fleet) -> float:
        return math.log(_capped(self.ratio(fleet)) / _capped(self.forecasts[fleet]))

    def next(self, spent: float) -> Fleet | None:
        """Return the fleet to measure next; None if nothing is worth it.

        Args:
            spent: share of the budget.
        """
        new, again = self._most_promising(), self._to_repeat()
        return (new or again) if spent < SEARCH_SHARE else (again or new)

    def _most_promising(self) -> Fleet | None:
        """Return the best fleet of those not measured yet; None if it would hardly be better than the measured ones."""
        left = [fleet for fleet in self.forecasts if not self.num_runs(fleet)]
        first = min(left, key=self.expected, default=None)
        if first is None or not self.measured:
            return first
        error = math.exp(max(abs(self._log_error(one)) for one in self.measured))
        return first if self.expected(first) <= PROMISING * error * self.ratio(self.ranked()[0]) else None

    def _to_repeat(self) -> Fleet | None:
        """Return the least measured one of the best; None if each was measured often enough."""
        best = [one for one in self.ranked()[:FINALISTS] if self.ratio(one) <= PROMISING * self.ratio(self.ranked()[0])]
        few = [one for one in best if self.num_runs(one) < REPETITIONS]
        return min(few, key=self.num_runs, default=None)

    def ratio(self, fleet: Fleet) -> float:
        """Return the measured ratio of a fleet."""
        return median(self.measured[fleet])

    def ranked(self) -> list[Fleet]:
        """Return the measured fleets, the best first."""
        return sorted(self.measured, key=self.ratio)


def _capped(ratio: float) -> float:
    return min(max(ratio, LEAST), WORST)
