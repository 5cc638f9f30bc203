"""Targets of an SLO by percentile, such as `ttft.p90=500ms,itl.p99=50ms`, and how far a forecast is from them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.slo import parse_slo
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import is_good, thin_sentence
from pdserve.tools.simulator.fleet import PERCENTILES

METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2E latency"}
FAILED = 100.0  # ratio of a fleet that refuses or loses requests, or does not keep up


@dataclass(frozen=True)
class Group:
    """Requests with this many prompt tokens, of this API key (empty: of any)."""

    least: int = 0
    most: float = math.inf
    key: str = ""

    def admits(self, prompt_tokens: int, key: str) -> bool:
        return self.least <= prompt_tokens <= self.most and self.key in ("", key)

    def __str__(self) -> str:
        parts = [f"key {self.key}"] if self.key else []
        if math.isfinite(self.most):
            parts.append(f"prompts of {self.least} to {self.most} tokens")
        elif self.least:
            parts.append(f"prompts of {self.least} or more tokens")
        return ", ".join(parts)


ALL = Group()


@dataclass(frozen=True)
class Target:
    """One percentile of one metric may be at most `seconds`, over the requests of a group."""

    metric: str
    percentile: int
    seconds: float
    group: Group = ALL

    @property
    def figure(self) -> str:
        """Its name among the figures of a run."""
        return f"p{self.percentile}_{self.metric}_ms"

    def measure(self, figures: Mapping[str, Any], samples: Sequence[Sample]) -> float:
        """Return the percentile in seconds; 0 if the group has no requests."""
        if self.group == ALL:
            return float(figures[self.figure]) / 1e3
        values = [value for one in self._admitted(samples) for value in one.values(self.metric)]
        return float(np.percentile(values, self.percentile)) if values else 0.0

    def count(self, samples: Sequence[Sample]) -> int:
        """Return how many values the percentile is of."""
        return sum(len(one.values(self.metric)) for one in self._admitted(samples))

    def _admitted(self, samples: Sequence[Sample]) -> Iterator[Sample]:
        return (one for one in samples if one.ok and self.group.admits(one.input_tokens, one.key))

    def beside(self, seconds: float) -> str:
        """Return a measured percentile beside its target, such as `TTFT p90 310 of 500 ms`."""
        ms = seconds * 1e3
        return f"{self} {f'{ms:.0f}' if ms >= 10 else f'{ms:.2g}'} of {self.seconds * 1e3:g} ms"

    def __str__(self) -> str:
        group = "" if self.group == ALL else f" ({self.group})"
        return f"{METRICS[self.metric]} p{self.percentile}{group}"


def parse_targets(text: str, group: Group = ALL) -> list[Target]:
    """Parse text such as `ttft.p90=500ms,itl.p99=0.05s`; without a percentile it is p99.

    Raises:
        ValueError: the text has another form, names a target twice, or has none.
    """
    targets: list[Target] = []
    for one in parse_slo(text, METRICS):
        percentile = 99 if one.percentile is None else one.percentile
        if percentile not in PERCENTILES:
            known = ", ".join(f"p{p}" for p in PERCENTILES)
            message = (
                f"p{percentile} of {one.metric} is not known; write such as {one.metric}.p90=500ms, with one of {known}"
            )
            raise ValueError(message)
        targets.append(Target(one.metric, percentile, one.seconds, group))
    if len({target.figure for target in targets}) < len(targets):
        raise ValueError(
            f"{text!r} names a target twice, since ttft is ttft.p99; write such as ttft.p90=500ms,ttft.p99=1s"
        )
    if not targets:
        raise ValueError("there is no target; write such as ttft.p90=500ms,itl.p99=50ms")
    return targets


def compare(
    targets: Sequence[Target], figures: Mapping[str, Any], samples: Sequence[Sample]
) -> tuple[dict[Target, float], Target, float]:
    """Return each target's percentile in seconds, the target of the worst one, and its ratio to that target."""
    values = {one: one.measure(figures, samples) for one in targets}
    binding = max(targets, key=lambda one: values[one] / one.seconds)
    return values, binding, values[binding] / binding.seconds


def attainment(targets: Sequence[Target], samples: Sequence[Sample]) -> float:
    """Return the share of requests of which each is within all targets for it, whatever their percentiles.

    Of several percentiles of a metric and group, the loosest counts. ITL is met by 99 % of a request's gaps, as in
    `pdserve bench serve --goodput`.
    """
    limits: dict[Group, dict[str, float]] = {}
    for one in targets:
        limit = limits.setdefault(one.group, {})
        limit[one.metric] = max(one.seconds, limit.get(one.metric, 0.0))
    good = 0
    for sample in samples:
        objectives: dict[str, float] = {}
        for group, limit in limits.items():
            if group.admits(sample.input_tokens, sample.key):
                for metric, seconds in limit.items():
                    objectives[metric] = min(seconds, objectives.get(metric, math.inf))
        good += is_good(sample, objectives)
    return good / len(samples) if samples else 0.0


def thin_sentences(counts: Mapping[Target, int]) -> list[str]:
    """Return a sentence for each target whose percentile is of too few values to be steady."""
    kinds = {one: "gaps" if one.metric == "itl" else "requests" for one in counts}
    sentences = [thin_sentence(str(one), one.percentile, count, kinds[one]) for one, count in counts.items()]
    return [one for one in sentences if one]
