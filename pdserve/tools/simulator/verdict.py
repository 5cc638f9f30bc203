"""Verdict on a run that has not ended: whether its percentiles can still be within their limits. Plain arithmetic."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.tools.bench.requests import Request, Sample


@dataclass(frozen=True)
class Limit:
    """A percentile of `ttft` or `itl`, over all requests, that may be at most `seconds`."""

    metric: str
    percentile: int
    seconds: float


def is_hopeless(limits: Sequence[Limit], loads: Sequence[Request], samples: Iterable[Sample], now: float) -> bool:
    """Return whether a limit is exceeded already, however fast the rest of the run is.

    A percentile lies between two of the sorted values, and exceeds a limit if the lower one does. So the values that are
    late must be as many as there are from the lower one on.

    Args:
        samples: of the requests that were sent, which go on until `now`.
    """
    samples = list(samples)
    for limit in limits:
        total = sum(_count(limit.metric, one.output_tokens) for one in loads)
        lower = math.floor(limit.percentile / 100 * (total - 1))
        if sum(_late(limit, one, now) for one in samples) >= total - lower > 0:
            return True
    return False


def _count(metric: str, output_tokens: int) -> int:
    return 1 if metric == "ttft" else output_tokens - 1


def _late(limit: Limit, sample: Sample, now: float) -> int:
    """Return how many values of a request are beyond a limit."""
    if limit.metric == "itl":
        return sum(gap > limit.seconds for gap in sample.itls)
    return (sample.token_times[0] if sample.token_times else now) - sample.sent > limit.seconds
