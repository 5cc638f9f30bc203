"""The requests of a run: synthetic ones, or those of a file, and when they are sent, each as in vLLM's benchmark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from pdserve.errors import SetupError
from pdserve.tools.bench import traces
from pdserve.tools.bench.requests import Request
from pdserve.tools.load_config import TRACES, LoadConfig

Randint = Callable[[int, int], int]  # a draw between two numbers, both included


class Draws(Protocol):
    """A source of random numbers, as `random.Random`."""

    def randint(self, a: int, b: int) -> int: ...

    def gammavariate(self, alpha: float, beta: float) -> float: ...


def draw_load(config: LoadConfig, rate: float, drawn: Draws, count_tokens: Callable[[str], int]) -> list[Request]:
    """Return the requests of one run with their times.

    Args:
        rate: requests per second in the mean; infinite for all at once, or for a trace's own times.
        count_tokens: of a text.

    Raises:
        SetupError: the file is missing, malformed or empty, or settings contradict each other.
    """
    requests = load_requests(config, drawn.randint, count_tokens)
    if config.warmup_requests >= len(requests):
        raise SetupError(f"--warmup-requests {config.warmup_requests} leaves none of {len(requests)} requests")
    has_times = config.dataset_name in TRACES and len({one.at for one in requests}) > 1
    if has_times and config.burstiness != LoadConfig.burstiness:
        raise SetupError(f"--burstiness has no effect beside the times in {config.dataset_path}: leave it out")
    if has_times or (config.dataset_name in TRACES and math.isinf(rate)):
        return replay(requests, config.trace_speed, rate)
    count = sum(one.after is None for one in requests)
    if config.ramp_up_strategy is None:
        return schedule(requests, arrival_times(count, rate, config.burstiness, drawn.gammavariate))
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    if start is None or end is None:
        raise SetupError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    exponential = config.ramp_up_strategy == "exponential"
    return schedule(requests, ramp_times(count, start, end, exponential, config.burstiness, drawn.gammavariate))


def load_requests(config: LoadConfig, randint: Randint, count_tokens: Callable[[str], int]) -> list[Request]:
    """Return the requests of the data set that the settings name.

    Raises:
        SetupError: the file is missing, malformed or empty.
    """
    name, path, limit = config.dataset_name, config.dataset_path, config.num_prompts
    if name == "random":
        return random_requests(config, randint)
    if name == "prefix_repetition":
        return prefix_requests(config, randint)
    if not path:
        raise SetupError(f"--dataset-name {name} needs --dataset-path")
    scale, conversations = config.trace_length_scale, config.multi_turn
    if name == "mooncake":
        requests = traces.read_mooncake(path, limit, scale, conversations)
    elif name == "azure":
        requests = traces.read_azure(path, limit, scale)
    elif name == "burstgpt":
        requests = traces.read_burstgpt(path, limit, scale)
    elif name == "custom":
        requests = traces.read_custom(path, limit, config.output_len, conversations)
    else:
        requests = traces.read_sharegpt(path, limit, config.output_len, conversations, count_tokens)
    if not requests:
        raise SetupError(f"{path} contains no requests")
    return requests


def random_requests(config: LoadConfig, randint: Randint) -> list[Request]:
    """Return prompts of random words after a common prefix, with lengths within `--random-range-ratio` of the given."""

    def draw(length: int) -> int:
        spread = int(length * config.random_range_ratio)
        return max(1, randint(length - spread, length + spread)) if spread else length

    requests, prefix = [], config.random_prefix_len
    for index in range(config.num_prompts):
        inputs, outputs = draw(config.random_input_len), draw(config.random_output_len)
        blocks = (("prefix", prefix), (f"own-{index}", inputs)) if prefix else ((f"own-{index}", inputs),)
        requests.append(Request(index, outputs, blocks, input_tokens=prefix + inputs))
    return requests


def prefix_requests(config: LoadConfig, randint: Randint) -> list[Request]:
    """Return prompts that begin with one of a few prefixes, in random order."""
    prefix, suffix = config.prefix_repetition_prefix_len, config.prefix_repetition_suffix_len
    requests = []
    for index in range(config.num_prompts):
        name = f"prefix-{randint(0, config.prefix_repetition_num_prefixes - 1)}"
        blocks = ((name, prefix), (f"own-{index}", suffix))
        requests.append(Request(index, config.prefix_repetition_output_len, blocks, input_tokens=prefix + suffix))
    return requests


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
