"""Charts of a plan: how far each fleet is from the SLO, and what its first tokens wait for."""

from collections.abc import Sequence

from pdserve.bench.page import Chart, chart
from pdserve.planner.search import Trial, best
from pdserve.planner.targets import Target

MAX_RATIO = 3.0  # shown


def charts(trials: Sequence[Sequence[Trial]], targets: Sequence[Target]) -> list[Chart]:
    """Return a heat map over P×D, each target by fleet, and throughput against the speed of a stream."""
    every = [trial for one in trials for trial in one]
    shown = [trial for one in trials for trial in without_worse_settings(one)]
    return [heat_map(every), *(bars(shown, target) for target in targets), pareto(shown)]


def without_worse_settings(trials: Sequence[Trial]) -> list[Trial]:
    """Return all splits of a size, and of its colocated fleets the best one."""
    colocated = [trial for trial in trials if trial.is_colocated]
    return [*([best(colocated)] if colocated else []), *(trial for trial in trials if not trial.is_colocated)]


def heat_map(trials: Sequence[Trial]) -> Chart:
    split = [trial for trial in trials if not trial.is_colocated]
    cells = {(trial.fleet.prefill, trial.fleet.decode): min(trial.ratio, MAX_RATIO) for trial in split}
    columns, lines = sorted({decode for _, decode in cells}), sorted({prefill for prefill, _ in cells})
    z = [[cells.get((prefill, decode)) for decode in columns] for prefill in lines]
    x, y = [f"{decode}D" for decode in columns], [f"{prefill}P" for prefill in lines]
    scale = [[0, "#2c7bb6"], [1 / MAX_RATIO, "#ffffbf"], [1, "#d7191c"]]
    data = {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": 0, "zmax": MAX_RATIO, "colorscale": scale}
    return chart("worst figure ÷ target; below 1: met", [data])


def bars(trials: Sequence[Trial], target: Target) -> Chart:
    names = [str(trial.fleet) for trial in trials]
    values = [trial.values[target] * 1e3 for trial in trials]
    limit = {"x": names, "y": [target.seconds * 1e3] * len(names), "mode": "lines", "name": "target"}
    data: list[Chart] = [{"type": "bar", "x": names, "y": values, "name": str(target)}, limit]
    return chart(f"{target}, ms by fleet", data, range=[0, MAX_RATIO * target.seconds * 1e3])


def pareto(trials: Sequence[Trial]) -> Chart:
    points = {
        "x": [1e3 / max(1e-3, trial.forecast.figures["median_tpot_ms"]) for trial in trials],
        "y": [trial.forecast.figures["output_throughput"] / trial.fleet.size for trial in trials],
        "text": [str(trial.fleet) for trial in trials],
        "mode": "markers",
    }
    return chart("tokens/s per instance by tokens/s of a stream", [points])
