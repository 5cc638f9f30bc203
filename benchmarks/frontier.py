"""Throughput, TTFT and ITL of all arrangements of a few instances, simulated: `python benchmarks/frontier.py`.

The mixes of pd.py, each in a closed loop of clients that send a request once they have the answer to the last one, on every
split into prefill and decode instances and on colocated instances, with the settings that move time from one figure to
another: `--itl-target-ms`, and for splits `--local-prefill-tokens` and `--ttft-target-ms`. On the frontier is what no other
arrangement of as many instances beats in all three of output tokens per second, TTFT p50 and ITL p99. Instances are those of
forecast.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import report
from forecast import PROFILE
from rich.table import Table

from pdserve.bench.requests import Request
from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.load_config import FleetConfig
from pdserve.simulator.fleet import Fleet, deployment_of, instance_model
from pdserve.simulator.simulation import Simulation

MIXES = {
    "long-prompts": (1500, 64),
    "balanced": (600, 100),
    "long-answers": (200, 128),
}  # tokens in, in the mean, and out
FIGURES = {"output_tok_per_s": "output tok/s", "ttft_ms_p50": "TTFT p50 ms", "itl_ms_p99": "ITL p99 ms"}
ITL_SHARE = 0.5  # of the ITL p99 of colocated instances, which a split should have at most
EQUAL = 0.02  # by which figures of equal fleets differ from seed to seed


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    mixes: str = flag("of long-prompts, balanced and long-answers", ",".join(MIXES))
    sizes: str = flag("numbers of instances", "2,4")
    clients: int = flag("requests under way at a time, for each instance", 8, least=1)
    requests: int = flag("of each client", 20, least=2)
    itl_targets: str = flag("values of --itl-target-ms, beside none", "60,100")
    ttft_targets: str = flag("values of --ttft-target-ms, of splits with an ITL target", "300,1000")
    seeds: int = flag("with which each arrangement is simulated; figures are means", 3, least=1)


def arrangements(size: int, itl_targets: Sequence[float], ttft_targets: Sequence[float]) -> list[Fleet]:
    """Return colocated instances and splits, with their settings."""
    fleets = [Fleet(both=size, itl_target_ms=target) for target in (None, *itl_targets)]
    for prefill in range(1, size):
        split = Fleet(prefill, size - prefill)
        fleets += [replace(split, settings=(("local_prefill_tokens", 0),)), split]
        fleets += [
            replace(split, itl_target_ms=itl, settings=(("ttft_target_ms", ttft),))
            for itl, ttft in product(itl_targets, ttft_targets)
        ]
    return fleets


def closed_loop(mix: str, clients: int, requests: int, seed: int) -> list[Request]:
    """Return the requests of clients that each wait for an answer before they send the next request."""
    random, (prompt, answer) = Random(seed), MIXES[mix]
    load = list[Request]()
    for index in range(clients * requests):
        size = random.randint(prompt - prompt // 2, prompt + prompt // 2)
        after = index - clients if index >= clients else None
        at = random.random() if after is None else None
        load.append(Request(index, answer, ((f"own-{index}", size),), input_tokens=size, at=at, after=after))
    return load


def simulate(settings: Settings, case: tuple[str, Fleet]) -> dict[str, Any]:
    """Return the figures of a fleet with a mix, in the mean over the seeds. Each client's first request does not count."""
    mix, fleet = case
    config = replace(FleetConfig(block_size=16), **dict(fleet.settings))
    deployment, model = deployment_of(config, PROFILE, fleet), instance_model(config, PROFILE)
    rows = list[Mapping[str, float]]()
    for seed in range(settings.seeds):
        clients = settings.clients * fleet.size
        load = closed_loop(mix, clients, settings.requests, seed)
        samples = Simulation(deployment, model, seed).play(load).samples
        counted = [one for one in samples if one.index >= clients]
        began_at, ended_at = min(one.sent for one in counted), max(one.ended for one in counted)
        gaps = [gap for one in counted for gap in one.itls]
        rows.append(
            {
                "output_tok_per_s": sum(one.output_tokens for one in counted) / (ended_at - began_at),
                "ttft_ms_p50": float(np.median([one.ttft for one in counted])) * 1e3,
                "ttft_ms_p99": float(np.percentile([one.ttft for one in counted], 99)) * 1e3,
                "itl_ms_p50": float(np.median(gaps)) * 1e3,
                "itl_ms_p99": float(np.percentile(gaps, 99)) * 1e3,
            }
        )
    means = {name: round(fmean(row[name] for row in rows), 1) for name in rows[0]}
    return {"mix": mix, "instances": fleet.size, "fleet": str(fleet), "colocated": fleet.both > 0, **means}


def compare(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows of one mix and size, with their ratios to the colocated arrangement with the highest throughput.

    Those are marked that are on the frontier, and those that reach the goal: as good in throughput and TTFT p50 at half of
    the ITL p99.
    """
    throughput, *times = FIGURES
    best = max((row for row in rows if row["colocated"]), key=lambda row: row[throughput])
    for row in rows:
        ratios = {name: round(row[name] / best[name], 2) for name in FIGURES}
        is_reached = ratios[throughput] >= 1 - EQUAL and ratios[times[0]] <= 1 + EQUAL and ratios[times[1]] <= ITL_SHARE
        is_beaten = any(
            other[throughput] > row[throughput] and all(other[name] < row[name] for name in times) for other in rows
        )
        yield row | {"ratios": ratios, "frontier": not is_beaten, "goal": is_reached and not row["colocated"]}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("mix", "fleet", show_edge=False, pad_edge=False)
    for title in (*FIGURES.values(), "frontier", "goal"):
        table.add_column(title, justify="right")
    for row in rows:
        cells = [f"{row[name]:,.0f} ({row['ratios'][name]:.2f})" for name in FIGURES]
        marks = ["yes" if row[name] else "" for name in ("frontier", "goal")]
        table.add_row(row["mix"], row["fleet"], *cells, *marks)
    return table


def benchmark(settings: Settings) -> None:
    """Compare all arrangements of a few instances: throughput, TTFT, ITL."""
    settings = settings.sized({"mixes": "long-answers", "sizes": "2", "clients": 2, "requests": 3, "seeds": 1})
    itl, ttft = (
        [float(each) for each in text.split(",") if each] for text in (settings.itl_targets, settings.ttft_targets)
    )
    if unknown := set(settings.mixes.split(",")) - set(MIXES):
        raise SetupError(f"--mixes: {min(unknown)} is not known; there is: {', '.join(MIXES)}")
    groups = list(product(settings.mixes.split(","), map(int, settings.sizes.split(","))))
    cases = [(mix, fleet) for mix, size in groups for fleet in arrangements(size, itl, ttft)]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(partial(simulate, settings), cases))
    rows = [
        row for group in groups for row in compare([one for one in found if (one["mix"], one["instances"]) == group])
    ]
    report.show(as_table(rows))
    print("in brackets: divided by the colocated arrangement with the highest throughput")
    print(report.write("frontier", settings, {"rows": rows}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
