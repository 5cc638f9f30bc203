"""Cost of preemption by recomputation and by swapping, over block sizes: `python benchmarks/preemption.py`.

The engine alone, in process. For each block size: the time to compute the KV of one sequence, to copy it to host memory and
to copy it back; and the same requests in a pool that is too small for them, with recomputation and with swapping, compared
with a pool large enough for all.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import report
import torch
from checkpoints import Shape
from rich.console import Console
from rich.table import Table

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.costs import CostMeter, Costs
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.engine import Engine
from pdserve.engine.warm_up import measure_swaps, warm_up
from pdserve.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Settings(report.EngineSettings):
    block_sizes: str = flag("comma separated", "8,16,32,64,128")
    requests: int = flag("all at once", 8)
    prompt_tokens: int = flag("length of each prompt", 256)
    output_tokens: int = flag("tokens generated for each", 64)
    room: float = flag("share of what all requests need in the end that the small pool has", 0.7)
    repeat: int = flag("rounds; the ways take turns in each", 1)

    def blocks(self, size: int) -> int:
        """Of one sequence in the end."""
        return -(-(self.prompt_tokens + self.output_tokens) // size)


QUICK = {"block_sizes": "32", "requests": 4, "prompt_tokens": 100, "output_tokens": 40}
NEVER_SWAP = Costs(prefill=(0.0, 0.0, 0.0), swap=(1.0, 1.0))
ALWAYS_SWAP = Costs(prefill=(1.0, 1.0, 0.0), swap=(0.0, 0.0))
TRIES = 5  # per copy or computation


def benchmark(settings: Settings) -> None:
    """Measure preemption by recomputation and by swapping, over block sizes."""
    shape = checkpoints.TINY if settings.quick else checkpoints.QWEN3_0_6B
    settings = settings.sized(QUICK).threaded()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making a checkpoint") as status:
        config = EngineConfig(model=str(checkpoints.make(shape, Path(folder))), device=settings.device)
        checkpoint = load(config)
        for size in map(int, settings.block_sizes.split(",")):
            status.update(f"blocks of {size} tokens")
            rows.append(_row(size, checkpoint, config, shape, settings))
    _print(rows)
    print(report.write("preemption", settings, {"rows": rows}))


def _row(size: int, checkpoint: Checkpoint, base: EngineConfig, shape: Shape, settings: Settings) -> dict[str, Any]:
    blocks = settings.blocks(size)
    whole, length = settings.requests * blocks, blocks * size

    def engine(blocks: int, places: int) -> Engine:
        swap_space = places * size * shape.kv_bytes_per_token / 2**30
        config = replace(base, num_blocks=blocks, block_size=size, max_model_len=length, swap_space=swap_space)
        return Engine(config, replace(checkpoint, layout=replace(checkpoint.layout, block_size=size)))

    small = engine(int(whole * settings.room), whole)
    costs = _measured(small)
    recompute, out, back = _once(small, blocks, length)
    roomy = engine(whole, 0)
    ways: dict[str, tuple[Engine, Costs]] = {
        "recompute": (small, NEVER_SWAP),
        "swap": (small, ALWAYS_SWAP),
        "room": (roomy, NEVER_SWAP),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    preemptions: dict[str, int] = {}
    for number in range(settings.repeat):
        for way, (one, forced) in ways.items():
            one.scheduler.costs = forced
            before = one.scheduler.num_preemptions, one.scheduler.swap_space.num_swaps
            seconds[way].append(_run(one, settings, seed=number))
            preemptions[way] = one.scheduler.num_preemptions - before[0]
            swapped = one.scheduler.swap_space.num_swaps - before[1]
            assert swapped == (preemptions[way] if way == "swap" else 0), "another way than was asked for"
    tokens = settings.requests * settings.output_tokens
    return {
        "block_size": size,
        "block_mib": round(size * shape.kv_bytes_per_token / 2**20, 3),
        "tokens": length,
        "recompute_ms": round(1000 * recompute, 3),
        "swap_out_ms": round(1000 * out, 3),
        "swap_in_ms": round(1000 * back, 3),
        "swap_gb_per_s": round(2 * length * shape.kv_bytes_per_token / (out + back) / 1e9, 2),
        "recompute_by_swap": round(recompute / (out + back), 1),
        "chosen": "swap" if 2 * costs.swap_seconds(blocks) < costs.prefill_seconds(length) else "recompute",
        "output_tok_per_s": {way: round(tokens / statistics.median(seconds[way]), 1) for way in ways},
        "preemptions": preemptions,
        "seconds": {way: [round(one, 4) for one in seconds[way]] for way in ways},
    }


def _measured(engine: Engine) -> Costs:
    """Return the costs that an instance would measure after its start."""
    meter = CostMeter()
    for work, seconds in warm_up(engine):
        meter.calibrate_step(work, seconds)
    for blocks, seconds in measure_swaps(engine):
        meter.calibrate_swap(blocks, seconds)
    return meter.costs(time.monotonic())


def _once(engine: Engine, blocks: int, tokens: int) -> tuple[float, float, float]:
    """Return the best seconds of several tries: computing one sequence, copying its blocks out, and copying them back."""
    pairs = [(i, i) for i in range(blocks)]

    def compute() -> float:
        seq = engine.new_sequence("alone", [0] * (tokens - 1), SamplingParams(max_tokens=1, temperature=0))
        seq.forbid_caching()  # otherwise the second try would find it in the cache
        engine.add(seq)
        started = time.perf_counter()
        while not engine.step().sampled:
            pass
        seconds = time.perf_counter() - started
        engine.remove(seq)
        return seconds

    ways: list[Callable[[], float]] = [
        compute,
        lambda: engine.runner.kv.swap(pairs, []),
        lambda: engine.runner.kv.swap([], pairs),
    ]
    recompute, out, back = (min(way() for _ in range(TRIES)) for way in ways)
    return recompute, out, back


def _run(engine: Engine, settings: Settings, seed: int) -> float:
    """Return the seconds for all requests. No prompt is in the prefix cache; cached blocks of preempted ones may be found."""
    engine.pool.clear_cache()
    random = torch.Generator().manual_seed(seed)
    shape = (settings.requests, settings.prompt_tokens)
    prompts = torch.randint(0, engine.checkpoint.vocab_size, shape, generator=random).tolist()
    sampling = SamplingParams(max_tokens=settings.output_tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(engine.new_sequence(str(i), prompt, sampling))
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.finish_reason() is not None:
                engine.remove(seq)
    return time.perf_counter() - started


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    columns = ("block", "MiB", "recompute ms", "swap out ms", "in ms", "GB/s", "recompute ÷ swap", "chosen")
    for column in (*columns, "tok/s: recompute", "swap", "room", "preemptions"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["block_size"]),
            f"{row['block_mib']:.2f}",
            f"{row['recompute_ms']:.1f}",
            f"{row['swap_out_ms']:.2f}",
            f"{row['swap_in_ms']:.2f}",
            f"{row['swap_gb_per_s']:.1f}",
            f"{row['recompute_by_swap']:.1f}",
            row["chosen"],
            *(f"{row['output_tok_per_s'][way]:.1f}" for way in ("recompute", "swap", "room")),
            f"{row['preemptions']['recompute']}, {row['preemptions']['swap']}",
        )
    report.show(table)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
