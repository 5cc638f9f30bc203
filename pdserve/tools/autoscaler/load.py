"""The load that a forecast is made for: what was received within the window, and what is expected next."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdserve.tools.autoscaler.observation import Seen
from pdserve.tools.bench.requests import Request

MAX_TREND = 1.5  # factor by which the rate may rise or fall from the newest half of the window
SIGNIFICANT = 3.0  # standard deviations of a Poisson process, less than which is no trend; real arrivals vary by more
CHANCE = 1e-4  # of a change of the mix, below which it is believed
MIN_SINCE = 20  # requests since a change of the mix, with fewer of which it is not seen
MIN_DISTANCE = 0.5  # between the distributions of prompts, with less of which the mix is the same
SPACING = 1.2  # between numbers of newest requests that are compared with the older ones
GOLDEN = 0.618  # the fractional parts of its multiples are spread evenly


def expected_rate(
    times: Sequence[float], now: float, window: float, horizon: float, quiet_at: float = math.inf
) -> float:
    """Return the mean rate of arrivals expected for the time from `now` to `now + horizon`, in requests per second.

    If the rates of the older and the newer half of the window differ by more than chance, it continues the line through them,
    but no steeper than within the newer half: after a step, the rate is steady again. What is before the first request of
    the window says nothing: traffic has just begun, or routers keep no more.

    Args:
        quiet_at: time of the observation before this one, if there were no requests then. The rate is that since then:
            a few dozen requests in a fraction of a second are no traffic of hundreds per second.
    """
    if times and quiet_at < times[0]:
        return len(times) / min(window, now - quiet_at)
    window = min(window, now - times[0]) if times and times[0] < now else window
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
    """Return the index of the prompt from which on their lengths are distributed otherwise; 0 if nothing has changed.

    The lengths must differ by more than chance, by the test of Kolmogorov and Smirnov, and by much: among thousands of
    requests any drift is more than chance, but no reason to forget what the older ones tell of answers.

    Args:
        lengths: of the prompts, in order of time. Those of answers are of no use: most of the newest still run.
    """
    best, found = CHANCE, 0
    count = float(MIN_SINCE)
    while (first := len(lengths) - int(count)) >= MIN_SINCE:
        distance = distance_of(lengths[:first], lengths[first:])
        chance = 2 * math.exp(-2 * distance**2 * first * int(count) / len(lengths))
        if distance >= MIN_DISTANCE and chance < best:
            best, found = chance, first
        count *= SPACING
    return found


def distance_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of Kolmogorov and Smirnov: the largest difference of the distribution functions of two samples."""
    values = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (one, other)]
    return float(np.max(np.abs(shares[0] - shares[1])))


def answer_lengths(requests: Sequence[Seen], began_at: float, now: float) -> list[int]:
    """Return the tokens that each answer will have: those that still run go on as answers of their length did.

    Of the answers of a window, short ones have ended and long ones run, so those that have ended are too short in the mean.
    The shares of answers beyond a length are those of Kaplan and Meier (1958), in which an answer that runs counts up to its
    length so far, and one that was received before the window from its length at that time on: of those, the window has only
    the long ones. One that is longer than all that have ended is taken to be half done. The lengths of running answers are
    spread evenly over these shares, so that together they are distributed like them.

    Args:
        began_at: beginning of the window, which has the requests that were received or ran since then until `now`.
    """
    seen = [one for one in requests if one.finish_reason in ("", "stop", "length")]
    ended = np.array([one.request.output_tokens for one in seen if one.finish_reason], int)
    running = np.array([one.request.output_tokens for one in seen if not one.finish_reason], int)
    is_beyond = running > max(ended, default=0)
    known = np.concatenate([ended, 2 * running[is_beyond]])
    reached = np.sort(np.concatenate([known, running[~is_beyond]]))
    before = np.sort([min(one.request.output_tokens - 1, _tokens_at(began_at, one, now)) for one in seen])
    lengths, ends = np.unique(known, return_counts=True)
    at_risk = np.searchsorted(before, lengths) - np.searchsorted(reached, lengths)
    longer = np.cumprod(1 - ends / at_risk)  # shares beyond each of `lengths`

    def length(number: int, one: Seen) -> int:
        so_far = one.request.output_tokens
        if one.finish_reason and not one.is_refused:
            return max(1, so_far)
        first = int(np.searchsorted(lengths, so_far, side="right"))
        share = (longer[first - 1] if first else 1.0) * (GOLDEN * (number + 1) % 1)
        last = first + int(np.searchsorted(-longer[first:], -share))
        return max(1, int(lengths[last]) if last < len(lengths) else so_far)

    return [length(*pair) for pair in enumerate(requests)]


def _tokens_at(at: float, one: Seen, now: float) -> float:
    """Return the tokens that a request had at a time, interpolated between its first token and its last one."""
    first = math.inf if one.ttft_s is None else one.at + one.ttft_s
    until = now if one.e2e_s is None else one.ended_at
    return one.request.output_tokens * (at - first) / (until - first) if first < at else 0.0


def answer_seconds(requests: Sequence[tuple[Seen, int]], now: float) -> list[float]:
    """Return how long requests, given with the lengths of their answers, take from their first token to the last.

    Those that still run go on at their speed so far; those without a token are left out.
    """
    seconds = list[float]()
    for one, length in requests:
        if one.ttft_s is not None:
            so_far = now - one.at - one.ttft_s if one.e2e_s is None else one.e2e_s - one.ttft_s
            seconds.append(so_far * (1 if one.e2e_s is not None else length / max(1, one.request.output_tokens)))
    return seconds


def replayed(requests: Sequence[tuple[Seen, int]], began_at: float, now: float) -> list[Request]:
    """Return requests, given with the lengths of their answers, as they are sent again for a forecast, numbered anew.

    Those that were received before `began_at` are sent then, and those that were answered already only go on with the answer.
    """
    load = list[Request]()
    for index, (one, length) in enumerate(requests):
        request = replace(one.request, index=index, output_tokens=length, at=max(one.at, began_at))
        if done := _tokens_at(began_at, one, now):
            left = max(1, round(length - done))
            request = replace(request, output_tokens=left, blocks=((f"begun-{index}", 1),), input_tokens=1)
        load.append(request)
    return load


def expected_load(
    received: Sequence[Request], now: float, rate: float, horizon: float, first_index: int, draw: int = 0
) -> list[Request]:
    """Return requests at a rate from `now` on: received ones drawn again, at random times, numbered from `first_index`.

    What several prompts of the window had in common they have in common again; the rest of each prompt is new.

    Args:
        draw: number of the draw, of several at the same time.
    """
    drawn = random.Random(f"{int(now)} {draw}" if draw else int(now))
    uses = Counter(name for request in received for name, _ in request.blocks)
    load = list[Request]()
    at = now + drawn.expovariate(rate) if rate and received else now + horizon
    while at < now + horizon:
        request, index = drawn.choice(received), first_index + len(load)
        blocks = tuple((name if uses[name] > 1 else f"{name}-{index}", size) for name, size in request.blocks)
        load.append(replace(request, index=index, blocks=blocks, at=at, after=None, continues=False))
        at += drawn.expovariate(rate)
    return load
