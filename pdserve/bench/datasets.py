"""The requests of a run: synthetic ones, or those of a file."""

from collections.abc import Callable

from pdserve.bench import traces
from pdserve.bench.requests import Request
from pdserve.config import BenchServeConfig
from pdserve.errors import SetupError

TRACES = ("mooncake", "azure", "burstgpt")  # data sets with times of arrival
Randint = Callable[[int, int], int]  # a draw between two numbers, both included


def load_requests(config: BenchServeConfig, randint: Randint, count_tokens: Callable[[str], int]) -> list[Request]:
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


def random_requests(config: BenchServeConfig, randint: Randint) -> list[Request]:
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


def prefix_requests(config: BenchServeConfig, randint: Randint) -> list[Request]:
    """Return prompts that begin with one of a few prefixes, in random order."""
    prefix, suffix = config.prefix_repetition_prefix_len, config.prefix_repetition_suffix_len
    requests = []
    for index in range(config.num_prompts):
        name = f"prefix-{randint(0, config.prefix_repetition_num_prefixes - 1)}"
        blocks = ((name, prefix), (f"own-{index}", suffix))
        requests.append(Request(index, config.prefix_repetition_output_len, blocks, input_tokens=prefix + suffix))
    return requests
