"""How fast a connector moves blocks, beside a plain copy of the same bytes on the same machine in the same run.

    pdserve connector bench shm://bench?size=1GiB

Each figure comes from three things that take turns until its time is up: the rows are copied within memory, the same rows are
stored under new keys, and loaded by another connector. A machine that is busy for a while is so for all three.

Bandwidth is bytes by the time in which `concurrency` operations together were under way; latency is that of one operation,
from the call to its result. The engine's thread waits for the call itself, which should take microseconds.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.config import parse_size
from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.rules.trial import Instance, Trial, new_keys
from pdserve.kv_transfer.threaded import SWITCH_INTERVAL_S
from pdserve.kv_transfer.url import without_password

GiB = 1 << 30
LEAST_TURNS = 3
Future = Any


@dataclass(frozen=True)
class Figure:
    """One operation at one size. `failed` counts blocks; bandwidth counts only the others."""

    operation: str
    blocks: int  # per operation
    concurrency: int
    gib_s: float
    p50_ms: float
    p99_ms: float
    memcpy_gib_s: float
    of_memcpy: float  # bandwidth by that of the copy
    failed: int
    call_p50_ms: float
    call_max_ms: float


class _Samples:
    """What has been measured of one operation."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.latencies: list[float] = []
        self.calls: list[float] = []  # until each returned
        self.failed = 0

    @property
    def gib_s(self) -> float:
        return self.bytes / self.seconds / GiB if self.seconds else 0.0

    def figure(self, operation: str, blocks: int, concurrency: int, memcpy: "_Samples") -> Figure:
        p50, p99 = (float(np.percentile(self.latencies, p)) * 1000 for p in (50, 99))
        ratio = self.gib_s / memcpy.gib_s
        moved = (operation, blocks, concurrency, self.gib_s, p50, p99, memcpy.gib_s, ratio, self.failed)
        return Figure(*moved, float(np.median(self.calls)) * 1000, max(self.calls) * 1000)


def figures(
    url: str, block_bytes: int, blocks: Sequence[int], concurrency: Sequence[int], seconds: float
) -> Iterator[Figure]:
    """Measures every combination, two figures each."""
    for count in blocks:
        for parallel in concurrency:
            trial = Trial(url, seconds)
            try:
                yield from _measure(trial, block_bytes, count, parallel)
            finally:
                trial.close()


def _measure(trial: Trial, block_bytes: int, count: int, parallel: int) -> Iterator[Figure]:
    total = count * parallel
    source, target = trial.instance(block_bytes, total), trial.instance(block_bytes, total)
    groups = [range(start, start + count) for start in range(0, total, count)]
    memcpy, store, load = _Samples(), _Samples(), _Samples()
    target.rows[:] = source.rows  # touches every page
    give_up = time.perf_counter() + trial.seconds
    turns = -1  # the first one warms up
    while turns < LEAST_TURNS or time.perf_counter() < give_up:
        turns += 1
        samples = (memcpy, store, load) if turns else (_Samples(), _Samples(), _Samples())
        _copy(samples[0], source, target, groups)
        keys = [new_keys(count) for _ in groups]
        for group in keys:
            trial.remember(source.layout, group)
        results = _transfer(samples[1], block_bytes, [_store(source, k, g) for k, g in zip(keys, groups, strict=True)])
        for group, result in zip(keys, results, strict=True):
            source.take_ticket(group, result)
        _transfer(samples[2], block_bytes, [_load(target, k, g) for k, g in zip(keys, groups, strict=True)])
        for group in keys:
            source.connector.release(group)
        trial.tidy(source)
    yield store.figure("store", count, parallel, memcpy)
    yield load.figure("load", count, parallel, memcpy)


def _copy(samples: _Samples, source: Instance, target: Instance, groups: Sequence[range]) -> None:
    for group in groups:
        began = time.perf_counter()
        for row in group:
            target.rows[row] = source.rows[row]
        samples.seconds += time.perf_counter() - began
        samples.bytes += len(group) * source.layout.block_bytes


def _store(one: Instance, keys: Sequence[bytes], rows: range) -> Callable[[], Future]:
    return lambda: one.connector.store(keys, rows, lease_s=60.0)


def _load(one: Instance, keys: Sequence[bytes], rows: range) -> Callable[[], Future]:
    return lambda: one.connector.load(keys, rows, tickets=one.tickets(keys))


def _transfer(samples: _Samples, block_bytes: int, calls: Sequence[Callable[[], Future]]) -> list[Result]:
    began = time.perf_counter()
    ends: dict[int, float] = {}
    futures = []
    starts = []
    for i, call in enumerate(calls):
        starts.append(time.perf_counter())
        future = call()
        samples.calls.append(time.perf_counter() - starts[i])
        future.add_done_callback(lambda _, i=i: ends.__setitem__(i, time.perf_counter()))
        futures.append(future)
    results: list[Result] = [future.result() for future in futures]
    samples.seconds += time.perf_counter() - began
    for i, result in enumerate(results):
        fine = result.outcomes.count(Outcome.OK)
        samples.bytes += fine * block_bytes
        samples.failed += len(result.outcomes) - fine
        samples.latencies.append(ends.get(i, time.perf_counter()) - starts[i])
    return results


# The command.


def run(
    url: str, block_bytes: str, blocks: str, concurrency: str, seconds: float, json_file: str, plot_file: str
) -> None:
    try:
        size = parse_size(block_bytes)
    except ValueError as error:
        raise SetupError(f"--block-bytes: {error}.") from None
    if size % 8 or size < 1024:
        raise SetupError(f"--block-bytes must be a multiple of 8 and at least 1024, not {size}.")
    counts, parallel = parse_counts(blocks, "blocks"), parse_counts(concurrency, "concurrency")
    pyplot = _pyplot() if plot_file else None
    rows: list[Figure] = []
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as instances do
    with Console(stderr=True).status("measuring") as status:
        for row in figures(url, size, counts, parallel, seconds):
            status.update(f"measuring: {row.blocks} blocks, {row.concurrency} at a time")
            rows.append(row)
    data = {"url": without_password(url), "block_bytes": size, "figures": [asdict(row) for row in rows]}
    if json_file == "-":
        print(json.dumps(data, indent=2))
    else:
        _print(rows, without_password(url), size)
    if json_file not in ("", "-"):
        _written(json_file, lambda: _write_text(json_file, json.dumps(data, indent=2) + "\n"))
    if pyplot is not None:
        _written(plot_file, lambda: _plot(pyplot, rows, f"{without_password(url)}, blocks of {block_bytes}", plot_file))


def parse_counts(text: str, name: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise SetupError(f"--{name}: {part.strip()!r} is not a whole number from 1 on.")
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


def _pyplot() -> Any:
    """matplotlib is no dependency: who wants pictures installs it. Asked for before anything is measured."""
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


def _write_text(file: str, text: str) -> None:
    with open(file, "w") as out:
        out.write(text)


def _written(file: str, write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be written: {error}.") from error
