"""The command `pdserve plan`."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.tools.bench.page import format_ratio
from pdserve.tools.bench.report import check_writable, write_file
from pdserve.tools.bench.requests import counted
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner import deploy
from pdserve.tools.planner.advice import advise, describe, trade
from pdserve.tools.planner.charts import plan_page
from pdserve.tools.planner.gpus import cheapest, costs, fitting, gpus_by_role, prices
from pdserve.tools.planner.measured import Correction, load_measured
from pdserve.tools.planner.plan import CHANGE, Plan, Planner
from pdserve.tools.planner.search import NOISE, SATURATED_SHARE, Trial, best
from pdserve.tools.planner.settings import Dimension
from pdserve.tools.planner.slo_file import check_groups, load_targets
from pdserve.tools.planner.targets import Target, thin_sentences
from pdserve.tools.simulator.command import as_dict, as_table, console_for_tables, progress_line
from pdserve.tools.simulator.fleet import draw_requests, load_profile, notes, num_gpus

WORTHLESS_PROFILE, NO_FLEET = 1, 3  # exit codes
ROUTER_SHARE = 0.7  # of the time, in which routers may be busy
PROGRESS_S = 5.0  # between two lines about what is simulated


def run(config: PlanConfig) -> int:
    """Print the plan and write its reports.

    Returns:
        The exit code: 3 if no fleet meets the SLO, 1 if measurements say that the profile is not to be relied on.
    """
    targets = load_targets(config.slo, config.slo_file)
    check_writable(config.json, config.html, *(deploy.files_of(config.apply) if config.apply else ()))
    degrees = fitting(config) if config.gpu and config.tensor_parallel_size == "auto" else []
    with _progress() as show:
        if degrees:
            planner_of = cache(lambda own: Planner(own, load_profile(own), targets, show))
            config = cheapest(
                config, degrees, lambda own: planner_of(own).screen(), lambda own, size: planner_of(own).best_of(size)
            )
        profile = load_profile(config)
        planner = Planner(config, profile, targets, show, degrees)
        requests = counted(draw_requests(config, planner.rate), config.warmup_requests)
        check_groups(targets, requests)
        correction = planner.correct(load_measured(config.measured, requests))
        plan = planner.plan()
    verdict = [*correction.sentences(), *verdict_of(plan, targets, planner.rate, config)]
    details = [*sentences(plan, targets, planner.rate, config), *notes(config, profile)]
    common, start = deploy.common_of(config, profile), list[str]()
    if plan.chosen is not None:
        start = deploy.env_lines(plan.chosen, gpus_by_role(config, plan.chosen.fleet, profile), common)
    print("\n".join(verdict) + "\n")
    fleets = [trial for trials in plan.trials for trial in notable(trials)]
    console_for_tables().print(as_table([trial.forecast for trial in fleets]))
    if config.apply and plan.chosen is not None:
        by_role = gpus_by_role(config, plan.chosen.fleet, profile)
        start += ["", *deploy.write(config.apply, plan.chosen, by_role, common)]
    print("\n".join(["", *details, *(["", *start] if start else [])]))
    lines = [*verdict, *details, *start]
    if config.json:
        write_file(Path(config.json), json.dumps(to_json(plan, correction, lines), indent=2) + "\n")
    if config.html:
        slo = ", ".join(filter(None, [config.slo, config.slo_file]))
        title = f"Plan for {slo} at {planner.rate:.3g} requests/s"
        price_of = (lambda fleet: sum(prices(config, fleet).values())) if config.price else None
        text = plan_page(title, plan, fleets, correction.before, planner.rate, price_of, verdict, details, start)
        write_file(Path(config.html), text)
    return WORTHLESS_PROFILE if correction.is_worthless else NO_FLEET if plan.chosen is None else 0


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is simulated: on a terminal as it changes, otherwise a line every few seconds."""
    console, last = Console(stderr=True), time.monotonic()
    with progress_line(console) as show_line:

        def show(text: str) -> None:
            nonlocal last
            show_line(text)
            if not console.is_terminal and time.monotonic() - last > PROGRESS_S:
                last = time.monotonic()
                print(text, file=sys.stderr)

        yield show


def notable(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best colocated fleet and the best split of a size."""
    kinds = [[trial for trial in trials if trial.is_colocated is colocated] for colocated in (True, False)]
    return [best(kind) for kind in kinds if kind]


def verdict_of(plan: Plan, targets: Sequence[Target], rate: float, config: PlanConfig) -> list[str]:
    """Return what the plan says, in a few words."""
    if plan.chosen is None:
        nearest = plan.nearest
        share = nearest.forecast.busy.get("router", 0.0)
        figures = nearest.forecast.figures
        offered = config.routers * share * max(1.0, rate * figures["duration"] / max(1.0, figures["completed"]))
        more = math.ceil(offered / ROUTER_SHARE)
        router = f"Instances do not help a router that is busy {share:.0%} of the time: try --routers {more}."
        return [
            f"No fleet of up to {nearest.fleet.size if config.instances else config.max_instances} instances meets the SLO "
            f"at {rate:.3g} requests/s.",
            f"The nearest is {describe(nearest, targets)}.{'' if nearest.failure else f' What binds is {nearest.binding}.'}",
            *([router] if share >= SATURATED_SHARE else []),
        ]
    kind = "Best" if config.instances else "Smallest"
    rented = f" on {num_gpus(config, plan.chosen.fleet)} x {config.gpu}, by roofline" if config.gpu else ""
    here = [] if plan.here is None else [plan.here.sentence(targets)]
    return [f"{kind} fleet for {rate:.3g} requests/s{rented}: {describe(plan.chosen, targets)}.", *here]


def sentences(plan: Plan, targets: Sequence[Target], rate: float, config: PlanConfig) -> list[str]:
    """Return the rest of the report in words."""
    last = plan.trials[-1]
    worth = [_worth(dimension, trials, plan.nearest) for dimension, trials in plan.worth.items()]
    traded = filter(None, [trade(plan.compared)])
    if plan.chosen is None:
        return [*thin_sentences(plan.nearest.counts), advise(last, targets), *traded, *worth]
    lines = list[str]()
    if plan.breaks is None:
        lines.append(f"It holds beyond {plan.highest_rate:.3g} requests/s.")
    else:
        lines.append(f"It holds up to {plan.highest_rate:.3g} requests/s; above, {_above(plan.breaks)}.")
    broken = [change for change, trial in plan.sensitivity.items() if not trial.meets]
    lines.append(
        f"It does not survive: {', '.join(broken)}." if broken else f"It survives ±{CHANGE:.0%} of rate and lengths."
    )
    lines += thin_sentences(plan.chosen.counts)
    met = sum(trial.meets for trial in plan.repetitions)
    lines.append(f"With {len(plan.repetitions)} other seeds, the SLO is met {met} times.")
    lines += [advise(last, targets), *traded, *worth]
    if config.price:
        lines += [costs(config, one, rate) for one in (plan.chosen, *plan.compared[1:])]
    return lines


def _above(breaks: Trial) -> str:
    return f"it {breaks.failure}" if breaks.failure else f"{breaks.binding} breaks first"


def _worth(dimension: Dimension, trials: Sequence[Trial], chosen: Trial) -> str:
    """Say what a setting is worth: the worst figure ÷ target with each of its values."""
    ratios = {dimension.label(trial.fleet): trial.ratio for trial in trials}
    if max(ratios.values()) - min(ratios.values()) <= NOISE * min(ratios.values()):
        return f"{dimension.flag} is worth nothing here: {', '.join(ratios)}."
    own = dimension.label(chosen.fleet)
    parts = [f"{label} {format_ratio(ratio)}{' (chosen)' if label == own else ''}" for label, ratio in ratios.items()]
    return f"Worst figure ÷ target by {dimension.flag}: {', '.join(parts)}."


def to_json(plan: Plan, correction: Correction, lines: Sequence[str]) -> dict[str, Any]:
    """Return the plan with all trials, and how far its profile was off."""

    def row(trial: Trial) -> dict[str, Any]:
        ratio = {"worst_ratio": trial.ratio, "binding": str(trial.binding), "failure": trial.failure}
        ratio |= {"meets": trial.meets}
        values = {str(target): seconds * 1e3 for target, seconds in trial.values.items()}
        return as_dict(trial.forecast) | ratio | {"attainment": trial.attainment, "targets_ms": values}

    return {
        "chosen": None if plan.chosen is None else row(plan.chosen),
        "highest_rate": None if plan.chosen is None else plan.highest_rate,
        "sensitivity": {change: row(trial) for change, trial in plan.sensitivity.items()},
        "repetitions": [row(trial) for trial in plan.repetitions],
        "settings": {
            dimension.name: [{"value": dimension.value(trial.fleet)} | row(trial) for trial in trials]
            for dimension, trials in plan.worth.items()
        },
        "attainment_by_rate": plan.curves,
        "measured": [
            {"fleet": str(one.measured.fleet), "file": one.measured.name, "forecast_and_measured": one.rows}
            for one in correction.before
        ],
        "corrected": {kind: round(factor, 4) for kind, factor in correction.factors.items()},
        "here": None
        if plan.here is None
        else row(plan.here.trial) | {"cores": plan.here.cores, "needed": plan.here.needed},
        "trials": [row(trial) for trials in plan.trials for trial in trials],
        "text": list(lines),
    }
