"""Splitwise's published designs beside forecasts: BLOOM-176B on A100 and H100."""

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from simulated_setup import FREE, TRACES, Setup, requests_of, row

from pdserve.bench.requests import Request
from pdserve.profile.imports import import_file

GPUS = (A100, H100) = ("a100-80gb", "h100-80gb")


class Splitwise:
    """BLOOM-176B on machines of eight GPUs, A100 or H100, at a fraction of the published numbers of machines and rates."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.seconds = seconds
        file = folder / "splitwise_perf_model.csv"
        self.curves = {
            (gpu, column): _curve(file, gpu, column) for gpu in GPUS for column in ("prompt_time", "token_time")
        }
        self.setups = {gpu: self._setup(file, gpu) for gpu in GPUS}
        self.changes: dict[str, Callable[[str, Setup], Setup]] = {
            "pdserve": lambda gpu, setup: setup,
            "four times the pool": lambda gpu, setup: replace(setup, pool=4 * setup.pool),
            "its decode and mixed steps": lambda gpu, setup: setup.with_step(
                decode=self._decode(gpu), context_s=0.0, mixed=(0.0, 0.0, 1.1)
            ),
        }

    def _setup(self, file: Path, gpu: str) -> Setup:
        profile = import_file("splitwise", str(file), f"bloom-176b,{gpu},8")
        # 8 × 80 GB less 329 GB of weights; K and V of 70 layers with 14,336 values in 16 bits.
        pool = int((640e9 - 329e9) / (2 * 70 * 14336 * 2))
        return Setup(replace(profile, transfers={"link": FREE}), pool, sequences=512, block=128)

    def _decode(self, gpu: str) -> tuple[tuple[int, float], ...]:
        """Return decode times as its simulator has them: looked up by batch × prompt tokens, asked for with the batch."""
        xs, ys = self.curves[gpu, "token_time"]
        return tuple((count, _extrapolated(count, xs, ys)) for count in (1, 128, 256, 512))

    def requests(self, trace: str, rate: float) -> list[Request]:
        """Return requests whose lengths are drawn independently from the trace's, as its simulator's traces are."""
        with (TRACES / f"azure-{trace}-2023.csv").open(newline="") as file:
            prompts, outputs = zip(
                *((int(one[0]), int(one[1])) for one in csv.reader(file) if one[0].isdigit()), strict=True
            )
        draw, count = random.Random(0), round(rate * self.seconds)
        times = list(accumulate(draw.expovariate(rate) for _ in range(count)))
        return requests_of([(draw.choice(prompts), draw.choice(outputs)) for _ in range(count)], times)

    def worst(self, setup: Setup, trace: str, rate: float) -> float:
        """Return the largest ratio of a slowdown to its SLO."""
        requests = self.requests(trace, rate)
        slowdowns: dict[str, list[float]] = {"ttft": [], "tbt": [], "e2e": []}
        for sample in setup.play(requests):
            one = requests[sample.index]
            ttft, tbt = (
                _extrapolated(one.input_tokens, *self.curves[A100, f"{kind}_time"]) for kind in ("prompt", "token")
            )
            slowdowns["ttft"].append(sample.ttft / ttft)
            slowdowns["e2e"].append(sample.latency / (ttft + tbt * (one.output_tokens - 1)))
            if one.output_tokens > 1:
                slowdowns["tbt"].append(sample.tpot / tbt)
        limits = {"ttft": (2, 3, 6), "tbt": (1.25, 1.5, 5), "e2e": (1.25, 1.5, 5)}
        return max(
            float(np.percentile(values, p)) / limit
            for kind, values in slowdowns.items()
            for p, limit in zip((50, 90, 99), limits[kind], strict=True)
        )

    def highest_rate(self, setup: Setup, start: float) -> float:
        """Return the highest rate that meets all SLOs with the conversation trace, to 10 %."""
        met, missed, rate = 0.0, 0.0, start
        while not met or not missed or missed / met > 1.1:
            if self.worst(setup, "conv", rate) <= 1:
                met = rate
            else:
                missed = rate
            rate = (met * missed) ** 0.5 if met and missed else rate * 1.4 if met else rate / 1.4
        return met

    def cheapest(self, setup: Setup, rate: float) -> tuple[int, int]:
        """Return the smallest numbers of prompt and token machines that meet all SLOs with the coding trace."""
        for size in range(8, 14):
            for token in (1, 2):
                if self.worst(replace(setup, prefill=size - token, decode=token), "code", rate) <= 1:
                    return size - token, token
        return 0, 0

    def coding(self, term: str) -> list[dict[str, Any]]:
        """Compare the cheapest design for the coding trace, at a third of its size."""
        h100, name = self.changes[term](H100, self.setups[H100]), "Splitwise-HH, coding, 70 requests/s"
        prompt, token = self.cheapest(h100, 70 / 3)
        return [
            row(name, "a third of the machines for prompts", (9, prompt)),
            row(name, "a third of the machines for tokens", (1, token)),
        ]

    def conversation(self, term: str) -> list[dict[str, Any]]:
        """Compare designs of the same power, at a fifth of their size."""
        a100 = self.changes[term](A100, self.setups[A100])
        mixed = self.highest_rate(replace(a100, both=14), 8.0)
        split = self.highest_rate(replace(a100, prefill=9, decode=5), 11.0)
        rates = {"70 A100": 5 * mixed, "AA (45P, 25T)": 5 * split}
        return [row("Splitwise, conversation", "AA (45P, 25T) / 70 A100", (2.15, split / mixed)) | {"rates": rates}]


def _curve(file: Path, gpu: str, column: str) -> tuple[list[int], list[float]]:
    """Return median seconds by batch × prompt tokens, as splitwise-sim@37808801, performance_model.py, has them."""
    by_tokens: dict[int, list[float]] = {}
    with file.open(newline="") as rows:
        for one in csv.DictReader(rows):
            if (one["model"], one["hardware"], one["tensor_parallel"]) == ("bloom-176b", gpu, "8"):
                tokens = int(one["prompt_size"]) * int(one["batch_size"])
                by_tokens.setdefault(tokens, []).append(float(one[column]) / 1e3)
    xs = sorted(by_tokens)
    return xs, [float(np.median(by_tokens[x])) for x in xs]


def _extrapolated(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    if x >= xs[0]:
        return float(np.interp(x, xs, ys))
    return ys[0] + (x - xs[0]) * (ys[1] - ys[0]) / (xs[1] - xs[0])
