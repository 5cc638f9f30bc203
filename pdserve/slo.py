"""Service-level objectives (SLOs), in one syntax for all commands: `ttft.p90=500ms,itl.p99=50ms`."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

UNITS = {"ms": 1e-3, "s": 1.0, "": 1e-3}
OBJECTIVE = re.compile(
    r"(?P<metric>[a-z0-9]+)(?:\.p(?P<percentile>\d+))?[=:](?P<number>[0-9.]+(?:e[0-9]+)?)(?P<unit>ms|s|)"
)


@dataclass(frozen=True)
class Objective:
    """One metric may be at most `seconds`, at a percentile of the requests or, without one, for each request."""

    metric: str
    percentile: int | None
    seconds: float


def parse_slo(text: str, metrics: Collection[str]) -> list[Objective]:
    """Parse objectives such as `ttft.p90=500ms,itl=0.05s`, separated by commas.

    vLLM's form `ttft:500 itl:50` means the same as `ttft=500ms,itl=50ms`: the unit is ms where none is given.

    Raises:
        ValueError: the text has another form, or names an objective twice or a metric that is none of `metrics`.
    """
    objectives: list[Objective] = []
    for part in re.sub(r"\s*([=:])\s*", r"\1", text).replace(",", " ").split():
        match = OBJECTIVE.fullmatch(part)
        seconds = float(match["number"]) * UNITS[match["unit"]] if match and _is_number(match["number"]) else 0.0
        if not match or match["metric"] not in metrics or not 0 < seconds < math.inf:
            known = ", ".join(metrics)
            raise ValueError(f"{part!r} is no objective; write such as ttft.p90=500ms,itl=50ms, of {known}")
        found = Objective(match["metric"], int(match["percentile"]) if match["percentile"] else None, seconds)
        if any((one.metric, one.percentile) == (found.metric, found.percentile) for one in objectives):
            raise ValueError(f"{part!r} is an objective that was given before; give each once")
        objectives.append(found)
    return objectives


def limits_of(objectives: Collection[Objective]) -> dict[str, float]:
    """Return what each request is held to, in seconds by metric: of several percentiles of a metric, the loosest."""
    return {one.metric: max(two.seconds for two in objectives if two.metric == one.metric) for one in objectives}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Slo:
    """Limits of a single request in seconds; infinite where there is no objective."""

    ttft: float = math.inf
    itl: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse text such as `ttft=500ms,itl=50ms`. Percentiles make no difference: it is about single requests.

        Raises:
            ValueError: see `parse_slo`.
        """
        return cls(**limits_of(parse_slo(text, ("ttft", "itl"))))
