"""The command `pdserve plan`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.tools.bench import page
from pdserve.tools.bench.report import write_file
from pdserve.tools.bench.requests import counted
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.advice import advise, describe, env_lines, trade
from pdserve.tools.planner.charts import charts
from pdserve.tools.planner.measured import load_measured
from pdserve.tools.planner.plan import CHANGE, Plan, Planner
from pdserve.tools.planner.search import NOISE, Trial, best
from pdserve.tools.planner.settings import Dimension
from pdserve.tools.planner.slo_file import check_groups, load_targets
from pdserve.tools.planner.targets import Target, thin_sentences
from pdserve.tools.simulator.command import as_dict, as_table, console_for_tables
from pdserve.tools.simulator.fleet import draw_requests, load_profile, notes


def run(config: PlanConfig) -> bool:
    """Print the plan and write its reports. Returns False if no fleet meets the SLO."""
    targets = load_targets(config.slo, config.slo_file)
    plotly = page.load_plotly() if config.html else ""
    profile = load_profile(config)
    with Console(stderr=True).status("simulating") as status:
        planner = Planner(config, profile, targets, status)
        requests = counted(draw_requests(config, planner.rate), config.warmup_requests)
        check_groups(targets, requests)
        plan = planner.plan(load_measured(config.measured, requests))
    console_for_tables().print(as_table([trial.forecast for trials in plan.trials for trial in notable(trials)]))
    lines = [*sentences(plan, targets, planner.rate, config), *notes(config, profile)]
    print("\n" + "\n".join(lines))
    if config.json:
        write_file(Path(config.json), json.dumps(to_json(plan, lines), indent=2) + "\n")
    if config.html:
        slo = ", ".join(filter(None, [config.slo, config.slo_file]))
        title = f"Plan for {slo} at {planner.rate:.3g} requests/s"
        drawn = charts(plan, targets, planner.rate, config.price)
        write_file(Path(config.html), page.page(title, "\n".join(lines), [], drawn, plotly))
    return plan.chosen is not None


def notable(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best colocated fleet and the best split of a size."""
    kinds = [[trial for trial in trials if trial.is_colocated is colocated] for colocated in (True, False)]
    return [best(kind) for kind in kinds if kind]


def sentences(plan: Plan, targets: Sequence[Target], rate: float, config: PlanConfig) -> list[str]:
    """Return the report in words."""
    last = plan.trials[-1]
    worth = [_worth(dimension, trials, plan.nearest) for dimension, trials in plan.worth.items()]
    traded = filter(None, [trade(plan.compared)])
    if plan.chosen is None:
        nearest = plan.nearest
        return [
            f"No fleet of up to {nearest.fleet.size if config.instances else config.max_instances} instances meets the SLO "
            f"at {rate:.3g} requests/s.",
            f"The nearest is {describe(nearest, targets)}.{'' if nearest.failure else f' What binds is {nearest.binding}.'}",
            *thin_sentences(nearest.counts),
            advise(last, targets),
            *traded,
            *worth,
            *map(str, plan.comparisons),
        ]
    fleet = plan.chosen.fleet
    lines = [
        f"{'Best' if config.instances else 'Smallest'} fleet for {rate:.3g} requests/s: {describe(plan.chosen, targets)}."
    ]
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
    lines += [advise(last, targets), *traded, *worth, *map(str, plan.comparisons)]
    if config.price:
        lines.append(f"It costs {fleet.size * config.price:.2f} per hour.")
    return [*lines, "", *env_lines(plan.chosen)]


def _above(breaks: Trial) -> str:
    return f"it {breaks.failure}" if breaks.failure else f"{breaks.binding} breaks first"


def _worth(dimension: Dimension, trials: Sequence[Trial], chosen: Trial) -> str:
    """Say what a setting is worth: the worst figure ÷ target with each of its values."""
    ratios = {dimension.label(trial.fleet): trial.ratio for trial in trials}
    if max(ratios.values()) - min(ratios.values()) <= NOISE * min(ratios.values()):
        return f"{dimension.flag} is worth nothing here: {', '.join(ratios)}."
    own = dimension.label(chosen.fleet)
    parts = [f"{label} {ratio:.2f}{' (chosen)' if label == own else ''}" for label, ratio in ratios.items()]
    return f"Worst figure ÷ target by {dimension.flag}: {', '.join(parts)}."


def to_json(plan: Plan, lines: Sequence[str]) -> dict[str, Any]:
    """Return the plan with all trials."""

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
            for one in plan.comparisons
        ],
        "trials": [row(trial) for trials in plan.trials for trial in trials],
        "text": list(lines),
    }
