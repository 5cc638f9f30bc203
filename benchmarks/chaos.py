"""A deployment under load while its parts fail at random, one or two or all at once: `scripts/chaos`, for 15 minutes.

Every request is first sent without faults. Later answers must have exactly the same tokens and, where asked for, log
probabilities, and interrupted ones a prefix of them; none may end with an error but for a full queue (429). At the end, no
resource may be held. With --no-faults, processes and tiers of the store may not have grown either:
`scripts/chaos --no-faults --store tiered`.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import report
from leftovers import Counts, Growth, allowed, settled, totals
from monkey import FaultInjector
from stage import LEASE_S, ChaosDeployment, Make, Stage, stage
from traffic import WHOLE, Traffic

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    seconds: float = flag("how long faults come, or without them the load", 900.0)
    pairs: float = flag("share of faults that come with another one at once", 0.5)
    every: float = flag("seconds between two faults, on average", 3.0)
    lasting: float = flag("seconds that freezes, cuts and restarts of the store last, at most", 4.0)
    clients: int = flag("requests under way", 8)
    cases: int = flag("different requests", 64)
    pause: float = flag("seconds until a client asks again, on average", 0.0)
    deadline: float = flag("seconds that a request may take", 120.0)
    store: str = flag(
        "where KV blocks go: redis, shm, or tiered, over these and files, with little room in each", "redis"
    )
    faults: bool = flag("let faults come; without them, look whether anything grows", True)
    model: str = flag("checkpoint directory; default: a random one of Qwen3's kind", "")
    dtype: str = flag("of the model and its KV: bfloat16, float16, float32", "bfloat16")
    tensor_parallel_size: int = flag("ranks of each instance; with 2, one of the faults is to kill the second one", 1)
    async_scheduling: str = flag("of the instances: auto, on, off", "auto")
    speculate: str = flag("of the instances: suffix, ngram, auto, off", "suffix")
    quantization: str = flag("of the weights as they are loaded: none, int8, int4", "none")
    kv_cache_dtype: str = flag("of the KV: auto, int8", "auto")
    adapters: int = flag("low-rank adapters, one of which most requests name, with slots for a third of them", 0)
    seed: int = flag("of the order of faults, and of the requests", 0)


QUICK = {"seconds": 60.0, "every": 1.5, "lasting": 2.5, "clients": 4, "cases": 12, "pause": 0.1}
EXPECTED_EXITS = (
    "SIGKILL",
    "exit code 0",
    "exit code 2",
)  # killed, drained, started while the store or the network was out
LOST_RANK_EXIT = "exit code 70"
ENDED = re.compile(r"\[(\S+)\] exited \((.+)\)")
MOVED = re.compile(r"(chaos-\d+)\S* migrated to ")
COUNTED = (
    "migrations_total",
    "fallbacks_total",
    "instances_lost_total",
    "requests_total",
    "prompt_tokens_by_source",
    "spec_",
)


def chaos(settings: Settings) -> None:
    """Serve under load while instances, network and store fail at random, and verify all tokens and resources."""
    settings = settings.sized(QUICK)
    if settings.store not in ("redis", "shm", "tiered"):
        raise SetupError(f"--store is redis, shm or tiered, not {settings.store!r}")
    shown = play(settings)
    log = shown.pop("log")
    _print(shown)
    path = report.write("chaos", settings, shown)
    print(path)
    if broken(shown["verdicts"]):
        path.with_suffix(".log").write_text("\n".join(log))
        print(path.with_suffix(".log"))
        raise SystemExit(1)


def play(settings: Settings, make: Make = ChaosDeployment) -> dict[str, Any]:
    """Run the benchmark and return the content of its JSON report."""
    of_instances: dict[str, Any] = {
        "model": settings.model,
        "async_scheduling": settings.async_scheduling,
        "speculate": settings.speculate,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "adapters": settings.adapters,
    }
    with stage(settings.store, settings.dtype, make, settings.tensor_parallel_size, **of_instances) as at:
        traffic, monkey = Traffic(at.deployment.url, at.deployment.config.name, settings), FaultInjector(at, settings)
        growth = None if settings.faults else Growth(at)
        meanwhile = monkey.inject if growth is None else partial(growth.watch, settings.seconds)
        before, left, after, seconds = asyncio.run(_play(at, traffic, meanwhile))
        counters = totals(at.deployment)
    ended = [match for match in map(ENDED.search, at.log_lines) if match is not None]
    moved = {match[1] for match in map(MOVED.search, at.log_lines) if match is not None}
    expected = EXPECTED_EXITS if settings.tensor_parallel_size == 1 else (*EXPECTED_EXITS, LOST_RANK_EXIT)
    none: dict[str, float] = {
        "requests that ended wrong, or not at all": len(traffic.defects),
        "requests that were lost": sum(n for end, n in traffic.ends.items() if end.startswith("503")),
        **left,
        **at.left(),
        "instances that ended by themselves": sum(match[2] not in expected for match in ended),
        "tracebacks in logs": sum("Traceback" in line for line in at.log_lines),
    }
    if growth is None:
        none["kinds of faults that did not come"] = len(monkey.missing)
    else:
        none["corrupt blocks"] = counters["pdserve_kv_transfer_failures_total corrupt"]
    verdicts = [{"what": name, "may be": 0, "is": value} for name, value in none.items()]
    verdicts += [{"what": name, "may be": allowed(name, before[name]), "is": value} for name, value in after.items()]
    verdicts += [] if growth is None else growth.verdicts()
    shown = {
        "seconds": seconds,
        "faults": dict(sorted(monkey.done.items())),
        "ends": dict(sorted(traffic.ends.items())),
        "whole_answer_s": _spread(traffic.seconds),
        "longest_pause_s": _spread(traffic.pauses.values()),
        "longest_pause_of_moved_s": _spread(pause for name, pause in traffic.pauses.items() if name in moved),
        "moved_streams": len(moved & traffic.pauses.keys()),
        "verdicts": verdicts,
    }
    metrics = {name: n for name, n in sorted(counters.items()) if any(one in name for one in COUNTED)}
    details = {"metrics": metrics, "left_out": at.left_out, "defects": traffic.defects, "fault_log": monkey.log}
    return shown | {"table": _summary(shown)} | details | {"log": at.log_lines}


async def _play(
    at: Stage, traffic: Traffic, meanwhile: Callable[[], Awaitable[None]]
) -> tuple[Counts, Counts, Counts, float]:
    """Return the footprint before, the leak counters and footprint after, and the duration in seconds."""
    await traffic.learn()
    left, before = await settled(at, LEASE_S / 2)  # too short for leases to expire
    assert not any(left.values()), left
    over, started = asyncio.Event(), time.monotonic()
    tending, asking = asyncio.create_task(_tend(at.deployment)), asyncio.create_task(traffic.run(over))
    await meanwhile()
    over.set()
    await asking
    tending.cancel()
    took = time.monotonic() - started
    return before, *await settled(at, before=before), took


async def _tend(deployment: ChaosDeployment) -> None:
    while True:
        deployment.check_children()
        await asyncio.sleep(0.1)


def broken(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [verdict for verdict in verdicts if verdict["is"] > verdict["may be"]]


def _spread(values: Any) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 3) for name, share in shares.items()}


def _summary(shown: dict[str, Any]) -> dict[str, str]:
    """Return the rows of the summary table."""
    ends, pause, moved = Counter(shown["ends"]), shown["longest_pause_s"], shown["longest_pause_of_moved_s"]
    faults = [f"{n:,} {name.split()[0]}" for name, n in shown["faults"].items() if name.endswith(" done")]
    others = [f"{n:,} {end}" for end, n in ends.items() if end not in (*WHOLE, "cancelled")]
    left = [f"{one['is']:g} {one['what']}" for one in shown["verdicts"] if one["may be"] == 0]
    grown = [one["what"] for one in shown["verdicts"] if one["is"] > one["may be"] > 0]
    return {
        "faults": ", ".join(faults),
        "answers with exactly the tokens of a fault-free run": f"{sum(ends[end] for end in WHOLE):,}",
        "left by their clients, exact up to there": f"{ends['cancelled']:,}",
        "ended otherwise": ", ".join(others) or "0",
        "longest pause in a stream": f"{pause['max']:.2f} s",
        "streams that moved, exact": f"{shown['moved_streams']:,}",
        "longest pause of a stream that moved, p50 / p99": f"{moved['p50']:.2f} s / {moved['p99']:.2f} s",
        "at the end": ", ".join(left),
        "grown beyond what was there before": ", ".join(grown) or "none",
    }


def _print(shown: dict[str, Any]) -> None:
    print(f"| {shown['seconds'] / 60:.1f} minutes | |\n|---|---|")
    for row in shown["table"].items():
        print("| {} | {} |".format(*row))
    for kind, why in shown["left_out"].items():
        print(f"no {kind}: {why}")
    for verdict in broken(shown["verdicts"]):
        print("DOES NOT HOLD: {what} may be {may be:g} and is {is:g}".format(**verdict))
    for defect in shown["defects"][:10]:
        print(defect)


if __name__ == "__main__":
    report.main(command_from_config(Settings, chaos))
