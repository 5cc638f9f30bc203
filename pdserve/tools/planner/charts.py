"""Charts of a plan: how far each fleet is from the SLO, what its requests wait for, and what changes do to it."""

from collections.abc import Mapping, Sequence

from pdserve.tools.bench.page import Chart, chart, is_worth_drawing
from pdserve.tools.planner.advice import TRADED
from pdserve.tools.planner.measured import THROUGHPUT, Comparison
from pdserve.tools.planner.plan import Plan
from pdserve.tools.planner.search import Trial, best
from pdserve.tools.planner.settings import Dimension
from pdserve.tools.planner.targets import Target
from pdserve.tools.simulator.breakdown import DECODE_STEP, HAND_OVER, TTFT_PARTS

MAX_RATIO = 3.0  # shown
MET, MISSED = "#2c7bb6", "#d7191c"
COLOURS = ("#1f77b4", "#ff7f0e")


def charts(
    plan: Plan, comparisons: Sequence[Comparison], targets: Sequence[Target], rate: float, price: float
) -> list[Chart]:
    """Return the charts of a plan that have something to show."""
    shown = [trial for trials in plan.trials for trial in best_of_shapes(trials)]
    drawn = [
        *([rate_curves(plan.curves, rate)] if plan.curves else []),
        *heat_map(shown),
        pareto(shown, price),
        frontier(plan.trials[-1]),
        *(waterfall(trial) for trial in plan.compared),
        *([sensitivity(plan.sensitivity)] if plan.sensitivity else []),
        *(setting(dimension, trials) for dimension, trials in plan.worth.items()),
        *(bars(shown, target) for target in targets),
        *(beside(one) for one in comparisons),
        speeds(shown),
    ]
    return [one for one in drawn if is_worth_drawing(one)]


def best_of_shapes(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best trial of each split, and of the colocated fleets, with whatever settings."""
    shapes: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        shapes.setdefault((trial.fleet.prefill, trial.fleet.decode), []).append(trial)
    return [best(shapes[shape]) for shape in sorted(shapes)]


def rate_curves(curves: Mapping[str, Sequence[tuple[float, float]]], rate: float) -> Chart:
    data: list[Chart] = []
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        x, y = [one for one, _ in points], [100 * share for _, share in points]
        data.append({"x": x, "y": y, "mode": "lines+markers", "name": name, "line": {"color": colour}})
    line = {"type": "line", "x0": rate, "x1": rate, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot"}}
    return chart("% of requests within all targets, by rate (req/s)", data, [line], range=[0, 103])


def heat_map(trials: Sequence[Trial]) -> list[Chart]:
    cells = {(one.fleet.prefill, one.fleet.decode): min(one.ratio, MAX_RATIO) for one in trials if not one.is_colocated}
    if not cells:
        return []
    columns, lines = sorted({decode for _, decode in cells}), sorted({prefill for prefill, _ in cells})
    z = [[cells.get((prefill, decode)) for decode in columns] for prefill in lines]
    x, y = [f"{decode}D" for decode in columns], [f"{prefill}P" for prefill in lines]
    scale = [[0, MET], [1 / MAX_RATIO, "#ffffbf"], [1, MISSED]]
    data = {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": 0, "zmax": MAX_RATIO, "colorscale": scale}
    return [chart("worst figure ÷ target; below 1: met", [data])]


def pareto(trials: Sequence[Trial], price: float) -> Chart:
    """Return attainment by instances, or by their price; the line joins fleets that none beats in both."""
    each, unit = (price, "price per hour") if price else (1.0, "instances")
    front = list[Trial]()
    for trial in sorted(trials, key=lambda one: (one.fleet.size, -one.attainment)):
        if not front or trial.attainment > front[-1].attainment:
            front.append(trial)
    data: list[Chart] = []
    for name, chosen, mode in (("fleets", trials, "markers"), ("Pareto front", front, "lines+markers+text")):
        x, y = [each * one.fleet.size for one in chosen], [100 * one.attainment for one in chosen]
        text = [one.fleet.shape for one in chosen]
        data.append({"x": x, "y": y, "text": text, "mode": mode, "name": name, "textposition": "top center"})
    drawn = chart(f"% of requests within all targets, by {unit}", data, range=[0, 115])
    drawn["layout"]["xaxis"] = {"range": [0, each * (max(one.fleet.size for one in trials) + 1)]}
    return drawn


def frontier(trials: Sequence[Trial]) -> Chart:
    """Return TTFT p50 by ITL p99 of all fleets of a size. Named are those that no other beats in these and in throughput."""
    points = {id(one): [one.forecast.figures[name] for name in TRADED.values()] for one in trials}
    data: list[Chart] = []
    for kind, colour, is_colocated in (("split", MET, False), ("colocated", MISSED, True)):
        own = [one for one in trials if one.is_colocated is is_colocated]
        unbeaten = [one for one in own if not any(_beats(other, points[id(one)]) for other in points.values())]
        for chosen, mode, size in ((own, "markers", 6), (unbeaten, "markers+text", 12)):
            _, y, x = zip(*(points[id(one)] for one in chosen), strict=True) if chosen else ((), (), ())
            text = [f"{one.fleet.shape}, {points[id(one)][0]:.3g} req/s" for one in chosen]
            more = {"name": kind, "showlegend": size > 6, "textposition": "top center"}
            data.append({"x": x, "y": y, "text": text, "mode": mode, "marker": {"color": colour, "size": size}, **more})
    return chart("TTFT p50 by ITL p99, ms; named: what no fleet beats in these and throughput", data)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether a fleet has more throughput and shorter times than another one."""
    return one[0] >= other[0] and all(a < b for a, b in zip(one[1:], other[1:], strict=True))


def waterfall(trial: Trial) -> Chart:
    """Return the parts of TTFT and of the gap after it, of all requests and of the slowest tenth."""
    data: list[Chart] = []
    for (name, parts), colour in zip(trial.forecast.figures["ttft_parts_ms"].items(), COLOURS, strict=False):
        fill = {"marker": {"color": colour}}
        data.append(
            {
                "type": "waterfall",
                "name": name,
                "x": [*TTFT_PARTS, "TTFT", HAND_OVER, DECODE_STEP, "token 2"],
                "y": [*(parts[one] for one in TTFT_PARTS), 0, parts[HAND_OVER], parts[DECODE_STEP], 0],
                "measure": [*["relative"] * len(TTFT_PARTS), "total", "relative", "relative", "total"],
                "increasing": fill,
                "connector": {"visible": False},
                "totals": {"marker": {"color": colour, "line": {"color": "#222", "width": 2}}},
            }
        )
    return with_long_labels(chart(f"{trial.fleet.shape}: ms until tokens 1 and 2", data))


def with_long_labels(drawn: Chart) -> Chart:
    """Leave room for slanted labels of the horizontal axis, above the legend."""
    drawn["layout"]["xaxis"] = {"type": "category", "automargin": True}
    drawn["layout"]["legend"]["y"] = -0.35
    return drawn


def sensitivity(trials: Mapping[str, Trial]) -> Chart:
    return _ratios("worst figure ÷ target if the load changes", trials)


def setting(dimension: Dimension, trials: Sequence[Trial]) -> Chart:
    return _ratios(f"worst figure ÷ target by {dimension.flag}", {dimension.label(one.fleet): one for one in trials})


def _ratios(title: str, trials: Mapping[str, Trial]) -> Chart:
    values = [min(trial.ratio, MAX_RATIO) for trial in trials.values()]
    colours = [MET if trial.meets else MISSED for trial in trials.values()]
    hover = [str(trial.binding) for trial in trials.values()]
    data = {"type": "bar", "x": list(trials), "y": values, "text": hover, "marker": {"color": colours}}
    data |= {"textposition": "none"}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dot", "width": 1}}
    return with_long_labels(chart(title, [data], [line], rangemode="tozero"))


def bars(trials: Sequence[Trial], target: Target) -> Chart:
    names = [trial.fleet.shape for trial in trials]
    values = [trial.values[target] * 1e3 for trial in trials]
    limit = {"x": names, "y": [target.seconds * 1e3] * len(names), "mode": "lines", "name": "target"}
    data: list[Chart] = [{"type": "bar", "x": names, "y": values, "name": str(target)}, limit]
    return chart(f"{target}, ms by fleet", data, range=[0, MAX_RATIO * target.seconds * 1e3])


def beside(comparison: Comparison) -> Chart:
    rows = [row for row in comparison.rows if row[0] != THROUGHPUT]
    names = [name for name, *_ in rows]
    data: list[Chart] = [
        {"type": "bar", "x": names, "y": [row[1] for row in rows], "name": "forecast"},
        {"type": "bar", "x": names, "y": [row[2] for row in rows], "name": "measured"},
    ]
    title = f"{comparison.measured.fleet}, forecast and measured, ms"
    return chart(title, data, type="log")


def speeds(trials: Sequence[Trial]) -> Chart:
    points = {
        "x": [1e3 / max(1e-3, trial.forecast.figures["median_tpot_ms"]) for trial in trials],
        "y": [trial.forecast.figures["output_throughput"] / trial.fleet.size for trial in trials],
        "text": [trial.fleet.shape for trial in trials],
        "mode": "markers",
    }
    drawn = chart("tokens/s per instance by tokens/s of a stream", [points], rangemode="tozero")
    drawn["layout"]["xaxis"] = {"rangemode": "tozero"}
    return drawn
