"""The report of a plan: verdict and fleets, what breaks first, what requests wait for, and what settings are worth."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pdserve.tools.bench.page import (
    Section,
    format_ratio,
    heat_map,
    listing,
    page,
    pair,
    ratios,
    shares,
    significant,
    table,
    words,
)
from pdserve.tools.bench.plot import Curve, plot
from pdserve.tools.planner.advice import TRADED
from pdserve.tools.planner.measured import Comparison
from pdserve.tools.planner.plan import Plan
from pdserve.tools.planner.search import Trial, best
from pdserve.tools.planner.settings import Dimension
from pdserve.tools.simulator.breakdown import DECODE_STEP, HAND_OVER, TTFT_PARTS
from pdserve.tools.simulator.command import as_rows
from pdserve.tools.simulator.fleet import Fleet

COLOURS = ("prefill", "connector")  # of compared fleets
PART_COLOURS = dict(
    zip([*TTFT_PARTS, HAND_OVER, DECODE_STEP], ("router", "queue", "prefill", "connector", "decode"), strict=True)
)


def plan_page(
    title: str,
    plan: Plan,
    fleets: Sequence[Trial],
    comparisons: Sequence[Comparison],
    rate: float,
    price_of: Callable[[Fleet], float] | None,
    verdict: Sequence[str],
    details: Sequence[str],
    start: Sequence[str],
) -> str:
    """Return the report.

    Args:
        fleets: of the table.
        comparisons: of forecasts and measurements.
        price_of: price of a fleet per hour; None: unknown.
        verdict, details: sentences.
        start: lines that start the fleet.
    """
    shown = [trial for trials in plan.trials for trial in best_of_shapes(trials)]
    sections: list[Section] = [
        ("Forecast and measured", [beside(one) for one in comparisons]),
        ("Fleets, times in ms", [fleet_table(fleets, plan.nearest)]),
        ("What breaks first", [pair([sensitivity(plan), rate_curves(plan.curves, rate)])]),
        ("Prefill by decode instances: worst figure ÷ target, the SLO is met below 1", [splits(shown)]),
        ("What requests wait for", [waterfall(plan.compared)]),
        ("Fleets beside each other", [pair([pareto(shown, price_of), frontier(plan.trials[-1]), speeds(shown)])]),
        ("Settings", [pair(setting(dimension, trials) for dimension, trials in plan.worth.items())]),
        ("In words", [words(details), listing(start)]),
    ]
    return page(title, verdict, sections, is_good=plan.chosen is not None)


def best_of_shapes(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best trial of each split, and of the colocated fleets, with whatever settings."""
    shapes: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        shapes.setdefault((trial.fleet.prefill, trial.fleet.decode), []).append(trial)
    return [best(shapes[shape]) for shape in sorted(shapes)]


def fleet_table(fleets: Sequence[Trial], nearest: Trial) -> str:
    """Return the figures of fleets; the chosen or nearest one stands out."""
    header, rows = as_rows([one.forecast for one in fleets])
    worst = [f"{format_ratio(one.ratio)} {'' if one.failure else one.binding}".strip() for one in fleets]
    chosen = [number for number, one in enumerate(fleets) if one.fleet == nearest.fleet]
    return table([*header, "worst ÷ target"], [[*row, text] for row, text in zip(rows, worst, strict=True)], chosen)


def beside(comparison: Comparison) -> str:
    """Return a table of forecast and measured figures, with the forecast's error."""
    rows = [
        (
            name,
            significant(forecast, 4),
            significant(measured, 4),
            f"{forecast / measured - 1:+.0%}" if measured else "",
        )
        for name, forecast, measured in comparison.rows
    ]
    return table((str(comparison.measured.fleet), "forecast", "measured", "error"), rows)


def sensitivity(plan: Plan) -> str:
    return _ratios("Worst figure ÷ target if the load changes", plan.sensitivity)


def rate_curves(curves: Mapping[str, Sequence[tuple[float, float]]], rate: float) -> str:
    lines = [
        Curve(
            [one for one, _ in points],
            [100 * share for _, share in points],
            name,
            colour,
            is_line=True,
            labels=[f"{one:.3g} requests/s: {share:.1%}" for one, share in points],
        )
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False)
    ]
    return plot("% of requests within all targets", lines, "requests/s; dashed: as planned", at_x=[rate], most_y=103)


def splits(trials: Sequence[Trial]) -> str:
    """Return the heat map of splits."""
    cells = {(one.fleet.prefill, one.fleet.decode): one.ratio for one in trials if not one.is_colocated}
    columns, lines = sorted({decode for _, decode in cells}), sorted({prefill for prefill, _ in cells})
    rows = {f"{prefill}P": [cells.get((prefill, decode)) for decode in columns] for prefill in lines}
    return heat_map("", [f"{decode}D" for decode in columns], rows)


def pareto(trials: Sequence[Trial], price_of: Callable[[Fleet], float] | None = None) -> str:
    """Return attainment by instances, or by their price; the line joins fleets that none beats in both."""
    size_of = price_of or (lambda fleet: float(fleet.size))
    front = list[Trial]()
    for trial in sorted(trials, key=lambda one: (size_of(one.fleet), -one.attainment)):
        if not front or trial.attainment > front[-1].attainment:
            front.append(trial)

    def curve(chosen: Sequence[Trial], name: str, colour: str, *, is_front: bool) -> Curve:
        x, y = [size_of(one.fleet) for one in chosen], [100 * one.attainment for one in chosen]
        return Curve(
            x, y, name, colour, is_line=is_front, labels=[one.fleet.shape for one in chosen], is_named=is_front
        )

    curves = [
        curve(trials, "fleets", "router", is_front=False),
        curve(front, "the best for its size", "prefill", is_front=True),
    ]
    return plot("% of requests within all targets", curves, "price per hour" if price_of else "instances")


def frontier(trials: Sequence[Trial]) -> str:
    """Return TTFT p50 by ITL p99 of all fleets of a size. Named are those that no other beats in these and in throughput."""
    points = {id(one): [one.forecast.figures[name] for name in TRADED.values()] for one in trials}
    shapes = Counter(one.fleet.shape for one in trials)  # of the same shape differ in their settings
    curves = []
    for kind, colour, is_colocated in (("split", "prefill", False), ("colocated", "decode", True)):
        own = [one for one in trials if one.is_colocated is is_colocated]
        unbeaten = [one for one in own if not any(_beats(other, points[id(one)]) for other in points.values())]
        for chosen, is_named in ((unbeaten, True), (own, False)):
            x, y = [points[id(one)][2] for one in chosen], [points[id(one)][1] for one in chosen]
            names = [str(one.fleet) if shapes[one.fleet.shape] > 1 else one.fleet.shape for one in chosen]
            labels = [f"{name}, {points[id(one)][0]:.3g} req/s" for name, one in zip(names, chosen, strict=True)]
            curves.append(Curve(x, y, kind, colour, labels=labels, is_named=is_named))
    return plot("TTFT p50, ms; named: what no fleet beats in both and throughput", curves, "ITL p99, ms")


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether a fleet has more throughput and shorter times than another one."""
    return one[0] >= other[0] and all(a < b for a, b in zip(one[1:], other[1:], strict=True))


def speeds(trials: Sequence[Trial]) -> str:
    x = [1e3 / max(1e-3, trial.forecast.figures["median_tpot_ms"]) for trial in trials]
    y = [trial.forecast.figures["output_throughput"] / trial.fleet.size for trial in trials]
    labels = [trial.fleet.shape for trial in trials]
    return plot("Tokens/s per instance", [Curve(x, y, labels=labels, is_named=True)], "tokens/s of a stream")


def waterfall(trials: Sequence[Trial]) -> str:
    """Return the parts of TTFT and of the gap after it, of all requests and of the slowest tenth."""
    rows = {
        f"{trial.fleet.shape}, {name}": parts
        for trial in trials
        for name, parts in trial.forecast.figures["ttft_parts_ms"].items()
    }
    cells = [[name, *(significant(parts[one], 3) for one in PART_COLOURS)] for name, parts in rows.items()]
    bars = shares("ms until the second token", PART_COLOURS, rows, "ms")
    return bars + table(("ms", *PART_COLOURS), cells)


def setting(dimension: Dimension, trials: Sequence[Trial]) -> str:
    title = f"Worst figure ÷ target by {dimension.flag}"
    return _ratios(title, {dimension.label(one.fleet): one for one in trials})


def _ratios(title: str, trials: Mapping[str, Trial]) -> str:
    return ratios(title, {name: (one.ratio, one.failure or str(one.binding)) for name, one in trials.items()})
