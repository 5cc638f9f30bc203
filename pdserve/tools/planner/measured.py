"""Forecasts beside measurements: results of `pdserve bench serve --save-result`, and the profile that they correct."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.profile.profile import Profile
from pdserve.tools.bench.report import together_sentence
from pdserve.tools.bench.requests import Request
from pdserve.tools.planner.search import Trial
from pdserve.tools.planner.targets import METRICS
from pdserve.tools.simulator.fleet import PERCENTILES, Fleet, parse_fleet

THROUGHPUT = "requests/s"
TOLERANCE = 0.1  # of mean lengths, beyond which two loads are not the same; of a forecast, beyond which it is corrected
WORTHLESS = 0.5  # median error, beyond which a plan is not to be relied on
ROUNDS = 3  # of correcting, as queues answer more than in proportion
CORRECTED = {"prefill": "TTFT p50", "decode": "TPOT mean"}  # steps of a profile, and the figure that tells their time
DRAFT_COUNTS = ("num_drafts", "draft_tokens", "accepted_tokens")
MOST = 1e15  # of a figure: larger ones, infinity and NaN say nothing
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

    @property
    def error(self) -> float:
        """The median of the relative errors' sizes; a measured 0, as of tokens that come together, has none."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def _errors(self) -> list[float]:
        return [abs(forecast / value - 1) for _, forecast, value in self.rows if value]

    def factor(self, label: str) -> float:
        """Return measured ÷ forecast of a figure; 1 if it is not known."""
        return next(
            (value / forecast for name, forecast, value in self.rows if name == label and value and forecast), 1.0
        )

    def __str__(self) -> str:
        rows = [row for row in self.rows if row[2]]
        if not rows:
            return f"Forecast of {self.measured.fleet} against {self.measured.name}: it has no figure to compare with."
        worst = max(zip(self._errors, rows, strict=True), key=lambda pair: pair[0])[1]
        return (
            f"Forecast of {self.measured.fleet} against {self.measured.name}: median error {self.error:.0%}; "
            f"furthest is {worst[0]}, {worst[1]:.4g} forecast and {worst[2]:.4g} measured."
        )


def drafts_sentence(measured: Measured) -> str:
    """Say how many tokens came from drafts, which forecasts know by --acceptance only; empty if they were few."""
    drafts, drafted, accepted = _drafts(measured.figures)
    outputs = measured.figures["total_output_tokens"]
    if accepted <= TOLERANCE * outputs:
        return ""
    return (
        f"{accepted / outputs:.0%} of the tokens in {measured.name} were drafts: forecasts know them by --acceptance "
        f"{share_of_right(drafts, drafted, accepted):.2g}, or measure with --speculate off."
    )


def share_of_right(drafts: int, drafted: int, accepted: int) -> float:
    """Return how likely a draft behind right ones was right, given sums over drafts, of their tokens and of those accepted.

    Those behind a wrong one are not accepted either, so this is more than the share of accepted ones.
    """
    length, least, most = drafted / drafts, 0.0, 1.0
    for _ in range(30):
        share = (least + most) / 2
        expected = length if share == 1 else share * (1 - share**length) / (1 - share)
        least, most = (share, most) if expected * drafts < accepted else (least, share)
    return most


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
        figures = read_json(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the file is not JSON: {error}") from None
    numbers = [figures.get(name, 0) for name in NEEDED] if isinstance(figures, dict) else [0]
    if not all(isinstance(one, int) and 0 < one < MOST for one in numbers):
        raise ValueError("the file is no result of `pdserve bench serve --save-result` with answers")
    drafts, drafted, accepted = _drafts(figures)
    if accepted > drafted or drafts > drafted or bool(drafts) != bool(drafted):
        raise ValueError(f"it has {accepted} accepted tokens of {drafted} in {drafts} drafts")
    rate = figures.get("request_rate")
    if isinstance(rate, int | float) and not rate > 0:
        raise ValueError(
            f"its request_rate is {rate}; write one above 0, or leave it out if the load had times of its own"
        )
    if not any(request.continues for request in requests):
        completed, inputs, outputs = numbers
        _compare("prompts", inputs / completed, [request.input_tokens for request in requests])
        _compare("answers", outputs / completed, [request.output_tokens for request in requests])
    return Measured(Path(path).name, fleet, rate if isinstance(rate, int | float) else math.inf, figures)


def _drafts(figures: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of drafts, of their tokens, and of those accepted; 0 if a file does not tell."""
    drafts, drafted, accepted = (figures.get(f"spec_decode_{name}") for name in DRAFT_COUNTS)
    if isinstance(drafts, int) and isinstance(drafted, int) and isinstance(accepted, int):
        return drafts, drafted, accepted
    return 0, 0, 0


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
    names |= {"TPOT mean": "mean_tpot_ms", THROUGHPUT: "request_throughput"}
    rows = [
        (label, float(figures[name]), float(measured.figures[name]))
        for label, name in names.items()
        if isinstance(value := measured.figures.get(name), int | float) and abs(value) < MOST
    ]
    return Comparison(measured, rows)


@dataclass(frozen=True)
class Correction:
    """Correction of a profile by measurements.

    Attributes:
        profile: corrected, so that forecasts meet them, or as it was if they did.
        before, after: comparisons with the profile as it was, and as it is now.
        factors: by kind of step, of its time.
    """

    profile: Profile
    before: list[Comparison]
    after: list[Comparison]
    factors: Mapping[str, float]

    @property
    def is_worthless(self) -> bool:
        """The profile as it was is so far off that plans from it are not to be relied on."""
        return max((one.error for one in self.before), default=0.0) > WORTHLESS

    def sentences(self) -> list[str]:
        """Return how far forecasts were off, and what was done about it."""
        lines = list(map(str, self.before))
        lines += filter(None, [together_sentence(one.measured.figures) for one in self.before])
        lines += filter(None, [drafts_sentence(one.measured) for one in self.before])
        if self.factors:
            parts = " and ".join(f"{kind} steps {factor:.2g}" for kind, factor in self.factors.items())
            error = max(one.error for one in self.after)
            lines.append(
                f"So this plan takes {parts} times as long as the profile says, with a median error of {error:.0%}."
            )
        if self.is_worthless:
            lines.append(f"It is not to be relied on: the profile was more than {WORTHLESS:.0%} off (exit code 1).")
        return lines


def correct(profile: Profile, forecast: Callable[[Profile], list[Comparison]]) -> Correction:
    """Scale the times of prefill and decode steps until forecasts meet measurements, and keep the best of some rounds."""
    before = found = forecast(profile)
    best = Correction(profile, before, before, {})
    factors = dict.fromkeys(CORRECTED, 1.0)
    for _ in range(ROUNDS):
        if max((one.error for one in best.after), default=0.0) <= TOLERANCE:
            break
        for kind, label in CORRECTED.items():
            factors[kind] *= statistics.geometric_mean(one.factor(label) for one in found)
        found = forecast(corrected := profile.scaled(**factors))
        if max(one.error for one in found) < max(one.error for one in best.after):
            best = Correction(corrected, before, found, dict(factors))
    return best
