"""When requests are sent: Poisson and gamma processes, ramps, and the times of a trace, each as in vLLM's benchmark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from pdserve.bench.requests import Request

Gamma = Callable[[float, float], float]  # a draw, from shape and scale


def arrival_times(count: int, rate: float, burstiness: float, gamma: Gamma) -> list[float]:
    """Return the times of `count` arrivals at `rate` per second, whose mean is exact.

    Args:
        rate: infinite for all at once.
        burstiness: shape of the gamma distribution of the intervals: 1 is a Poisson process, less is more bursty, and
            infinity gives constant intervals.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = list(accumulate(_interval(rate, burstiness, gamma) for _ in range(count)))
    return [time * (count / rate) / times[-1] for time in times] if times and times[-1] else times


def ramp_times(count: int, start: float, end: float, exponential: bool, burstiness: float, gamma: Gamma) -> list[float]:
    """Return the times of `count` arrivals whose rate goes from `start` to `end`, by the number of the request."""
    shares = [index / max(count - 1, 1) for index in range(count)]
    rates = [start * (end / start) ** share if exponential else start + (end - start) * share for share in shares]
    return list(accumulate(_interval(rate, burstiness, gamma) for rate in rates))


def _interval(rate: float, burstiness: float, gamma: Gamma) -> float:
    return 1 / rate if math.isinf(burstiness) else gamma(burstiness, 1 / (rate * burstiness))


def schedule(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    """Give first turns the times, in turn; later turns are sent when the previous one has been answered."""
    remaining = iter(times)
    return [replace(one, at=next(remaining) if one.after is None else 0.0) for one in requests]


def replay(requests: Sequence[Request], speed: float, rate: float) -> list[Request]:
    """Scale the times of a trace, such that it begins at 0.

    Args:
        speed: of the replay; 2 sends in half the time.
        rate: mean requests per second; if finite, it replaces the speed.
    """
    times = [one.at or 0.0 for one in requests]
    first, span = min(times), max(times) - min(times)
    if math.isfinite(rate):
        speed = span * rate / len(times)
    return [
        replace(one, at=(time - first) / speed if speed else 0.0) for one, time in zip(requests, times, strict=True)
    ]
