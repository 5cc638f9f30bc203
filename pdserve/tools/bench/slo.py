"""Service-level objectives of single requests, as in `--goodput ttft=500ms,itl=50ms`, and whether a request meets them."""

import math
from collections.abc import Sequence

from pdserve.slo import limits_of, parse_slo
from pdserve.tools.bench.requests import Sample

METRICS = ("ttft", "tpot", "itl", "e2el")
MIN_BEYOND = 5  # values above a percentile, with which it is steady
ITL_SHARE = 0.99  # of a request's gaps between tokens that must be within the objective `itl`
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided, by degrees of freedom


def parse_goodput(text: str) -> dict[str, float]:
    """Parse the objectives of a request into seconds, such as `ttft=500ms,itl=50ms`, or vLLM's `ttft:500 itl:50`.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return limits_of(parse_slo(text, METRICS))
    except ValueError as error:
        raise ValueError(f"--goodput: {error}") from None


def is_good(sample: Sample, objectives: dict[str, float]) -> bool:
    """Return True if a request succeeded and met all objectives."""
    if not sample.ok:
        return False
    values = {"ttft": sample.ttft, "tpot": sample.tpot, "e2el": sample.latency}
    if any(values[name] > limit for name, limit in objectives.items() if name != "itl"):
        return False
    gaps = sample.itls
    late = sum(gap > objectives.get("itl", math.inf) for gap in gaps)
    return late <= (1 - ITL_SHARE) * len(gaps)


def thin_sentence(name: str, percentile: int, count: int, values: str) -> str:
    """Return what there is to say of a percentile of too few values to be steady; empty if they are enough.

    Args:
        name: of the figure.
        values: what it is of, such as `requests`.
    """
    beyond = count * (100 - percentile) / 100
    if not count:
        return f"{name} says nothing: there are no {values}."
    if beyond >= MIN_BEYOND:
        return ""
    slowest, needed = max(1, math.ceil(beyond)), math.ceil(MIN_BEYOND * 100 / (100 - percentile))
    return f"{name} rests on the slowest {slowest} of {count} {values}: it varies by chance with fewer than {needed}."


def wilson(good: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, good / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % confidence interval, which is infinite for a single value."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    t = T_95[count - 2] if count - 2 < len(T_95) else 1.96
    return mean, t * math.sqrt(variance / count)
