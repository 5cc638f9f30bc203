"""The load that a forecast is made for: what was received within the window, and what is expected next."""

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from pdserve.autoscaler.observation import Seen
from pdserve.bench.requests import Request

MAX_TREND = 1.5  # factor by which the rate may rise or fall from the newest half of the window
SIGNIFICANT = 2.0  # standard deviations of a Poisson process, less than which is no trend
CHANCE = 1e-4  # of a change of the mix, below which it is believed
MIN_SINCE = 20  # requests since a change of the mix, with fewer of which it is not seen
SPACING = 1.2  # between numbers of newest requests that are compared with the older ones


def expected_rate(times: Sequence[float], now: float, window: float, horizon: float) -> float:
    """Return the mean rate of arrivals expected for the time from `now` to `now + horizon`, in requests per second.

    If the rates of the older and the newer half of the window differ by more than chance, it continues the line through them,
    but no steeper than within the newer half: after a step, the rate is steady again.
    """
    quarter = window / 4
    counts = [
        sum(start < time <= start + quarter for time in times) for start in (now - n * quarter for n in (4, 3, 2, 1))
    ]
    older, newer = sum(counts[:2]), sum(counts[2:])
    if abs(newer - older) <= SIGNIFICANT * (newer + older) ** 0.5:
        return (newer + older) / window
    slopes = (newer - older) / (2 * quarter) ** 2, (counts[3] - counts[2]) / quarter**2
    slope = min(slopes, key=abs) if slopes[0] * slopes[1] > 0 else 0.0
    rate = newer / (2 * quarter)
    return min(max(rate + slope * (quarter + horizon / 2), rate / MAX_TREND), rate * MAX_TREND)


def since_change(lengths: Sequence[int]) -> int:
    """Return where the newest prompts begin whose lengths differ from those of the older ones by more than chance; 0 if there
    are none.

    Args:
        lengths: of the prompts, in order of time. Those of answers are of no use: most of the newest still run.
    """
    best, found = CHANCE, 0
    count = float(MIN_SINCE)
    while (first := len(lengths) - int(count)) >= MIN_SINCE:
        if (chance := chance_of_same(lengths[:first], lengths[first:])) < best:
            best, found = chance, first
        count *= SPACING
    return found


def chance_of_same(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the chance that values of one distribution differ as much as these, by the test of Kolmogorov and Smirnov."""
    sizes, values = (len(one), len(other)), np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (one, other)]
    distance = float(np.max(np.abs(shares[0] - shares[1])))
    return min(1.0, 2 * math.exp(-2 * distance**2 * sizes[0] * sizes[1] / sum(sizes)))


def answer_lengths(requests: Sequence[Seen]) -> list[int]:
    """Return the tokens that each answer will have: that of a request that still runs goes on for as long as half of those
    that are longer already. One that is longer than all finished ones is taken to be half done."""
    finished = sorted(one.request.output_tokens for one in requests if one.finish_reason in ("stop", "length"))
    longest = finished[-1] if finished else 0
    running = sorted(one.request.output_tokens for one in requests if not one.finish_reason)
    known = finished + [2 * so_far for so_far in running if so_far > longest]

    def length(one: Seen) -> int:
        so_far = one.request.output_tokens
        longer = [] if one.finish_reason and not one.is_refused else known[bisect_right(known, so_far) :]
        return max(1, round(median(longer)) if longer else so_far)

    return [length(one) for one in requests]


def replayed(requests: Sequence[tuple[Seen, int]], began_at: float, now: float) -> list[Request]:
    """Return requests, given with the lengths of their answers, as they are sent again for a forecast, numbered anew.

    Those that were received before `began_at` are sent then, and those that were answered already only go on with the answer.
    """
    load = list[Request]()
    for index, (one, length) in enumerate(requests):
        request = replace(one.request, index=index, output_tokens=length, at=max(one.at, began_at))
        first = math.inf if one.ttft_s is None else one.at + one.ttft_s
        if first < began_at:
            until = now if one.e2e_s is None else one.at + one.e2e_s
            done = one.request.output_tokens * (began_at - first) / (until - first)
            left = max(1, round(length - done))
            request = replace(request, output_tokens=left, blocks=((f"begun-{index}", 1),), input_tokens=1)
        load.append(request)
    return load


def expected_load(
    received: Sequence[Request], now: float, rate: float, horizon: float, first_index: int
) -> list[Request]:
    """Return requests at a rate from `now` on: received ones drawn again, at random times, numbered from `first_index`.

    What several prompts of the window had in common they have in common again; the rest of each prompt is new.
    """
    drawn = random.Random(int(now))
    uses = Counter(name for request in received for name, _ in request.blocks)
    load = list[Request]()
    at = now + drawn.expovariate(rate) if rate and received else now + horizon
    while at < now + horizon:
        request, index = drawn.choice(received), first_index + len(load)
        blocks = tuple((name if uses[name] > 1 else f"{name}-{index}", size) for name, size in request.blocks)
        load.append(replace(request, index=index, blocks=blocks, at=at, after=None, continues=False))
        at += drawn.expovariate(rate)
    return load
