"""The search of `pdserve plan` over fleets. Plain decisions: the caller simulates."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pdserve.planner.targets import FAILED, Target, attainment
from pdserve.simulator.fleet import Fleet, Forecast

EXHAUSTIVE = 12  # instances up to which all splits are tried
RATE_PRECISION = 0.05
NOISE = 0.02  # relative difference of two ratios that decides nothing
MAX_FACTOR = 8.0  # of the rate, up to which headroom is searched


@dataclass(frozen=True)
class Trial:
    """A simulated fleet, and how far it is from the SLO.

    Attributes:
        forecast: without its samples, which would fill the memory.
        values: seconds of each target's percentile.
        attainment: share of the requests that are within all targets for them.
        ratio: of the worst figure to its target; at most 1 if the SLO is met, `FAILED` if requests were refused or lost.
        binding: the target of the worst figure.
    """

    forecast: Forecast
    values: dict[Target, float]
    attainment: float
    ratio: float
    binding: Target

    @property
    def fleet(self) -> Fleet:
        return self.forecast.fleet

    @property
    def meets(self) -> bool:
        return self.ratio <= 1

    @property
    def is_colocated(self) -> bool:
        return self.fleet.both > 0


def judge(targets: Sequence[Target], forecast: Forecast) -> Trial:
    """Compare a forecast with the targets."""
    values = {one: one.measure(forecast.figures, forecast.samples) for one in targets}
    binding = max(targets, key=lambda one: values[one] / one.seconds)
    ratio = values[binding] / binding.seconds
    share = attainment(targets, forecast.samples)
    ratio = max(ratio, FAILED) if forecast.figures["failed"] else ratio
    return Trial(replace(forecast, samples=[]), values, share, ratio, binding)


Simulate = Callable[[Sequence[Fleet]], Iterable[Trial]]


def fleets_of(size: int, itl_targets: Sequence[float | None]) -> list[Fleet]:
    """Return all fleets of a size: colocated ones with each ITL target, and each split into prefill and decode."""
    colocated = [Fleet(both=size, itl_target_ms=target) for target in itl_targets]
    return colocated + [Fleet(prefill, size - prefill) for prefill in range(1, size)]


def best(trials: Iterable[Trial]) -> Trial:
    """Return the trial with the most margin; of those that are about equal, the one with the fewest flags."""
    trials = list(trials)
    most = min(trials, key=lambda trial: trial.ratio)
    equal = [one for one in trials if one.ratio <= most.ratio * (1 + NOISE) and one.meets == most.meets]
    return min(equal, key=lambda trial: (len(trial.fleet.flags), trial.ratio))


def try_size(size: int, itl_targets: Sequence[float | None], simulate: Simulate) -> list[Trial]:
    """Simulate the fleets of a size. Of large ones, the split is bisected: more prefill lowers TTFT and raises ITL."""
    if size <= EXHAUSTIVE:
        return list(simulate(fleets_of(size, itl_targets)))
    trials = list(simulate([Fleet(both=size, itl_target_ms=target) for target in itl_targets]))
    low, high = 1, size - 1
    while low <= high:
        middle = (low + high) // 2
        (trial,) = simulate([Fleet(middle, size - middle)])
        trials.append(trial)
        if trial.binding.metric == "ttft":
            low = middle + 1
        else:
            high = middle - 1
    return trials


def smallest(most: int, itl_targets: Sequence[float | None], simulate: Simulate) -> list[list[Trial]]:
    """Return the trials by size: each size up to the first at which a fleet meets the SLO, or up to `most`.

    Sizes are doubled until one suffices, and the ones between are bisected, so some may be missing.
    """
    tried: dict[int, list[Trial]] = {}

    def suffices(size: int) -> bool:
        tried[size] = try_size(size, itl_targets, simulate)
        return best(tried[size]).meets

    failed, size = 0, 1
    while not suffices(size):
        if size == most:
            return [tried[one] for one in sorted(tried)]
        failed, size = size, min(2 * size, most)
    while size - failed > 1:
        middle = (failed + size) // 2
        failed, size = (failed, middle) if suffices(middle) else (middle, size)
    return [tried[one] for one in sorted(tried) if one <= size]


def headroom(rate: float, meets: Callable[[float], Trial]) -> tuple[float, Trial | None]:
    """Return the highest rate at which a fleet that meets the SLO at `rate` still does, and the trial that broke it.

    The trial is None if it holds at `MAX_FACTOR` times the rate.
    """
    low, high, broken = rate, rate, None
    while broken is None:
        high *= 1.5
        if high > MAX_FACTOR * rate:
            return low, None
        trial = meets(high)
        low, broken = (high, None) if trial.meets else (low, trial)
    while high / low > 1 + RATE_PRECISION:
        middle = (low * high) ** 0.5
        trial = meets(middle)
        if trial.meets:
            low = middle
        else:
            high, broken = middle, trial
    return low, broken
