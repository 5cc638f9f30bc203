"""Gain and overhead of the prefix cache: `python benchmarks/prefix_cache.py`.

The engine alone, in process. In each round, the same number of prompts is computed and continued: without a cache, and with
one that contains none, half, or nine tenths of each prompt. Apart from these prefixes, all prompts are new. Without a cache
means that blocks get no keys, so nothing is hashed, looked up or stored.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import checkpoints
import report
import torch
from rich.console import Console
from rich.table import Table

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.engine.engine import Engine
from pdserve.request import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Settings(report.EngineSettings):
    requests: int = flag("prompts of a round, all at once", 8)
    prompt_tokens: int = flag("length of each", 512)
    output_tokens: int = flag("tokens generated for each", 32)
    repeat: int = flag("rounds; the cases take turns in each", 5)
    block_size: int = flag("tokens in a KV block", EngineConfig.block_size)


QUICK = {"requests": 4, "prompt_tokens": 160, "output_tokens": 4, "repeat": 1}
HITS = (0, 50, 90)  # percent


@dataclass(frozen=True)
class Case:
    """`hits` is the cached share of each prompt in percent; None disables the cache."""

    hits: int | None

    @property
    def name(self) -> str:
        return "off" if self.hits is None else f"{self.hits} %"


@dataclass
class Round:
    """One case in one round: total seconds, seconds spent in the cache, and the share of tokens found."""

    seconds: float
    bookkeeping: float
    found: float


def benchmark(settings: Settings) -> None:
    """Measure throughput with 0, 50 and 90 % prefix hits, and without a prefix cache."""
    shape = checkpoints.TINY if settings.quick else checkpoints.QWEN3_0_6B
    settings = settings.sized(QUICK).threaded()
    cases = [Case(None), *(Case(hits) for hits in HITS)]
    rounds: dict[Case, list[Round]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making a checkpoint") as status:
        bench = Bench(checkpoints.make(shape, Path(folder)), settings)
        for number in range(settings.repeat + 1):
            status.update(f"round {number} of {settings.repeat}")
            for case in cases if number % 2 else reversed(cases):
                measured = bench.round(case)
                if number:  # the first round warms up
                    rounds[case].append(measured)
    rows = [_row(case, rounds, settings) for case in cases]
    _print(rows)
    print(report.write("prefix_cache", settings, {"rows": rows}))


class Bench:
    def __init__(self, path: Path, settings: Settings) -> None:
        self._settings = settings
        length = settings.prompt_tokens + settings.output_tokens
        blocks = 2 * settings.requests * -(-length // settings.block_size)
        config = EngineConfig(
            model=str(path), num_blocks=blocks, block_size=settings.block_size, device=settings.device
        )
        self._engine = Engine(config)
        self._random = torch.Generator().manual_seed(0)
        self._bookkeeping = 0.0
        # Patched in place, so that the real engine is timed.
        self._engine.scheduler.reserve = self._timed(self._engine.scheduler.reserve)  # type: ignore[method-assign]

    def round(self, case: Case) -> Round:
        count = self._settings.prompt_tokens * (case.hits or 0) // 100 // self._settings.block_size
        common = self._tokens(count * self._settings.block_size)
        if common:
            self._run([[*common, 0]], 1, cached=True)
        prompts = [
            common + self._tokens(self._settings.prompt_tokens - len(common)) for _ in range(self._settings.requests)
        ]
        scheduler = self._engine.scheduler
        self._bookkeeping, found = 0.0, scheduler.prefix_hits
        started = time.perf_counter()
        self._run(prompts, self._settings.output_tokens, cached=case.hits is not None)
        seconds = time.perf_counter() - started
        tokens = self._settings.requests * self._settings.prompt_tokens
        return Round(seconds, self._bookkeeping, (scheduler.prefix_hits - found) / tokens)

    def _run(self, prompts: list[list[int]], output_tokens: int, *, cached: bool) -> None:
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            seq = self._engine.new_sequence(str(i), prompt, sampling)
            seq.register_full_blocks = self._timed(seq.register_full_blocks)  # type: ignore[method-assign]
            if not cached:
                seq.forbid_caching()
                seq.full_keys = list  # type: ignore[method-assign]  # no keys: no cache
            self._engine.add(seq)
        while self._engine.has_work:
            for seq in self._engine.step().sampled:
                if seq.finish_reason() is not None:
                    self._engine.remove(seq)

    def _tokens(self, count: int) -> list[int]:
        vocabulary = self._engine.checkpoint.vocab_size
        ids: list[int] = torch.randint(0, vocabulary, (count,), generator=self._random).tolist()
        return ids

    def _timed(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that its time counts as bookkeeping."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._bookkeeping += time.perf_counter() - started

        return timed


def _row(case: Case, rounds: dict[Case, list[Round]], settings: Settings) -> dict[str, Any]:
    """The ratio is that of throughputs, by round and then the median; bookkeeping is what the cache takes more than none."""
    own, off = rounds[case], rounds[Case(None)]
    seconds = statistics.median(one.seconds for one in own)
    extra = [(one.bookkeeping - none.bookkeeping) / one.seconds for one, none in zip(own, off, strict=True)]
    return {
        "cache": case.name,
        "found_percent": round(100 * statistics.median(one.found for one in own), 1),
        "requests_per_s": round(settings.requests / seconds, 3),
        "output_tok_per_s": round(settings.requests * settings.output_tokens / seconds, 1),
        "of_off": round(statistics.median(none.seconds / one.seconds for one, none in zip(own, off, strict=True)), 3),
        "bookkeeping_percent": round(100 * statistics.median(extra), 3),
        "seconds": [round(one.seconds, 4) for one in own],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("cache", "found", "requests/s", "output tok/s", "of off", "bookkeeping"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["cache"],
            f"{row['found_percent']:.0f} %",
            f"{row['requests_per_s']:.2f}",
            f"{row['output_tok_per_s']:.1f}",
            f"{row['of_off']:.3f}",
            f"{row['bookkeeping_percent']:.2f} %",
        )
    report.show(table)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
