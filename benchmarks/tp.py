"""One instance on one and on two devices: `python benchmarks/tp.py`. On CPUs a device is a core, with one thread.

Prompts and decode steps run through the engine in this process, on one rank with one thread, and on two with one thread each.
Sums between the ranks are counted and timed, which includes the wait for the other rank. Then the hand-over is measured
between a prefill and a decode instance with one or two ranks each, over shared memory.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import handover
import report
import stores
import torch

from pdserve.cli.deployment import Deployment
from pdserve.config import InstanceConfig, UpConfig, flag, parse_size
from pdserve.engine.engine import Engine
from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.engine.step import StepPlan
from pdserve.engine.warm_up import dummy_sequence
from pdserve.ranks.leader import start_ranks

TWO = ["--tensor-parallel-size", "2"]
DEGREES = {"1 to 1": ([], []), "1 to 2": ([], TWO), "2 to 1": (TWO, []), "2 to 2": (TWO, TWO)}


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    layers: int = flag("of a model with the layers of Qwen3-0.6B; fewer take less time, with the same ratios", 8)
    dtype: str = flag("of weights and KV", "bfloat16")
    prompt: int = flag("tokens of a prefill step", 512)
    batch: str = flag("sequences of a decode step, comma separated", "1,16")
    context: int = flag("tokens before those of a decode step", 256)
    steps: int = flag("of each kind, of which the median counts", 15)
    rounds: int = flag("in which one and two ranks take turns", 3)
    handover: int = flag("tokens of the prompts that are handed over; 0: none are", 2048)
    repeat: int = flag("prompts that are handed over", 5)


QUICK = {"layers": 2, "prompt": 16, "batch": "1", "context": 16, "steps": 2, "rounds": 1, "handover": 40, "repeat": 1}


class Sums:
    """Counts and times the sums of rank 0."""

    def __init__(self) -> None:
        self.count, self.bytes, self.seconds = 0, 0, 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        original = RankGroup.sum

        def timed(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            total = original(group, x)
            self.seconds += time.perf_counter() - started
            self.count, self.bytes = self.count + 1, self.bytes + x.nbytes
            return total

        RankGroup.sum = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            RankGroup.sum = original  # type: ignore[method-assign]


def tp(settings: Settings) -> None:
    """Measure steps and hand-overs on one and two ranks."""
    shape = checkpoints.TINY if settings.quick else replace(checkpoints.QWEN3_0_6B, layers=settings.sized(QUICK).layers)
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoints.make(replace(shape, dtype=settings.dtype), Path(folder))
        rows = _steps(str(model), settings)
    moved = _handovers(settings) if settings.handover else []
    report.show(rows)
    if moved:
        report.show(moved)
    print(report.write("tp", settings, {"rows": rows, "handovers": moved}))


def _steps(model: str, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each kind of step and number of ranks."""
    kinds = {f"prefill of {settings.prompt}": [(settings.prompt, 0)]}
    kinds |= {f"decode of {size}": [(1, settings.context)] * int(size) for size in settings.batch.split(",")}
    samples: dict[tuple[str, int], list[float]] = {}
    sums: dict[str, Sums] = {name: Sums() for name in kinds}
    num_steps = 0
    for _ in range(settings.rounds):
        for ranks in (1, 2):
            with _engine(model, ranks, settings) as engine:
                for name, work in kinds.items():
                    _run(engine, work)  # warm
                    with sums[name].counted():
                        times = [_run(engine, work) for _ in range(settings.steps)]
                    samples.setdefault((name, ranks), []).extend(times)
        num_steps += settings.steps
    rows = []
    for name, work in kinds.items():
        medians = {ranks: statistics.median(samples[name, ranks]) for ranks in (1, 2)}
        tokens, summed = sum(count for count, _ in work), sums[name]
        rows.append(
            {
                "step": name,
                "one_rank_ms": report.rounded(medians[1] * 1e3, 3),
                "two_ranks_ms": report.rounded(medians[2] * 1e3, 3),
                "speed_up": report.rounded(medians[1] / medians[2], 3),
                "two_ranks_tokens_per_s": report.rounded(tokens / medians[2], 3),
                "sums": summed.count // num_steps,
                "sum_kib": report.rounded(summed.bytes / num_steps / 1024, 3),
                "sums_ms": report.rounded(summed.seconds / num_steps * 1e3, 3),
            }
        )
    return rows


@contextmanager
def _engine(model: str, ranks: int, settings: Settings) -> Iterator[Engine]:
    blocks = max(settings.prompt, settings.context + 1) // 16 + 2
    tokens = max(settings.prompt, 16)
    config = InstanceConfig(
        model=model,
        tensor_parallel_size=ranks,
        threads=ranks,
        num_blocks=blocks * max(map(int, settings.batch.split(","))),
        max_num_batched_tokens=tokens,
    )
    torch.set_num_threads(1)
    runner = start_ranks(config) if ranks > 1 else None
    engine = Engine(config, runner=runner)
    yield engine
    if runner is not None:
        runner.followers.close()
        assert runner.checkpoint.group is not None
        runner.checkpoint.group.close()
    del engine, runner
    gc.collect()


def _run(engine: Engine, work: list[tuple[int, int]]) -> float:
    first, scheduled = 0, {}
    for count, before in work:
        seq = dummy_sequence(engine, count, before, first)
        scheduled[seq] = count
        first += len(seq.kv.block_ids)
    started = time.perf_counter()
    engine.runner.step(StepPlan(scheduled))
    return time.perf_counter() - started


def _handovers(settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each pair of degrees. Blocks have the KV of Qwen3-0.6B, and the matrices are small."""
    shape = checkpoints.TINY if settings.quick else checkpoints.WIDE_KV
    own = handover.Settings(tokens=str(settings.handover), repeat=settings.repeat, threads=2)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoints.make(shape, Path(folder))
        for name, degrees in DEGREES.items():
            # A store for each: the prompts are the same, and prefill loads those that an earlier pair has left in the store.
            with stores.shm(parse_size(own.store_size)) as url:
                samples = _handovers_of(handover._config(model, url, own), *degrees, settings)
            rows.append(
                {
                    "ranks": name,
                    "handover_ms": report.rounded(statistics.median(one.handover for one in samples), 3),
                    "best_ms": report.rounded(min(one.handover for one in samples), 3),
                    "second_token_ms": report.rounded(statistics.median(one.second_token for one in samples), 3),
                    "whole": sum(one.whole for one in samples),
                }
            )
    return rows


def _handovers_of(config: UpConfig, prefill: list[str], decode: list[str], settings: Settings) -> list[handover.Sample]:
    deployment = Deployment(config, lambda line: None)
    for child in deployment.children:
        more = {"prefill": prefill, "decode": [*decode, "--convert-kv", "--allow-inexact"]}
        child.arguments += more.get(child.arguments[0], [])
    with deployment:
        deployment.wait_ready()
        client = handover.Client(deployment)
        for _ in range(handover.WARM_UPS):
            client.ask(settings.handover)
        return [client.ask(settings.handover) for _ in range(settings.repeat)]


if __name__ == "__main__":
    from pdserve.cli.flags import command_from_config

    report.main(command_from_config(Settings, tp))
