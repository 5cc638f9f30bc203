"""Benchmark of a connector's throughput and latency, compared with a memory copy of the same bytes in the same run.

    pdserve connector bench shm://bench?size=1GiB

Three steps alternate until the time of a measurement is up: the rows are copied in memory, the same rows are stored under new
keys, and loaded by another connector. So a temporary load on the machine affects all three.

Bandwidth is bytes divided by the time that `concurrency` parallel operations took together. Latency is that of one operation,
from the call to its result. Call time is that of the call itself, for which the engine thread waits; it should take
microseconds.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.errors import SetupError, reason
from pdserve.kv_transfer.batched import SWITCH_INTERVAL_S
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.progress import Step, progress
from pdserve.kv_transfer.rules.context import AttachedPool, Broken, RuleContext, new_keys
from pdserve.kv_transfer.url import without_password
from pdserve.sizes import parse_size

GiB = 1 << 30
MIN_ROUNDS = 3
Future = Any


@dataclass(frozen=True)
class Figure:
    """One operation at one size and concurrency.

    Attributes:
        failed: blocks that were not moved, which the bandwidth excludes.
        outcomes: of these blocks, such as {"full": 12}.
    """

    operation: str
    blocks: int  # per operation
    concurrency: int
    gib_s: float
    p50_ms: float
    p99_ms: float
    memcpy_gib_s: float
    of_memcpy: float  # bandwidth divided by that of the copy
    failed: int
    call_p50_ms: float
    call_max_ms: float
    outcomes: dict[str, int]


class _Samples:
    """Raw measurements of one operation."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.latencies: list[float] = []
        self.calls: list[float] = []  # seconds until each call returned
        self.outcomes: Counter[str] = Counter()  # of blocks that were not moved

    @property
    def gib_s(self) -> float:
        return self.bytes / self.seconds / GiB if self.seconds else 0.0

    def figure(self, operation: str, blocks: int, concurrency: int, memcpy: "_Samples") -> Figure:
        p50, p99 = (float(np.percentile(self.latencies, p)) * 1000 for p in (50, 99))
        ratio = self.gib_s / memcpy.gib_s
        values = (operation, blocks, concurrency, self.gib_s, p50, p99, memcpy.gib_s, ratio, self.outcomes.total())
        return Figure(*values, float(np.median(self.calls)) * 1000, max(self.calls) * 1000, dict(self.outcomes))


def figures(
    url: str,
    block_bytes: int,
    blocks: Sequence[int],
    concurrency: Sequence[int],
    seconds: float,
    step: Step = lambda step, call: None,
) -> Iterator[Figure]:
    """Measure every combination of blocks and concurrency; yields two figures each, for store and load.

    Args:
        step: called at the start of each combination.

    Raises:
        SetupError: the store cannot be used, a future did not end in time, or it raised an exception.
    """
    for count in blocks:
        for parallel in concurrency:
            context = RuleContext(url, seconds)
            combination = f"{count} blocks per operation, {parallel} at once"
            step(combination, partial(getattr, context, "call"))
            try:
                yield from _measure(context, block_bytes, count, parallel)
            except Broken as fault:
                raise SetupError(f"The measurement with {combination} failed: {fault}.") from fault
            finally:
                context.close()


def _measure(context: RuleContext, block_bytes: int, count: int, parallel: int) -> Iterator[Figure]:
    total = count * parallel
    source, target = context.attach(block_bytes, total), context.attach(block_bytes, total)
    groups = [range(start, start + count) for start in range(0, total, count)]
    memcpy, store, load = _Samples(), _Samples(), _Samples()
    target.rows[:] = source.rows  # maps every page
    stop_at = time.perf_counter() + context.seconds
    rounds = -1  # the first one is a warm-up
    while rounds < MIN_ROUNDS or time.perf_counter() < stop_at:
        rounds += 1
        samples = (memcpy, store, load) if rounds else (_Samples(), _Samples(), _Samples())
        _copy(samples[0], source, target, groups)
        keys = [new_keys(count) for _ in groups]
        for group in keys:
            context.register_keys(source.layout, group)
        results = _transfer(
            "store", source, samples[1], [_store(source, k, g) for k, g in zip(keys, groups, strict=True)]
        )
        for group, result in zip(keys, results, strict=True):
            source.keep_ticket(group, result)
        _transfer("load", target, samples[2], [_load(target, k, g) for k, g in zip(keys, groups, strict=True)])
        for group in keys:
            source.connector.release(group)
        context.delete_blocks(source)
    yield store.figure("store", count, parallel, memcpy)
    yield load.figure("load", count, parallel, memcpy)


def _copy(samples: _Samples, source: AttachedPool, target: AttachedPool, groups: Sequence[range]) -> None:
    for group in groups:
        started = time.perf_counter()
        for row in group:
            target.rows[row] = source.rows[row]
        samples.seconds += time.perf_counter() - started
        samples.bytes += len(group) * source.layout.block_bytes


def _store(pool: AttachedPool, keys: Sequence[bytes], rows: range) -> Callable[[], Future]:
    return lambda: pool.connector.store(keys, rows, lease_s=60.0)


def _load(pool: AttachedPool, keys: Sequence[bytes], rows: range) -> Callable[[], Future]:
    return lambda: pool.connector.load(keys, rows, tickets=pool.tickets(keys))


def _transfer(name: str, pool: AttachedPool, samples: _Samples, calls: Sequence[Callable[[], Future]]) -> list[Result]:
    started = time.perf_counter()
    ends: dict[int, float] = {}
    futures = []
    starts = []
    for i, call in enumerate(calls):
        starts.append(time.perf_counter())
        future = call()
        samples.calls.append(time.perf_counter() - starts[i])
        future.add_done_callback(lambda _, i=i: ends.__setitem__(i, time.perf_counter()))
        futures.append(future)
    results: list[Result] = [pool.wait(future, name) for future in futures]
    samples.seconds += time.perf_counter() - started
    for i, result in enumerate(results):
        samples.bytes += result.outcomes.count(Outcome.OK) * pool.layout.block_bytes
        samples.outcomes.update(str(outcome) for outcome in result.outcomes if outcome is not Outcome.OK)
        samples.latencies.append(ends.get(i, time.perf_counter()) - starts[i])
    return results


# The command `pdserve connector bench`.


def run(
    url: str, block_bytes: str, blocks: str, concurrency: str, seconds: float, json_file: str, plot_file: str
) -> bool:
    """Measure and print the figures. Returns False if an operation moved no block at all."""
    try:
        size = parse_size(block_bytes)
    except ValueError as error:
        raise SetupError(f"--block-bytes: {error}.") from None
    if size % 8 or size < 1024:
        raise SetupError(f"--block-bytes must be a multiple of 8 and at least 1024, not {size}.")
    counts, parallel = parse_counts(blocks, "blocks"), parse_counts(concurrency, "concurrency")
    if json_file not in ("", "-"):
        _report_errors(json_file, lambda: _write_text(json_file, "", "a"))  # now rather than after the measurement
    pyplot = _import_pyplot() if plot_file else None
    if pyplot is not None:
        _report_errors(plot_file, lambda: pyplot.figure().savefig(plot_file))
    rows: list[Figure] = []
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in an instance
    with progress() as step:
        step(_room(max(counts) * max(parallel), size), lambda: "")
        for row in figures(url, size, counts, parallel, seconds, step):
            step(_describe(row), lambda: "")
            rows.append(row)
    data = {"url": without_password(url), "block_bytes": size, "figures": [asdict(row) for row in rows]}
    if json_file == "-":
        print(json.dumps(data, indent=2))
    else:
        _print(rows, without_password(url), size)
    if json_file not in ("", "-"):
        _report_errors(json_file, lambda: _write_text(json_file, json.dumps(data, indent=2) + "\n"))
    if pyplot is not None:
        _report_errors(
            plot_file, lambda: _plot(pyplot, rows, f"{without_password(url)}, blocks of {block_bytes}", plot_file)
        )
    return all(row.gib_s for row in rows)


def _room(blocks: int, block_bytes: int) -> str:
    """Say what the largest combination needs. Its blocks are deleted after each round, where the connector can."""
    size = blocks * block_bytes / (1 << 20)
    return f"needs room for {blocks} blocks in the store, {size:,.0f} MiB, and twice as much memory in this process"


def _describe(row: Figure) -> str:
    """Return the bandwidth in words, and the outcomes of blocks that were not moved."""
    failures = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
    return f"{row.operation}: {row.gib_s:.2f} GiB/s{f'; blocks that were not moved: {failures}' if failures else ''}"


def parse_counts(text: str, name: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise SetupError(f"--{name}: {part.strip()!r} is not an integer of at least 1.")
        counts.append(int(part))
    return counts


def _print(rows: Sequence[Figure], url: str, block_bytes: int) -> None:
    console = Console()
    table = Table(box=None, header_style="bold", title=f"{url}, blocks of {block_bytes} bytes", title_justify="left")
    for column in (
        "operation",
        "blocks",
        "at once",
        "GiB/s",
        "memcpy GiB/s",
        "of memcpy",
        "p50 ms",
        "p99 ms",
        "call ms",
        "longest",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        numbers = (f"{row.gib_s:.2f}", f"{row.memcpy_gib_s:.2f}", f"{row.of_memcpy:.2f}", f"{row.p50_ms:.2f}")
        times = (f"{row.p99_ms:.2f}", f"{row.call_p50_ms:.3f}", f"{row.call_max_ms:.3f}")
        table.add_row(row.operation, str(row.blocks), str(row.concurrency), *numbers, *times, str(row.failed or ""))
    (console if console.is_terminal else Console(width=120)).print(table)


def _import_pyplot() -> Any:
    """Import matplotlib, an optional dependency. Called before measuring, to fail early."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        raise SetupError("--plot needs matplotlib, which is not installed: pip install matplotlib.") from None


def _plot(pyplot: Any, rows: Sequence[Figure], title: str, file: str) -> None:
    figure, (bandwidth, latency) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for operation, style in (("store", "--"), ("load", "-")):
        for parallel in sorted({row.concurrency for row in rows}):
            points = [row for row in rows if (row.operation, row.concurrency) == (operation, parallel)]
            x, label = [row.blocks for row in points], f"{operation}, {parallel} at once"
            bandwidth.plot(x, [row.gib_s for row in points], style, marker="o", label=label)
            latency.plot(x, [row.p50_ms for row in points], style, marker="o", label=label)
    copies = sorted({row.blocks: row.memcpy_gib_s for row in reversed(rows)}.items())
    bandwidth.plot(*zip(*copies, strict=True), color="grey", linestyle=":", label="memcpy")
    for axes, what in ((bandwidth, "GiB/s"), (latency, "ms, median of one operation")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("blocks per operation")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
    bandwidth.set_ylim(bottom=0)
    latency.set_yscale("log")
    bandwidth.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _write_text(file: str, text: str, mode: str = "w") -> None:
    with open(file, mode) as out:
        out.write(text)


def _report_errors(file: str, write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be written: {reason(error)}.") from error
