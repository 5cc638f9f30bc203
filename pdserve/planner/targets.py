"""Targets of an SLO by percentile, such as `ttft.p90=500ms,itl.p99=50ms`, and how far a forecast is from them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.slo import UNITS

METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2E latency"}
PERCENTILES = (50, 90, 99)
MIN_BEYOND = 5  # values above a percentile, with which it is steady
FAILED = 100.0  # ratio of a fleet that refuses or loses requests, or does not keep up


@dataclass(frozen=True)
class Target:
    """One percentile of one metric may be at most `seconds`."""

    metric: str
    percentile: int
    seconds: float

    @property
    def figure(self) -> str:
        """Its name among the figures of a run."""
        return f"p{self.percentile}_{self.metric}_ms"

    def __str__(self) -> str:
        return f"{METRICS[self.metric]} p{self.percentile}"


def parse_targets(text: str) -> list[Target]:
    """Parse text such as `ttft.p90=500ms,itl.p99=0.05s`; without a percentile it is p99.

    Raises:
        ValueError: the text has another form, or names a target twice.
    """
    targets: list[Target] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\w+?)(?:\.p(\d+))?\s*=\s*(\d+\.?\d*)\s*(ms|s)\s*", part)
        target = match and Target(match[1], int(match[2] or 99), float(match[3]) * UNITS[match[4]])
        is_known = target and target.metric in METRICS and target.percentile in PERCENTILES and target.seconds > 0
        if not target or not is_known or any(one.figure == target.figure for one in targets):
            raise ValueError(
                f"--slo: {part!r} is no target; write such as ttft.p90=500ms,itl.p99=50ms, with each of "
                f"{', '.join(METRICS)} and p50, p90 or p99 at most once"
            )
        targets.append(target)
    if not targets:
        raise ValueError("--slo is empty; write such as ttft.p90=500ms,itl.p99=50ms")
    return targets


def worst(targets: Sequence[Target], figures: Mapping[str, Any]) -> tuple[float, Target]:
    """Return the largest ratio of a figure to its target, and the target. At most 1: the SLO is met."""
    return max(((figures[one.figure] / 1e3 / one.seconds, one) for one in targets), key=lambda pair: pair[0])


def thin_sentences(targets: Sequence[Target], figures: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each target whose percentile rests on too few values to be steady."""
    completed = figures["completed"]
    gaps = figures["total_output_tokens"] - completed
    sentences = []
    for target in targets:
        count, values = (gaps, "gaps") if target.metric == "itl" else (completed, "requests")
        beyond = count * (100 - target.percentile) / 100
        if not count:
            sentences.append(f"{target} says nothing: there are no {values}.")
        elif beyond < MIN_BEYOND:
            slowest = max(1, math.ceil(beyond))
            needed = math.ceil(MIN_BEYOND * 100 / (100 - target.percentile))
            sentences.append(
                f"{target} rests on the slowest {slowest} of {count} {values}: it varies by chance with fewer than {needed}."
            )
    return sentences
