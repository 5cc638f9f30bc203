"""The search of `pdserve plan` over fleets. Plain decisions: the caller simulates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pdserve.tools.planner.targets import FAILED, Target, attainment, compare
from pdserve.tools.simulator.fleet import Fleet, Forecast

EXHAUSTIVE = 12  # instances up to which all splits are tried
NEIGHBOURS = 2  # of the best split of a larger fleet, to either side, that are tried
VERIFIED = 3  # sizes below the found one that are tried
RATE_PRECISION = 0.05
SATURATED_SHARE = 0.9  # of the time, below which requests in flight grow because more arrive
BUSY = {  # what a fleet's forecast has busy shares of
    "prefill": "prefill is",
    "decode": "decode is",
    "both": "its instances are",
    "router": "the router is",
    "link": "the link to the KV store is",
}
CLOSE = 0.05  # relative difference of two ratios with one seed, which another seed may turn round
MAX_CLOSE = 4  # fleets that are compared with several seeds
NOISE = 0.02  # relative difference of two ratios that decides nothing
MAX_FACTOR = 8.0  # of the rate, up to which headroom is searched


@dataclass(frozen=True)
class Trial:
    """A simulated fleet, and how far it is from the SLO.

    Attributes:
        forecast: without its samples, which would fill the memory.
        values: seconds of each target's percentile.
        counts: how many values each target's percentile is of.
        attainment: share of the requests that are within all targets for them.
        ratio: of the worst figure to its target; at most 1 if the SLO is met, at least `FAILED` if the fleet failed.
        binding: the target of the worst figure.
        failure: how the fleet failed whatever the figures are, such as "refuses or loses 3 requests" or "does not keep up:
            the router is busy 97% of the time"; empty if it did not.
    """

    forecast: Forecast
    values: dict[Target, float]
    counts: dict[Target, int]
    attainment: float
    ratio: float
    binding: Target
    failure: str = ""

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
    """Compare a forecast with the targets.

    A fleet fails if requests are refused or lost, or if it does not keep up: figures of a run that ends would look better
    than those of a longer one.
    """
    values, binding, ratio = compare(targets, forecast.figures, forecast.samples)
    counts = {one: one.count(forecast.samples) for one in targets}
    failure = ""
    if failed := forecast.figures["failed"]:
        share = failed / (failed + forecast.figures["completed"])
        ratio, failure = max(ratio, FAILED * (1 + share)), f"refuses or loses {failed} requests"
    elif forecast.is_given_up:
        ratio, failure = max(ratio, FAILED), "misses the SLO"
    elif forecast.saturated and (cause := bottleneck(forecast.busy)):
        ratio, failure = max(ratio, FAILED), f"does not keep up: {cause}"
    share = attainment(targets, forecast.samples)
    return Trial(replace(forecast, samples=[]), values, counts, share, ratio, binding, failure)


def bottleneck(busy: Mapping[str, float]) -> str:
    """Return what is busy for nearly all of the time, such as "the router is busy 97% of the time"; empty if nothing is."""
    name = max(busy, key=lambda one: busy[one])
    return f"{BUSY[name]} busy {busy[name]:.0%} of the time" if busy[name] >= SATURATED_SHARE else ""


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


def close_to_best(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best trial, first, and a few others that another seed might prefer to it."""
    first = best(trials)
    close = [one for one in trials if one.ratio <= first.ratio * (1 + CLOSE) and one.meets is first.meets]
    return [first, *sorted((one for one in close if one is not first), key=lambda one: one.ratio)][:MAX_CLOSE]


def best_in_mean(repetitions: Sequence[Sequence[Trial]]) -> Trial:
    """Return the trial of the first repetition whose fleet is the best in the mean over all; each has the same fleets."""
    means = [fmean(one.ratio for one in each) for each in zip(*repetitions, strict=True)]
    chosen = best(replace(one, ratio=mean) for one, mean in zip(repetitions[0], means, strict=True))
    return next(one for one in repetitions[0] if one.fleet == chosen.fleet)


def try_size(size: int, itl_targets: Sequence[float | None], simulate: Simulate) -> list[Trial]:
    """Simulate the fleets of a size.

    Of large ones, the split is bisected, since more prefill lowers TTFT and raises ITL; and as chance or the policy may make
    that untrue for a single instance, the neighbours of the best split are tried, too.
    """
    if size <= EXHAUSTIVE:
        return list(simulate(fleets_of(size, itl_targets)))
    trials = list(simulate([Fleet(both=size, itl_target_ms=target) for target in itl_targets]))
    low, high = 1, size - 1
    while low <= high:
        middle = (low + high) // 2
        (trial,) = simulate([Fleet(middle, size - middle)])
        trials.append(trial)
        if _needs_prefill(trial):
            low = middle + 1
        else:
            high = middle - 1
    while missing := _untried_neighbours(trials):
        trials += simulate(missing)
    return trials


def _untried_neighbours(trials: Sequence[Trial]) -> list[Fleet]:
    """Return the fleets around the best split that are not among the trials."""
    splits = [trial for trial in trials if not trial.is_colocated]
    tried, chosen = {trial.fleet.prefill for trial in splits}, best(splits).fleet
    around = range(chosen.prefill - NEIGHBOURS, chosen.prefill + NEIGHBOURS + 1)
    return [Fleet(one, chosen.size - one) for one in around if 0 < one < chosen.size and one not in tried]


def _needs_prefill(trial: Trial) -> bool:
    """Return whether a split fleet is nearer to the SLO with one more prefill instance, and one fewer for decode."""
    if not trial.failure and trial.binding.metric in ("ttft", "itl", "tpot"):
        return trial.binding.metric == "ttft"
    busy = trial.forecast.busy
    return busy.get("prefill", 0.0) > busy.get("decode", 0.0)


def smallest(most: int, itl_targets: Sequence[float | None], simulate: Simulate) -> list[list[Trial]]:
    """Return the trials by size, up to one at which a fleet meets the SLO, while none of the `VERIFIED` sizes below it does.

    Sizes are doubled until one suffices, those in between are bisected, and then those below the found one are tried, so
    some are missing. That finds the smallest size n if all sizes from n + `VERIFIED` on suffice: a few larger fleets may do
    worse than a smaller one. If no size of the doubling suffices, they end with `most`.
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
    below = size - 1
    while below >= max(1, size - VERIFIED):
        if below not in tried and suffices(below):
            size = below
        below -= 1
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
