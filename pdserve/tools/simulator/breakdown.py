"""Breakdown of latency: the parts of TTFT, and of the gap before the second token, from the timelines of requests."""

from collections.abc import Mapping, Sequence

from pdserve.lifetime import Stage
from pdserve.tools.bench.requests import Sample

Stamps = Mapping[Stage, float]
TTFT_PARTS = {
    "router": (Stage.RECEIVED, Stage.ROUTED),
    "prefill queue": (Stage.ROUTED, Stage.PREFILL_STARTED),
    "prefill": (Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
}
HAND_OVER, DECODE_STEP = "hand-over", "first decode step"
SLOWEST = 0.1  # share of the requests, by TTFT


def breakdown(samples: Sequence[Sample], stamps: Mapping[int, Stamps]) -> dict[str, dict[str, float]]:
    """Return the mean milliseconds of each part: of all requests, and of the slowest tenth by TTFT.

    Args:
        stamps: of the timeline of each request, by its index.
    """
    known = sorted((one for one in samples if one.ok and one.index in stamps), key=lambda one: one.ttft)
    if not known:
        return {}
    slowest = known[-max(1, round(SLOWEST * len(known))) :]
    return {
        "mean": _means([parts(one, stamps[one.index]) for one in known]),
        "slowest tenth": _means([parts(one, stamps[one.index]) for one in slowest]),
    }


def parts(sample: Sample, stamps: Stamps) -> dict[str, float]:
    """Return the seconds of each part of one request. The hand-over is what is left of it after the first token."""
    found = {name: _span(stamps, *stages) for name, stages in TTFT_PARTS.items()}
    gap = sample.itls[0] if sample.itls else 0.0
    hand_over = min(gap, _span(stamps, Stage.FIRST_TOKEN, Stage.KV_READY))
    return found | {HAND_OVER: hand_over, DECODE_STEP: gap - hand_over}


def _span(stamps: Stamps, start: Stage, end: Stage) -> float:
    return max(0.0, stamps[end] - stamps[start]) if start in stamps and end in stamps else 0.0


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) * 1e3 for name in rows[0]}
