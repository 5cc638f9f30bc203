"""The command `pdserve plan`."""

import json
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from pdserve.bench import page
from pdserve.bench.report import write_file
from pdserve.config import PlanConfig
from pdserve.planner.advice import advise, describe, env_lines
from pdserve.planner.charts import charts
from pdserve.planner.search import Trial, best, headroom, judge, smallest, try_size
from pdserve.planner.slo_file import check_groups, load_targets
from pdserve.planner.targets import Target
from pdserve.profile.profile import Profile
from pdserve.simulator.command import as_dict, as_table, console_for_tables
from pdserve.simulator.fleet import Fleet, draw_requests, load_profile, mean_rate, parse_itl_targets, simulate_all

CHANGE = 0.2  # of rate and lengths, whose effect is reported
ITL_SHARES = (0.5, 0.75, 1.0)  # of the ITL target, tried as --itl-target-ms of colocated instances


@dataclass
class Plan:
    """What was found.

    Attributes:
        trials: all simulated fleets at the load as given, by size.
        chosen: the fleet, or None if none meets the SLO.
        highest_rate, breaks: of the chosen fleet, the highest rate that meets the SLO, and the trial above it.
        sensitivity: a change of the load → the trial of the chosen fleet.
    """

    trials: list[list[Trial]]
    chosen: Trial | None = None
    highest_rate: float = math.nan
    breaks: Trial | None = None
    sensitivity: dict[str, Trial] | None = None


class Planner:
    """Simulates what the search asks for, and shows how far it is."""

    def __init__(self, config: PlanConfig, profile: Profile, targets: Sequence[Target], status: Status) -> None:
        self._config = config
        self._profile = profile
        self._targets = targets
        self._status = status
        self._started = time.monotonic()
        self._count = 0
        self.rate = mean_rate(config)

    def simulate(self, fleets: Sequence[Fleet], config: PlanConfig | None = None, rate: float = 0.0) -> Iterable[Trial]:
        """Simulate fleets under the load of the settings, or of other ones, at a rate."""
        runs = [(fleet, rate or self.rate) for fleet in fleets]
        for forecast in simulate_all(config or self._config, self._profile, {}, runs):
            self._count += 1
            elapsed = time.monotonic() - self._started
            self._status.update(f"simulated {self._count} runs, the last of {forecast.fleet}, {elapsed:.0f} s")
            yield judge(self._targets, forecast)

    def plan(self) -> Plan:
        """Find the fleet, its headroom, and what changes of the load do to it."""
        config, itl_targets = self._config, self._itl_targets()
        if config.instances is None:
            trials = smallest(config.max_instances, itl_targets, self.simulate)
        else:
            trials = [try_size(config.instances, itl_targets, self.simulate)]
        chosen = best(trials[-1])
        if not chosen.meets:
            return Plan(trials)
        highest, breaks = headroom(self.rate, lambda rate: self._one(chosen.fleet, config, rate))
        return Plan(trials, chosen, highest, breaks, self._sensitivity(chosen.fleet))

    def _itl_targets(self) -> list[float | None]:
        if self._config.itl_target_ms != "auto":
            return parse_itl_targets(self._config.itl_target_ms)
        limits = [target.seconds * 1e3 for target in self._targets if target.metric == "itl"]
        return [None, *(share * min(limits) for share in ITL_SHARES if limits)]

    def _sensitivity(self, fleet: Fleet) -> dict[str, Trial]:
        config, trials = self._config, {}
        for sign, factor in (("+", 1 + CHANGE), ("-", 1 - CHANGE)):
            percent = f"{sign}{CHANGE:.0%}"
            trials[f"rate {percent}"] = self._one(fleet, config, self.rate * factor)
            trials[f"prompts {percent}"] = self._one(fleet, replace(config, stretch_prompts=factor), self.rate)
            trials[f"answers {percent}"] = self._one(fleet, replace(config, stretch_answers=factor), self.rate)
        return trials

    def _one(self, fleet: Fleet, config: PlanConfig, rate: float) -> Trial:
        (trial,) = self.simulate([fleet], config, rate)
        return trial


def run(config: PlanConfig) -> bool:
    """Print the plan and write its reports. Returns False if no fleet meets the SLO."""
    targets = load_targets(config.slo, config.slo_file)
    plotly = page.load_plotly() if config.html else ""
    profile = load_profile(config)
    logging.getLogger("pdserve").setLevel(logging.ERROR)  # simulated instances are real ones, and say as much
    with Console(stderr=True).status("simulating") as status:
        planner = Planner(config, profile, targets, status)
        check_groups(targets, draw_requests(config, planner.rate))
        plan = planner.plan()
    console_for_tables().print(as_table([trial.forecast for trials in plan.trials for trial in notable(trials)]))
    lines = sentences(plan, targets, planner.rate, config)
    print("\n" + "\n".join(lines))
    if config.json:
        write_file(Path(config.json), json.dumps(to_json(plan, lines), indent=2) + "\n")
    if config.html:
        slo = ", ".join(filter(None, [config.slo, config.slo_file]))
        title = f"Plan for {slo} at {planner.rate:.3g} requests/s"
        write_file(Path(config.html), page.page(title, "\n".join(lines), [], charts(plan.trials, targets), plotly))
    return plan.chosen is not None


def notable(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best colocated fleet and the best split of a size."""
    kinds = [[trial for trial in trials if trial.is_colocated is colocated] for colocated in (True, False)]
    return [best(kind) for kind in kinds if kind]


def sentences(plan: Plan, targets: Sequence[Target], rate: float, config: PlanConfig) -> list[str]:
    """Return the report in words."""
    last = plan.trials[-1]
    if plan.chosen is None:
        nearest = best(trial for trials in plan.trials for trial in trials)
        return [
            f"No fleet of up to {nearest.fleet.size if config.instances else config.max_instances} instances meets the SLO "
            f"at {rate:.3g} requests/s.",
            f"The nearest is {describe(nearest, targets)}. What binds is {nearest.binding}.",
            advise(last, targets),
        ]
    fleet = plan.chosen.fleet
    lines = [
        f"{'Best' if config.instances else 'Smallest'} fleet for {rate:.3g} requests/s: {describe(plan.chosen, targets)}."
    ]
    if plan.breaks is None:
        lines.append(f"It holds beyond {plan.highest_rate:.3g} requests/s.")
    else:
        lines.append(f"It holds up to {plan.highest_rate:.3g} requests/s; above, {plan.breaks.binding} breaks first.")
    broken = [change for change, trial in (plan.sensitivity or {}).items() if not trial.meets]
    lines.append(
        f"It does not survive: {', '.join(broken)}." if broken else f"It survives ±{CHANGE:.0%} of rate and lengths."
    )
    lines.append(advise(last, targets))
    if config.price:
        lines.append(f"It costs {fleet.size * config.price:.2f} per hour.")
    return [*lines, "", *env_lines(plan.chosen)]


def to_json(plan: Plan, lines: Sequence[str]) -> dict[str, Any]:
    """Return the plan with all trials."""

    def row(trial: Trial) -> dict[str, Any]:
        ratio = {"worst_ratio": trial.ratio, "binding": str(trial.binding), "meets": trial.meets}
        values = {str(target): seconds * 1e3 for target, seconds in trial.values.items()}
        return as_dict(trial.forecast) | ratio | {"attainment": trial.attainment, "targets_ms": values}

    return {
        "chosen": None if plan.chosen is None else row(plan.chosen),
        "highest_rate": None if plan.chosen is None else plan.highest_rate,
        "sensitivity": {change: row(trial) for change, trial in (plan.sensitivity or {}).items()},
        "trials": [row(trial) for trials in plan.trials for trial in trials],
        "text": list(lines),
    }
