"""The report as one HTML file that needs no other host: verdict and figures, then charts by plotly, which is inlined."""

import json
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

import numpy as np

from pdserve.errors import SetupError, install
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.sweep import Trial

Chart = dict[str, Any]
POINTS = 200  # of a curve
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:.5rem;color:#222;
overflow-wrap:anywhere}pre{overflow-x:auto;font-size:.8rem;background:#f6f6f6;padding:.5rem}.chart{height:22rem}
.warning{background:#fff3cd;padding:.5rem}.verdict{border-left:.25rem solid #2c7bb6;padding-left:.75rem}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}pre{background:#22252b}.warning{background:#4d3f10}}"""
DRAW = """const DARK=matchMedia("(prefers-color-scheme:dark)").matches,GRID={gridcolor:DARK?"#3a3d44":"#e5e5e5"};
for(const c of CHARTS){const l=c.layout;l.paper_bgcolor=l.plot_bgcolor="rgba(0,0,0,0)";l.font={color:DARK?"#ddd":"#222"};
for(const s of l.shapes)s.line.color??=l.font.color;
l.xaxis={...GRID,...l.xaxis};l.yaxis={...GRID,...l.yaxis};Plotly.newPlot(c.id,c.data,l,{responsive:true,displayModeBar:false})}"""


def load_plotly() -> str:
    """Return the text of plotly.js."""
    try:
        return str(import_module("plotly.offline").get_plotlyjs())
    except ImportError:
        raise SetupError(f"--html needs plotly, which is not installed: {install('bench')}") from None


def page(
    title: str,
    text: str,
    warnings: Sequence[str],
    charts: Sequence[Chart],
    plotly: str,
    *,
    verdict: Sequence[str] = (),
    details: Sequence[str] = (),
) -> str:
    """Return the page: verdict, warnings, `text` as on the terminal, charts, and details."""
    placed = [{"id": f"chart-{number}", **chart} for number, chart in enumerate(charts)]
    data = json.dumps(placed).replace("<", "\\u003c")  # no text may end the script
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>",
        *(f'<p class="verdict">{escape(line)}</p>' for line in verdict),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
        f"<pre>{escape(text)}</pre>",
        *(f'<div class="chart" id="{chart["id"]}"></div>' for chart in placed),
        *(f"<p>{escape(line)}</p>" for line in details),
        f"<script>{plotly}</script><script>const CHARTS={data};{DRAW}</script></html>\n",
    ]
    return "\n".join(parts)


def run_charts(samples: Sequence[Sample], objectives: dict[str, float]) -> list[Chart]:
    """Return TTFT and ITL by percentile, TTFT over time, and requests in flight over time."""
    done = [sample for sample in samples if sample.ok]
    if not done:
        return []
    ttft = [sample.ttft * 1e3 for sample in done]
    gaps = [gap * 1e3 for sample in done for gap in sample.itls]
    charts = [
        _percentiles("TTFT, ms by percentile", ttft, objectives.get("ttft")),
        *([_percentiles("ITL, ms by percentile", gaps, objectives.get("itl"))] if gaps else []),
    ]
    over_time = {"x": [one.sent for one in done], "y": ttft, "mode": "markers", "marker": {"size": 4}}
    charts.append(chart("TTFT, ms by second of sending", [over_time], rangemode="tozero"))
    changes = sorted([(sample.sent, 1) for sample in done] + [(sample.ended, -1) for sample in done])
    level = np.cumsum([change for _, change in changes]).tolist()
    flight = {"x": [at for at, _ in changes], "y": level, "mode": "lines", "line": {"shape": "hv"}}
    charts.append(chart("requests in flight by second", [flight], rangemode="tozero"))
    return charts


def sweep_chart(trials: Sequence[Trial], shares: Sequence[float]) -> Chart:
    """Return the share of requests that meet the SLO against the rate, one point per run."""
    kinds = ((False, "kept up", "#1f77b4"), (True, "saturated", "#d62728"))
    points = []
    for saturated, name, colour in kinds:
        chosen = sorted((one.rate, one.attainment) for one in trials if one.saturated is saturated)
        x, y = [rate for rate, _ in chosen], [share for _, share in chosen]
        points.append({"x": x, "y": y, "mode": "markers", "name": name, "marker": {"color": colour, "size": 8}})
    lines = [_line(share) for share in shares]
    return chart("share of requests within the SLO by rate (req/s)", points, shapes=lines, range=[0, 1.03])


def _percentiles(title: str, values: Sequence[float], limit: float | None) -> Chart:
    x = np.linspace(0, 100, POINTS)
    curve = {"x": x.tolist(), "y": np.percentile(values, x).tolist(), "mode": "lines"}
    return chart(title, [curve], shapes=[_line(limit * 1e3)] if limit else [], rangemode="tozero")


def _line(y: float) -> Chart:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"dash": "dot", "width": 1}}


def is_worth_drawing(drawn: Chart) -> bool:
    """Return whether a chart has at least two places with something in them."""
    places = {str(x) for trace in drawn["data"] if "z" not in trace for x in trace.get("x", ())}
    cells = [cell for trace in drawn["data"] for line in trace.get("z", ()) for cell in line if cell is not None]
    return len(places) + len(cells) > 1


def chart(title: str, data: list[Chart], shapes: Sequence[Chart] = (), **axis: Any) -> Chart:
    """Return a chart for `page`. `axis` are settings of its vertical axis."""
    margin = {"l": 45, "r": 10, "t": 40, "b": 35}
    legend = {"orientation": "h"}
    head = {"text": title, "font": {"size": 15}}
    return {
        "data": data,
        "layout": {"title": head, "margin": margin, "legend": legend, "shapes": list(shapes), "yaxis": axis},
    }
