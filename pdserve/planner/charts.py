"""Charts of a plan: how far each fleet is from the SLO, and what its first tokens wait for."""

from collections.abc import Sequence

from pdserve.bench.page import Chart, chart
from pdserve.planner.search import Trial
from pdserve.planner.targets import Target

MAX_RATIO = 3.0  # shown


def charts(trials: Sequence[Sequence[Trial]], targets: Sequence[Target]) -> list[Chart]:
    """Return a heat map over P×D, each target by fleet, and throughput against the speed of a stream."""
    every = [trial for one in trials for trial in one]
    return [heat_map(every), *(bars(every, target) for target in targets), pareto(every)]


def heat_map(trials: Sequence[Trial]) -> Chart:
    split = [trial for trial in trials if not trial.is_colocated]
    cells = {(trial.fleet.prefill, trial.fleet.decode): min(trial.ratio, MAX_RATIO) for trial in split}
    x, y = sorted({decode for _, decode in cells}), sorted({prefill for prefill, _ in cells})
    z = [[cells.get((prefill, decode)) for decode in x] for prefill in y]
    scale = [[0, "#2c7bb6"], [1 / MAX_RATIO, "#ffffbf"], [1, "#d7191c"]]
    data = {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": 0, "zmax": MAX_RATIO, "colorscale": scale}
    return chart("worst figure as a share of its target, over D (across) and P (up); below 1 meets the SLO", [data])


def bars(trials: Sequence[Trial], target: Target) -> Chart:
    names = [str(trial.fleet) for trial in trials]
    values = [trial.forecast.figures[target.figure] for trial in trials]
    limit = {"x": names, "y": [target.seconds * 1e3] * len(names), "mode": "lines", "name": "target"}
    return chart(f"{target}, ms by fleet", [{"type": "bar", "x": names, "y": values, "name": str(target)}, limit])


def pareto(trials: Sequence[Trial]) -> Chart:
    points = {
        "x": [1e3 / max(1e-3, trial.forecast.figures["median_tpot_ms"]) for trial in trials],
        "y": [trial.forecast.figures["output_throughput"] / trial.fleet.size for trial in trials],
        "text": [str(trial.fleet) for trial in trials],
        "mode": "markers+text",
    }
    return chart("tokens/s per instance against tokens/s of a stream", [points])
