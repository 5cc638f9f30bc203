"""Forecasts beside measurements: results of `pdserve bench serve --save-result`, each with the fleet that was measured."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError
from pdserve.tools.bench.requests import Request
from pdserve.tools.planner.search import Trial
from pdserve.tools.planner.targets import METRICS
from pdserve.tools.simulator.fleet import PERCENTILES, Fleet, parse_fleet

THROUGHPUT = "requests/s"
TOLERANCE = 0.1  # of mean lengths, beyond which two loads are not the same
NEEDED = ("completed", "total_input_tokens", "total_output_tokens")


@dataclass(frozen=True)
class Measured:
    """A measurement of a fleet.

    Attributes:
        rate: requests per second; infinite if the load had its own times.
        figures: those of the result file.
    """

    name: str
    fleet: Fleet
    rate: float
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A measurement and its forecast.

    Attributes:
        rows: (figure, forecast, measured), times in milliseconds.
    """

    measured: Measured
    rows: list[tuple[str, float, float]]

    def __str__(self) -> str:
        errors = [forecast / value - 1 for _, forecast, value in self.rows if value]
        middle = statistics.median(map(abs, errors))
        worst = max(zip(map(abs, errors), self.rows, strict=False), key=lambda pair: pair[0])[1]
        return (
            f"Forecast of {self.measured.fleet} against {self.measured.name}: median error {middle:.0%}; "
            f"furthest is {worst[0]}, {worst[1]:.4g} forecast and {worst[2]:.4g} measured."
        )


def load_measured(text: str, requests: Sequence[Request]) -> list[Measured]:
    """Read measurements such as `1P+1D=result.json,2B=other.json`, of the same load as the plan's.

    Raises:
        SetupError: the text or a file has another form, or was measured under another load.
    """
    found = []
    for part in filter(None, text.split(",")):
        fleet, _, path = part.strip().partition("=")
        try:
            found.append(_read(parse_fleet(fleet), path, requests))
        except ValueError as error:
            raise SetupError(f"--measured {part}: {error}") from None
    return found


def _read(fleet: Fleet, path: str, requests: Sequence[Request]) -> Measured:
    try:
        figures = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the file is not JSON: {error}") from None
    numbers = [figures.get(name, 0) for name in NEEDED] if isinstance(figures, dict) else [0]
    if not all(isinstance(one, int) and one > 0 for one in numbers):
        raise ValueError("the file is no result of `pdserve bench serve --save-result` with answers")
    rate = figures.get("request_rate")
    if not any(request.continues for request in requests):
        completed, inputs, outputs = numbers
        _compare("prompts", inputs / completed, [request.input_tokens for request in requests])
        _compare("answers", outputs / completed, [request.output_tokens for request in requests])
    return Measured(Path(path).name, fleet, rate if isinstance(rate, int | float) else math.inf, figures)


def _compare(name: str, measured: float, lengths: Sequence[int]) -> None:
    mean = statistics.fmean(lengths)
    if abs(measured / mean - 1) > TOLERANCE:
        raise ValueError(
            f"its {name} have {measured:.0f} tokens in the mean, and those of the plan's load {mean:.0f}: "
            "give the flags of the load that was measured"
        )


def compare(measured: Measured, simulate: Callable[[Fleet, float], Trial]) -> Comparison:
    """Return the forecast of a measurement beside it."""
    figures = simulate(measured.fleet, measured.rate).forecast.figures
    names = {f"{METRICS[one]} p{p}": f"p{p}_{one}_ms" for one in ("ttft", "itl") for p in PERCENTILES}
    names[THROUGHPUT] = "request_throughput"
    rows = [
        (label, float(figures[name]), float(measured.figures[name]))
        for label, name in names.items()
        if isinstance(measured.figures.get(name), int | float)
    ]
    return Comparison(measured, rows)
