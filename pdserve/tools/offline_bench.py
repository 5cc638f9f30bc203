"""`pdserve bench latency` and `throughput`: batches of random prompts through a deployment of their own, in vLLM's words."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.config import UpConfig
from pdserve.tools.bench.report import check_files, write_file
from pdserve.tools.load_config import BenchLatencyConfig, BenchThroughputConfig, OfflineConfig

PERCENTILES = (10, 25, 50, 75, 90, 99)
NUM_IDS = 256  # of tokens in prompts, which every vocabulary has
Generate = Callable[[Sequence[list[int]], int], object]  # prompts and the length of each answer


def run(config: BenchLatencyConfig | BenchThroughputConfig) -> None:
    """Start a deployment, measure, print vLLM's lines, and write the JSON file if one is named.

    Raises:
        SetupError: a process cannot start, or the file cannot be written.
    """
    from pdserve.offline.llm import LLM
    from pdserve.offline.params import SamplingParams

    check_files(config.output_json)
    names = {one.name for one in fields(UpConfig)} - {"port"}
    settings = {name: getattr(config, name) for name in names}
    with LLM(**settings) as llm:

        def generate(prompts: Sequence[list[int]], tokens: int) -> object:
            params = SamplingParams(n=config.n, temperature=1.0, max_tokens=tokens, ignore_eos=True)
            return llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)

        if isinstance(config, BenchLatencyConfig):
            lines, figures = latency(config, generate)
        else:
            lines, figures = throughput(config, generate)
    print("\n".join(lines))
    if config.output_json:
        write_file(Path(config.output_json), json.dumps(figures, indent=4) + "\n")


def latency(
    config: BenchLatencyConfig, generate: Generate, now: Callable[[], float] = time.perf_counter
) -> tuple[list[str], dict[str, Any]]:
    """Return the report and the figures of batches one after the other. Each has new prompts, so that none is cached."""
    draw, seconds = random.Random(config.seed), list[float]()
    for _ in range(config.num_iters_warmup + config.num_iters):
        prompts = draw_prompts(draw, config, config.batch_size)
        started = now()
        generate(prompts, config.output_len)
        seconds.append(now() - started)
    measured = seconds[config.num_iters_warmup :]
    percentiles = {str(p): float(np.percentile(measured, p)) for p in PERCENTILES}
    mean = float(np.mean(measured))
    lines = [
        f"Avg latency: {mean} seconds",
        *(f"{p}% percentile latency: {value} seconds" for p, value in percentiles.items()),
    ]
    lines.append(f"Normalized latency: {1e3 * mean / config.output_len:.2f} ms per output token")
    return lines, {"avg_latency": mean, "latencies": measured, "percentiles": percentiles}


def throughput(
    config: BenchThroughputConfig, generate: Generate, now: Callable[[], float] = time.perf_counter
) -> tuple[list[str], dict[str, Any]]:
    """Return the report and the figures of all prompts at once."""
    draw = random.Random(config.seed)
    generate(draw_prompts(draw, config, 1), 2)  # so that the first request of the run finds everything started
    prompts = draw_prompts(draw, config, config.num_prompts)
    started = now()
    generate(prompts, config.output_len)
    seconds = now() - started
    output = len(prompts) * config.output_len * config.n
    total = output + len(prompts) * config.input_len
    rates = (len(prompts) / seconds, total / seconds, output / seconds)
    line = "Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s".format(*rates)
    figures = {"elapsed_time": seconds, "num_requests": len(prompts), "total_num_tokens": total}
    return [line], figures | {"requests_per_second": rates[0], "tokens_per_second": rates[1]}


def draw_prompts(draw: random.Random, config: OfflineConfig, count: int) -> list[list[int]]:
    """Return random prompts of the length that the settings say."""
    return [[draw.randrange(NUM_IDS) for _ in range(config.input_len)] for _ in range(count)]
