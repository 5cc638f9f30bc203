"""The search for the highest rate at which enough requests meet their SLO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.tools.bench.requests import Sample

STEP = 2.0  # factor between two rates until one of them fails
MAX_STEPS = 12  # doublings, or halvings, before the search gives up
GROWTH = 1.4  # of the requests in flight from one third of a run to the next: constant if the server keeps up
SMALL_GROWTH = (
    1.15  # the same, if the requests that were added are also more than ROOTS standard deviations of the arrivals
)
ROOTS = 1.5  # the standard deviation of a Poisson process is the root of its number of arrivals
MIN_GROWTH = 4  # requests


@dataclass(frozen=True)
class Trial:
    """A run at one rate.

    Attributes:
        short: half of the requests were still under way when the last was sent: a higher rate is hardly another load.
    """

    rate: float
    good: int
    total: int
    saturated: bool = False
    short: bool = False

    @property
    def attainment(self) -> float:
        return self.good / self.total if self.total else 0.0

    def meets(self, share: float) -> bool:
        return self.attainment >= share and not self.saturated


@dataclass
class Search:
    """One search: ask for `next_rate`, run it, `add` the trial, until there is none.

    Doubles or halves the rate until trials that meet and miss each share are known, then bisects. Never asks for a rate above
    one that saturated the server.

    Args:
        shares: of the requests that must meet the SLO, such as 0.9 and 0.99.
        tolerance: relative difference between the highest rate that meets a share and the lowest that does not.
    """

    start: float
    shares: Sequence[float]
    tolerance: float
    trials: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)

    def highest(self, share: float) -> float | None:
        """Return the highest rate that met a share, below every rate that missed it; None if there is none."""
        missed = self._lowest_missing(share)
        return max((one.rate for one in self.trials if one.meets(share) and one.rate < missed), default=None)

    def is_open(self, share: float) -> bool:
        """Return whether the highest rate that met a share only bounds the server's, since the run was too short."""
        return any(one.short and one.rate == self.highest(share) for one in self.trials)

    def next_rate(self) -> float | None:
        if not self.trials:
            return self.start
        for share in sorted(self.shares):
            met, missed = self.highest(share), self._lowest_missing(share)
            if met is None:
                if missed > self.start / STEP**MAX_STEPS:
                    return missed / STEP
            elif math.isinf(missed):
                if met < self.start * STEP**MAX_STEPS and not self.is_open(share):
                    return met * STEP
            elif missed / met > 1 + self.tolerance:
                return math.sqrt(met * missed)
        return None

    def _lowest_missing(self, share: float) -> float:
        return min((one.rate for one in self.trials if not one.meets(share)), default=math.inf)


def is_short(samples: Sequence[Sample]) -> bool:
    """Return True if half of the requests were still under way when the last one was to be sent."""
    ends = sorted(sample.ended for sample in samples)
    return bool(ends) and max(sample.scheduled for sample in samples) < ends[len(ends) // 2]


def is_saturated(samples: Sequence[Sample], warmup: int = 0) -> bool:
    """Return True if requests took longer and longer while they arrived, after the first `warmup` ones.

    Their mean time is the number in flight ÷ the rate of arrivals (Little's law), so a load that itself grows is not taken
    for a server that falls behind.
    """
    if len(samples) - warmup < 9:
        return False
    ordered = sorted(samples, key=lambda sample: sample.scheduled)
    ends = sorted(sample.ended for sample in ordered)
    in_flight, ended = [], 0
    for started, sample in enumerate(ordered):
        while ends[ended] < sample.scheduled:
            ended += 1
        in_flight.append(started - ended)
    del in_flight[:warmup], ordered[:warmup]
    third = len(in_flight) // 3
    middle, last = sum(in_flight[third : 2 * third]) / third, sum(in_flight[-third:]) / third
    # Of as many arrivals.
    seconds, last_seconds = (ordered[end].scheduled - ordered[end - third].scheduled for end in (2 * third, -1))
    growth = SMALL_GROWTH if last - middle > ROOTS * math.sqrt(third) else GROWTH
    return last * last_seconds > growth * middle * seconds and last - middle > MIN_GROWTH
