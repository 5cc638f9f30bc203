"""The planner of `pdserve plan`, which runs the stages of the search, and the plan in which it collects their trials."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pdserve.profile.profile import Profile
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.gpus import thrifty
from pdserve.tools.planner.here import Here, config_here, is_this_machine, needed_by
from pdserve.tools.planner.measured import Comparison, Correction, Measured, compare, correct
from pdserve.tools.planner.search import Trial, best, best_in_mean, close_to_best, headroom, judge, smallest, try_size
from pdserve.tools.planner.settings import Dimension, dimensions
from pdserve.tools.planner.targets import ALL, Target
from pdserve.tools.planner.tuning import tune_sizes
from pdserve.tools.simulator.fleet import (
    MAX_ITL_TARGET_MS,
    Fleet,
    Forecast,
    check_fits,
    mean_rate,
    parse_itl_targets,
    simulate,
    simulate_all,
)
from pdserve.tools.simulator.verdict import Limit

CURVE = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the rate, at which attainment is reported
CHANGE = 0.2  # of rate and lengths, whose effect is reported
OTHER_SEEDS = 4  # with which the chosen fleet is simulated again
TTFT_SHARE = 0.5  # of the TTFT target, as --ttft-target-ms: forecasts err
ITL_SHARES = (0.5, 0.75, 1.0)  # of the ITL target, tried as --itl-target-ms


@dataclass
class Plan:
    """The fleet that meets the SLO, or the nearest one, and the trials that show why.

    Attributes:
        trials: all simulated fleets at the load as given, by size; the last size is that of the choice.
        nearest: the fleet with the most margin of that size.
        worth: by setting, the trials of its values, of the nearest fleet.
        highest_rate, breaks: of the chosen fleet, the highest rate that meets the SLO, and the trial above it.
        sensitivity: a change of the load → the trial of the chosen fleet.
        repetitions: trials of the chosen fleet with other seeds.
        compared: the nearest fleet, and the best of the other kind of the same size.
        curves: by fleet of `compared`, (rate, share of requests within all targets), in ascending order.
        here: the chosen fleet on the profile's machine, if that lacks cores.
    """

    trials: list[list[Trial]]
    nearest: Trial
    worth: dict[Dimension, list[Trial]] = field(default_factory=dict)
    highest_rate: float = math.nan
    breaks: Trial | None = None
    sensitivity: dict[str, Trial] = field(default_factory=dict)
    repetitions: list[Trial] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    here: Here | None = None

    @property
    def compared(self) -> list[Trial]:
        others = [one for one in self.trials[-1] if one.is_colocated is not self.nearest.is_colocated]
        return [self.nearest, *([best(others)] if others else [])]

    @property
    def chosen(self) -> Trial | None:
        """The fleet, or None if none meets the SLO."""
        return self.nearest if self.nearest.meets else None


class Planner:
    """Simulates what the search asks for, each run once, and shows how far it is.

    Args:
        show: told what was simulated, after each run.
        degrees: numbers of GPUs that an instance may have; empty: as the settings say.
    """

    def __init__(
        self,
        config: PlanConfig,
        profile: Profile,
        targets: Sequence[Target],
        show: Callable[[str], None],
        degrees: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._degrees = degrees
        self._profile = profile
        self._targets = targets
        self._show = show
        self._stage = "fleets"
        self._started = time.monotonic()
        self._count = 0
        self._trials: dict[tuple[PlanConfig, Fleet, float], Trial] = {}
        self.rate = mean_rate(config)
        check_fits(config, profile)

    def simulate(self, fleets: Sequence[Fleet], config: PlanConfig | None = None, rate: float = 0.0) -> Iterable[Trial]:
        """Simulate fleets under the load of `config` at `rate` requests per second, by default those of the plan."""
        config, rate = config or self._config, rate or self.rate
        new = [fleet for fleet in dict.fromkeys(fleets) if (config, fleet, rate) not in self._trials]
        for forecast in simulate_all(config, self._profile, {}, [(fleet, rate) for fleet in new]):
            self._trials[config, forecast.fleet, rate] = self._judge(forecast)
        return [self._trials[config, fleet, rate] for fleet in fleets]

    def _judge(self, forecast: Forecast) -> Trial:
        self._count += 1
        elapsed = time.monotonic() - self._started
        self._show(f"{self._stage}: run {self._count} was {forecast.fleet}, {elapsed:.0f} s")
        return judge(self._targets, forecast)

    def correct(self, measured: Sequence[Measured]) -> Correction:
        """Compare forecasts with measurements, and go on with a profile that they correct."""
        if not measured:
            return Correction(self._profile, [], [], {})
        self._stage = "measured"

        def forecast(profile: Profile) -> list[Comparison]:
            self._trials.clear()
            self._profile = profile
            return [compare(one, self._as_measured) for one in measured]

        correction = correct(self._profile, forecast)
        self._trials.clear()
        self._profile, self._stage = correction.profile, "fleets"
        return correction

    def screen(self) -> Trial:
        """Return a fleet of the smallest size that suffices, or one of the largest, with the settings tried first.

        What else a size has to offer is not simulated, nor what a fleet does once it misses the SLO.
        """
        limits = [
            Limit(one.metric, one.percentile, one.seconds)
            for one in self._targets
            if one.group == ALL and one.metric in ("ttft", "itl")
        ]
        screened: dict[Fleet, Trial] = {}

        def screen(fleets: Sequence[Fleet]) -> Iterator[Trial]:
            for fleet in fleets:
                if fleet not in screened:
                    screened[fleet] = self._judge(simulate(self._config, self._profile, {}, fleet, self.rate, limits))
                yield screened[fleet]
                if screened[fleet].meets:
                    return

        config, itl_targets = self._config, self._itl_targets()
        if config.instances is not None:
            return best(try_size(config.instances, itl_targets, screen))
        return best(smallest(config.max_instances, itl_targets, screen)[-1])

    def best_of(self, size: int) -> Trial:
        """Return the best fleet of a size, before its settings are tuned."""
        return best(try_size(size, self._itl_targets(), self.simulate))

    def plan(self) -> Plan:
        """Find the fleet and its settings, its headroom, and what changes of the load do to it."""
        config, itl_targets = self._config, self._itl_targets()
        settings = dimensions(config, self._profile, itl_targets, self._ttft_target())
        if config.instances is None:
            trials = smallest(config.max_instances, itl_targets, self.simulate)
        else:
            trials = [try_size(config.instances, itl_targets, self.simulate)]
        self._stage = "settings"
        trials, worth = tune_sizes(trials, settings, self.simulate, may_shrink=config.instances is None)
        nearest = self._nearest(trials[-1])
        if config.gpu and self._degrees:
            nearest = thrifty(config, nearest, self._degrees, lambda fleet: self._one(fleet, config, self.rate))
        is_same_kind = nearest.is_colocated is best(trials[-1]).is_colocated
        plan = Plan(trials, nearest, worth if is_same_kind else {})
        if plan.chosen is not None:
            fleet = plan.chosen.fleet
            self._stage = "rates"
            plan.highest_rate, plan.breaks = headroom(self.rate, lambda rate: self._one(fleet, config, rate))
            self._stage = "sensitivity"
            plan.sensitivity = self._sensitivity(fleet)
            self._stage = "other seeds"
            plan.repetitions = [self._one(fleet, other, self.rate) for other in self._other_seeds()]
        if config.html or config.json:
            self._stage = "rates"
            plan.curves = {str(one.fleet): self._curve(one.fleet) for one in plan.compared}
        if plan.chosen is not None:
            self._stage = "this machine"
            plan.here = self._here(plan.chosen.fleet)
        return plan

    def _here(self, fleet: Fleet) -> Here | None:
        """Return the fleet on the profile's machine; None if that has cores enough, or is not known."""
        config = config_here(self._config, self._profile, fleet)
        if config is None or config.cores is None:
            return None
        name = "this machine" if is_this_machine(self._profile) else "the profile's machine"
        needed = needed_by(config, self._profile, fleet)
        return Here(name, needed, config.cores, config.busy_threads, self._one(fleet, config, self.rate))

    def _nearest(self, trials: Sequence[Trial]) -> Trial:
        """Return the fleet with the most margin. With a single seed, chance decides between fleets that are close."""
        close = close_to_best(trials)
        if len(close) == 1:
            return close[0]
        self._stage = "other seeds"
        fleets = [one.fleet for one in close]
        return best_in_mean([close, *(list(self.simulate(fleets, other)) for other in self._other_seeds())])

    def _other_seeds(self) -> list[PlanConfig]:
        return [replace(self._config, seed=self._config.seed + number) for number in range(1, 1 + OTHER_SEEDS)]

    def _as_measured(self, fleet: Fleet, rate: float) -> Trial:
        """Simulate a fleet at its rate, if it is finite, with the cores of the profile's machine."""
        config = replace(self._config, cores=self._config.cores or self._profile.machine.cores or None)
        return self._one(fleet, config, rate if math.isfinite(rate) else self.rate)

    def _curve(self, fleet: Fleet) -> list[tuple[float, float]]:
        """Return the attainment of a fleet at a few rates, and at all that were simulated anyway."""
        for share in CURVE:
            self._one(fleet, self._config, self.rate * share)
        runs = self._trials.items()
        return sorted((rate, one.attainment) for (load, of, rate), one in runs if (load, of) == (self._config, fleet))

    def _itl_targets(self) -> list[float | None]:
        if self._config.itl_target_ms != "auto":
            return parse_itl_targets(self._config.itl_target_ms)
        limits = [target.seconds * 1e3 for target in self._targets if target.metric == "itl"]
        shares = [share * min(limits) for share in ITL_SHARES if limits]
        return [None, *(one for one in shares if one <= MAX_ITL_TARGET_MS)]

    def _ttft_target(self) -> float | None:
        """Return a --ttft-target-ms for the SLO; None if there is none, or the settings name one for all fleets."""
        limits = [target.seconds * 1e3 for target in self._targets if target.metric == "ttft"]
        return float(f"{TTFT_SHARE * min(limits):.6g}") if limits and self._config.ttft_target_ms is None else None

    def _sensitivity(self, fleet: Fleet) -> dict[str, Trial]:
        config, trials = self._config, {}
        for sign, factor in (("+", 1 + CHANGE), ("-", 1 - CHANGE)):
            percent = f"{sign}{CHANGE:.0%}"
            longer = replace(config, stretch_prompts=config.stretch_prompts * factor)
            more = replace(config, stretch_answers=config.stretch_answers * factor)
            trials[f"rate {percent}"] = self._one(fleet, config, self.rate * factor)
            trials[f"prompts {percent}"] = self._one(fleet, longer, self.rate)
            trials[f"answers {percent}"] = self._one(fleet, more, self.rate)
        return dict(sorted(trials.items()))

    def _one(self, fleet: Fleet, config: PlanConfig, rate: float) -> Trial:
        (trial,) = self.simulate([fleet], config, rate)
        return trial
