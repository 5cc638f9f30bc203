"""The reports of `pdserve bench serve`: a run, and a search of rates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdserve.tools.bench.page import Section, page, pair, shares, significant, table
from pdserve.tools.bench.plot import Curve, plot
from pdserve.tools.bench.report import HEADINGS, as_texts, together_sentence, totals
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.sweep import Trial

POINTS = 200  # of a curve
PARTS = {"outside router": "router", "queue": "queue", "prefill": "prefill"}  # of TTFT, with their colours
GOOD = 0.99  # share of good requests, from which the verdict is good


def run_page(
    title: str,
    figures: dict[str, Any],
    samples: Sequence[Sample],
    objectives: dict[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    """Return the report of one run."""
    good = figures["good_request_fraction"]
    return page(
        title,
        verdict(figures, objectives),
        [
            ("Latency", [_latencies(figures, metrics, percentiles), _ttft_parts(figures)]),
            ("Charts", [pair(run_charts(samples, objectives))]),
            ("All figures", [table(("", ""), [(name.rstrip(":"), text) for name, text in as_texts(totals(figures))])]),
        ],
        warnings=_warnings(figures),
        is_good=None if good is None else good >= GOOD,
    )


def sweep_page(
    title: str, lines: Sequence[str], trials: Sequence[Trial], targets: Sequence[float], warnings: Sequence[str]
) -> str:
    """Return the report of a search of rates."""
    rows = [
        (f"{one.rate:.3g}", f"{one.attainment:.1%}", str(one.total), "saturated" if one.saturated else "kept up")
        for one in sorted(trials, key=lambda one: one.rate)
    ]
    sections: list[Section] = [
        ("Runs", [table(("requests/s", "good", "requests", ""), rows)]),
        ("Share of requests within the SLO", [sweep_chart(trials, targets)]),
    ]
    return page(title, lines, sections, warnings=warnings)


def verdict(figures: dict[str, Any], objectives: dict[str, float]) -> list[str]:
    """Return what a run says, in a few words."""
    done, good = figures["completed"], figures["good_request_fraction"]
    limits = ", ".join(f"{HEADINGS[name][0]} {seconds * 1e3:g} ms" for name, seconds in objectives.items())
    ended = f"{done} of {done + figures['failed']} requests answered, {figures['request_throughput']:.3g} a second"
    first = ended if good is None else f"{good:.1%} of requests within {limits}"
    rate = [] if good is None else [f"{ended}; {figures['request_goodput']:.3g} good ones a second."]
    return [f"{first}.", *rate, *filter(None, [together_sentence(figures)])]


def _warnings(figures: dict[str, Any]) -> list[str]:
    return [one for one in (*figures.get("warnings", []), figures.get("client_bottleneck", "")) if one]


def _latencies(figures: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    keys = {"mean": "mean", **{f"p{p:g}": f"p{p:g}" for p in percentiles}}
    rows = [
        [HEADINGS[one][1], *(significant(figures[f"{key}_{one}_ms"], 4) for key in keys.values())] for one in metrics
    ]
    return table(("ms", *keys), rows)


def _ttft_parts(figures: dict[str, Any]) -> str:
    found = figures.get("ttft_breakdown") or {}
    parts = {name: max(0.0, found.get(f"mean_{name.replace(' ', '_')}_ms", 0.0)) for name in PARTS}
    return shares("Mean TTFT by part", PARTS, {"TTFT": parts}, "ms")


def run_charts(samples: Sequence[Sample], objectives: dict[str, float]) -> list[str]:
    """Return TTFT and ITL by percentile, TTFT over time, and requests in flight over time."""
    done = [sample for sample in samples if sample.ok]
    ttft, gaps = [sample.ttft for sample in done], [gap for sample in done for gap in sample.itls]
    changes = sorted([(sample.sent, 1) for sample in done] + [(sample.ended, -1) for sample in done])
    level = np.cumsum([change for _, change in changes]).tolist()
    sent = Curve([one.sent for one in done], [seconds * 1e3 for seconds in ttft])
    flight = Curve([at for at, _ in changes], level, colour="router", is_stepped=True)
    return [
        _percentiles("TTFT, ms", ttft, objectives.get("ttft"), "prefill"),
        _percentiles("ITL, ms", gaps, objectives.get("itl"), "decode"),
        plot("TTFT, ms", [sent], "time of sending, s", at_y=_limit(objectives.get("ttft"))),
        plot("Requests in flight", [flight], "time, s"),
    ]


def sweep_chart(trials: Sequence[Trial], targets: Sequence[float]) -> str:
    """Return the share of requests that meet the SLO against the rate, one point per run."""
    curves = []
    for saturated, name, colour in ((False, "kept up", "prefill"), (True, "saturated", "bad")):
        chosen = sorted((one.rate, 100 * one.attainment) for one in trials if one.saturated is saturated)
        x, y = [rate for rate, _ in chosen], [share for _, share in chosen]
        labels = [f"{rate:.3g} requests/s: {share:.1f} %" for rate, share in chosen]
        curves.append(Curve(x, y, name, colour, labels=labels))
    return plot("% of requests that are good", curves, "requests/s", at_y=[100 * one for one in targets], most_y=100)


def _limit(seconds: float | None) -> list[float]:
    return [] if seconds is None else [seconds * 1e3]


def _percentiles(title: str, values: Sequence[float], limit: float | None, colour: str) -> str:
    if not values:
        return ""
    x = np.linspace(0, 100, POINTS)
    curve = Curve(x.tolist(), (np.percentile(values, x) * 1e3).tolist(), colour=colour, is_line=True)
    return plot(title, [curve], "percentile", at_y=_limit(limit))
