"""Utilisation of KV memory: `python benchmarks/memory.py`.

The engine's scheduler and block pool serve requests of real lengths, all waiting from the start, with a model that takes no
time. After each step, the memory held by requests is compared with the number of tokens in it. For comparison, the same
requests run with the reservations of engines without paging, one contiguous run of slots per request:

    max            as many slots as the longest allowed request
    power of two   the next power of two above the request's final length, which real systems do not know
    oracle         exactly the request's final length, likewise unknown

Gaps between the runs are not counted as waste.

With prefill and decode on instances of their own, the simulator plays the same requests, and waste is what the instances'
gauges say ten times a second: empty blocks, and the ends of last blocks. With one prefill instance, prefill is the bottleneck
of the traces with long prompts and short answers; with eight, decode is.
"""

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from lengths import RESERVATIONS, Contiguous, Request, answer, sequence
from rich.console import Console

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, InstanceConfig, flag
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel
from pdserve.tools.bench.requests import Request as SimulatedRequest
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import MODEL, Deployment, Simulation

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    traces: str = flag("files in traces/, comma separated; default: all", "")
    requests: int = flag("of each trace", 1500)
    handed_over: int = flag("requests of each trace with prefill and decode on instances of their own", 200)
    longest: int = flag("how many of the longest requests the memory could hold", 16)
    block_size: int = flag("tokens of a block", EngineConfig.block_size)
    max_num_batched_tokens: int = flag("tokens in one step at most", EngineConfig.max_num_batched_tokens)


QUICK = {"traces": "azure-conv-2023", "requests": 60, "handed_over": 30, "longest": 4}
TOKEN_BYTES = 320 * 1024
PROFILE = Profile(
    model="70B",
    engine=EngineFacts(16, 16 * TOKEN_BYTES, 37_500, 8192, 64, 131_072),
    step=StepModel(decode=((1, 0.015), (64, 0.028)), context_s=4e-8, prefill=((1, 0.015), (8192, 0.83)), pair_s=1e-9),
    transfers={"rdma": TransferModel(1e-3, 2e10, 1e-3, 2e10, 4e11)},
)
FLEETS = (1, 1), (8, 1)  # prefill and decode instances


@dataclass
class Moment:
    """One step: requests with memory, slots held, and tokens whose KV is in them."""

    requests: int
    slots: int
    tokens: int


def benchmark(settings: Settings) -> None:
    """Measure the unused share of KV memory, with paging and with contiguous reservation."""
    settings = settings.sized(QUICK)
    names = settings.traces.split(",") if settings.traces else sorted(path.stem for path in TRACES.glob("*.csv"))
    rows, handed_over = [], []
    with Console(stderr=True).status("simulating") as status:
        for name in names:
            requests = _read(name)[: settings.requests]
            longest = max(request.final for request in requests)
            slots = -(-settings.longest * longest // settings.block_size) * settings.block_size
            for policy in (*RESERVATIONS, "paged"):
                status.update(f"{name}: {policy}")
                moments = _paged(requests, slots, settings)
                if policy in RESERVATIONS:
                    sizes = [min(RESERVATIONS[policy](one, longest), slots) for one in requests]
                    moments = _contiguous(requests, sizes, slots, settings)
                rows.append(_row(name, policy, slots, list(moments)))
            for prefill, decode in FLEETS:
                status.update(f"{name}: {prefill}P+{decode}D")
                handed_over += _hand_over(name, requests[: settings.handed_over], slots, prefill, decode, settings)
    report.show([_shown(row) for row in rows])
    report.show(handed_over)
    print(report.write("memory", settings, {"published": PUBLISHED, "rows": rows, "handed_over": handed_over}))


# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, figure 2.
PUBLISHED = {"max": 79.6, "power of two": 73.2, "oracle": 61.8, "paged": 3.7}


def _read(name: str) -> list[Request]:
    with (TRACES / f"{name}.csv").open() as file:
        return [Request(int(row["input"]), max(1, int(row["output"]))) for row in csv.DictReader(file)]


def _paged(requests: list[Request], slots: int, settings: Settings) -> Iterator[Moment]:
    """Run our scheduler and pool with a model that answers every step at once."""
    size = settings.block_size
    pool = BlockPool(slots // size, size)
    scheduler = Scheduler(pool, max_num_seqs=len(requests), max_num_batched_tokens=settings.max_num_batched_tokens)
    for i, request in enumerate(requests):
        scheduler.add(sequence(i, request.input, request.output, size))
    while scheduler.waiting or scheduler.running:
        for seq, count in scheduler.schedule().plan.counts.items():
            seq.kv.mark_computed(count)
        holding = [seq for seq in scheduler.sequences() if seq.kv.block_ids]
        yield Moment(len(holding), pool.num_held * size, sum(seq.kv.num_computed for seq in holding))
        for _ in answer(scheduler, holding):
            pass
    pool.check_integrity()


def _hand_over(
    name: str, requests: list[Request], slots: int, prefill: int, decode: int, settings: Settings
) -> list[dict[str, Any]]:
    """Play the requests, all at once, to a simulated fleet whose decode instances have memory for `slots` tokens each."""
    size = settings.block_size
    model = InstanceModel.from_profile(PROFILE, "rdma", num_blocks=slots // size, block_size=size)
    config = InstanceConfig(model=MODEL, max_num_batched_tokens=settings.max_num_batched_tokens)
    simulation = Simulation(Deployment(prefill, decode, instance=config), model)
    moments: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}

    def sample() -> None:
        for one in simulation.instances.values():
            one.catch_up()
            moments[one.hello.role].append(dict(one.thread.reporter.heartbeat.counters))

    simulation.clock.every(0.1, sample)
    simulation.play([SimulatedRequest(i, one.output, ((str(i), one.input),), at=0.0) for i, one in enumerate(requests)])
    rows = []
    for role, counters in moments.items():
        steady = counters[len(counters) // 4 : -(len(counters) // 4)]
        total = {key: sum(moment[f"kv_cache_{key}"] for moment in steady) for key in GAUGES}
        held = max(1.0, total["blocks_held"])
        rows.append(
            {
                "trace": name,
                "fleet": f"{prefill}P+{decode}D",
                "instances": role,
                "wasted_percent": round(100 * (total["blocks_empty"] + total["slots_behind_kv"] / size) / held, 2),
                "empty_percent": round(100 * total["blocks_empty"] / held, 2),
                "promised_percent": round(100 * total["blocks_promised"] / held, 2),
                "held_percent": round(100 * total["blocks_held"] / total["blocks"], 2),
            }
        )
    return rows


GAUGES = "blocks", "blocks_held", "blocks_empty", "blocks_promised", "slots_behind_kv"


def _contiguous(requests: list[Request], sizes: list[int], slots: int, settings: Settings) -> Iterator[Moment]:
    server = Contiguous(requests, sizes, slots, settings.max_num_batched_tokens)
    server.waiting.extend(range(len(requests)))
    while server.waiting or server.computed:
        server.step()
        yield Moment(len(server.computed), server.reserved, sum(server.computed.values()))
        server.end()


def _row(name: str, policy: str, slots: int, moments: list[Moment]) -> dict[str, Any]:
    """Summarise the steps of the middle half, in which there is a queue and no start or end effect."""
    steady = moments[len(moments) // 4 : -(len(moments) // 4) or None]
    wasted = 1 - sum(moment.tokens for moment in steady) / sum(moment.slots for moment in steady)
    return {
        "trace": name,
        "reservation": policy,
        "slots": slots,
        "steps": len(moments),
        "wasted_percent": round(100 * wasted, 2),
        "requests_at_once": round(statistics.mean(moment.requests for moment in steady), 1),
        "used_percent": round(100 * statistics.mean(moment.tokens / slots for moment in steady), 2),
    }


def _shown(row: dict[str, Any]) -> dict[str, str]:
    return {
        "trace": row["trace"],
        "reservation": row["reservation"],
        "wasted": f"{row['wasted_percent']:.1f} %",
        "published": f"{PUBLISHED[row['reservation']]:.1f} %",
        "requests at once": f"{row['requests_at_once']:.1f}",
        "of all memory used": f"{row['used_percent']:.1f} %",
        "steps": f"{row['steps']:,}",
    }


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
