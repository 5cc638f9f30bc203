"""The command `pdserve simulate`."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdserve.errors import SetupError
from pdserve.tools.bench.report import check_writable, write_csv, write_file
from pdserve.tools.bench.slo import parse_goodput, thin_sentence
from pdserve.tools.load_config import SimulateConfig
from pdserve.tools.simulator.fleet import (
    Fleet,
    Forecast,
    fleet_roles,
    load_profile,
    notes,
    parse_itl_targets,
    parse_numbers,
    simulate_all,
)

WIDTH = 140  # columns of a table in a file
MOSTLY = 0.5  # share of the time
OF_DRAFTS = {  # column → figure, and its factor to percent
    "accepted": ("spec_decode_acceptance_rate", 1),
    "drafting": ("spec_decode_draft_time_fraction", 100),
}


def run(config: SimulateConfig) -> None:
    """Simulate each fleet that the settings name, and print a row for each.

    Raises:
        SetupError: a setting is wrong, or a file cannot be read.
    """
    try:
        objectives = parse_goodput(config.goodput)
    except ValueError as error:
        raise SetupError(str(error)) from None
    profile, fleets = load_profile(config), parse_fleets(config)
    check_writable(config.json, config.csv)
    started, forecasts = time.monotonic(), list[Forecast]()
    with progress_line(Console(stderr=True)) as show:
        show(f"simulating {len(fleets)} fleets")
        rate = config.request_rate if config.ramp_up_strategy is None else math.inf
        for forecast in simulate_all(config, profile, objectives, [(fleet, rate) for fleet in fleets]):
            forecasts.append(forecast)
            show(f"simulated {len(forecasts)} of {len(fleets)} fleets, {time.monotonic() - started:.0f} s")
    console_for_tables().print(as_table(forecasts))
    fewest = min(one.figures["completed"] for one in forecasts)
    thin = thin_sentence("TTFT p99", 99, fewest, "requests")
    for note in [*notes(config, profile, [fleet.size for fleet in fleets]), *filter(None, [thin])]:
        print(note)
    if config.json:
        write_file(Path(config.json), json.dumps([as_dict(forecast) for forecast in forecasts], indent=2) + "\n")
    if config.csv:
        write_csv(config.csv, forecasts[-1].samples, objectives)


@contextmanager
def progress_line(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text on a terminal, in place of the one before; the last one is erased.

    No thread draws it, as of rich's status: simulations fork, and a lock that it held would stay so in their processes.
    """
    with Live(console=console, auto_refresh=False, transient=True) as line:
        yield lambda text: line.update(text, refresh=True)


def console_for_tables() -> Console:
    """Return a console that does not cut tables that go to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def parse_fleets(config: SimulateConfig) -> list[Fleet]:
    """Return all combinations of the numbers that can serve requests, smallest first.

    Raises:
        SetupError: a text has the wrong form, or there is none.
    """
    prefill, decode, both = (
        parse_numbers(f"--{role}", getattr(config, role)) for role in ("prefill", "decode", "both")
    )
    fleets = [Fleet(*one) for one in product(prefill, decode, both, parse_itl_targets(config.itl_target_ms))]
    fleets = [fleet for fleet in dict.fromkeys(fleets) if fleet.is_complete]
    if not fleets:
        raise SetupError(
            "no such fleet can serve: it needs prefill and decode instances, or instances with the role both"
        )
    return sorted(fleets, key=lambda fleet: (fleet.size, fleet.both, fleet.prefill))


def as_table(forecasts: Sequence[Forecast]) -> Table:
    """Return a table with a row per fleet, times in ms."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    columns, rows = as_rows(forecasts)
    for name in columns:
        table.add_column(name, justify="left" if name == "fleet" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def as_rows(forecasts: Sequence[Forecast]) -> tuple[list[str], list[list[str]]]:
    """Return the names of columns, and a row of cells per fleet; times in ms."""
    good = any(forecast.figures["good_request_fraction"] is not None for forecast in forecasts)
    shown = {name: one for name, one in OF_DRAFTS.items() if any(one[0] in forecast.figures for forecast in forecasts)}
    columns = [
        "fleet",
        *(["good"] if good else []),
        "req/s",
        "TTFT p50",
        "p90",
        "p99",
        "ITL p50",
        "p90",
        "p99",
        *shown,
        "busy",
    ]
    rows = []
    for forecast in forecasts:
        figures = forecast.figures
        times = [figures[f"p{p}_{metric}_ms"] for metric in ("ttft", "itl") for p in (50, 90, 99)]
        remarks = [f"{figures['failed']} failed"] if figures["failed"] else []
        remarks += ["saturated"] if forecast.saturated else []
        rows.append(
            [
                ", ".join([str(forecast.fleet), *remarks]),
                *([f"{figures['good_request_fraction']:.1%}"] if good else []),
                f"{figures['request_throughput']:.2f}",
                *(f"{one:.0f}" for one in times),
                *(f"{scale * figures.get(figure, 0.0):.0f}%" for figure, scale in shown.values()),
                " ".join(f"{name[0].upper()} {share:.0%}" for name, share in shown_busy(forecast).items()),
            ]
        )
    return columns, rows


def shown_busy(forecast: Forecast) -> dict[str, float]:
    """Return how busy the roles are, and router and link if they are busy for most of the time."""
    roles = fleet_roles(forecast.fleet)
    return {name: share for name, share in forecast.busy.items() if name in roles or share >= MOSTLY}


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """Return the figures of a forecast, for JSON."""
    fleet = vars(forecast.fleet) | {"settings": dict(forecast.fleet.settings)}
    own = {"fleet": str(forecast.fleet), **fleet, "saturated": forecast.saturated}
    return own | {"busy": forecast.busy, "preemptions": forecast.preemptions} | forecast.figures
