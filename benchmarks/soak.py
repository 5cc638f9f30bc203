"""Mixed traffic for a long time, with evictions in every tier: `python benchmarks/soak.py`, for 20 minutes.

One prefill and two decode instances with small pools share `tiered://shm,file,redis`, each tier with little room. Clients
send chats of several turns, long and short prompts, greedy and sampled, streaming and not; some disconnect early, and all
pause between requests, so that instances become idle and check their pools. Every few seconds, memory, file descriptors,
threads and the sizes of the stores are recorded. At the end none may have grown, and the counters must agree with the
clients' records.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import report
import stores
from leftovers import totals
from rich.console import Console

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag, parse_size
from pdserve.lines.event_stream import read_events_async

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    minutes: float = flag("how long", 20.0)
    clients: int = flag("requests under way at a time, at most", 8)
    pause: float = flag("seconds that a client waits before its next request, on average", 0.2)
    every: float = flag("seconds between two samples", 5.0)
    blocks: int = flag("of each pool", 120)
    tier_size: str = flag("what each tier may take", "2MiB")
    seed: int = flag("of the traffic", 0)


QUICK = {"minutes": 0.3, "every": 1.0, "pause": 0.05}
IDLE_EVERY_S = 20.0  # all clients pause together, so that instances become idle and check their pools
IDLE_S = 2.0
SETTLE_S = 20.0
TIMEOUT_S = 120.0
# Tolerances for random growth: allocator arenas, log buffers, connections of short-lived clients.
SLACK_BYTES, SLACK_SHARE, SLACK_FILES = 8 * MIB, 0.03, 12


@dataclass
class Traffic:
    """Results recorded by the clients.

    Attributes:
        ends: requests by outcome: a finish reason, or `cancelled`.
        answers: distinct greedy answers to the one prompt that is sent repeatedly. There must be exactly one.
    """

    ends: Counter[str] = field(default_factory=Counter)
    answers: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)


def soak(settings: Settings) -> None:
    """Run mixed traffic for a long time, and verify that nothing grows, leaks, or is counted wrong."""
    settings = settings.sized(QUICK)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        status = stack.enter_context(Console(stderr=True).status("starting"))
        deployment, kept = stack.enter_context(_deployment(settings, folder))
        traffic, samples = asyncio.run(_run(deployment, kept, settings, status.update))
        counters = _settled(deployment)
    verdicts = [*_flat(samples), *_consistent(traffic, counters)]
    _print(verdicts, traffic)
    shown = {"verdicts": verdicts, "ends": dict(traffic.ends), "counters": counters, "samples": samples}
    path = report.write("soak", settings, shown)
    print(path)
    if not all(verdict["holds"] for verdict in verdicts):
        raise SystemExit(1)


@contextmanager
def _deployment(settings: Settings, folder: Path) -> Iterator[tuple[Deployment, dict[str, str]]]:
    """Yield the deployment, and the locations of the tiers' blocks."""
    size = parse_size(settings.tier_size)
    model = checkpoints.make(checkpoints.TINY, folder / "model")
    with stores.shm(size) as shm, stores.redis("redis://127.0.0.1:{port}/0", 4 * size) as redis:
        files = folder / "kv"
        config = UpConfig(
            model=str(model),
            dtype="float32",
            port=free_port(),
            prefill=1,
            decode=2,
            local_prefill_tokens=0,
            num_blocks=settings.blocks,
            max_num_batched_tokens=128,
            connector=f"tiered://?buffer=1MiB,{shm},file://{files}?max_bytes={size},{redis}",
        )
        with Deployment(config, lambda _: None) as deployment:
            deployment.wait_ready()
            yield deployment, {"shm": shm.removeprefix("shm://").partition("?")[0], "file": str(files)}


# ---- traffic ----------------------------------------------------------------------------------------------------------


async def _run(
    deployment: Deployment, kept: dict[str, str], settings: Settings, say: Any
) -> tuple[Traffic, list[dict[str, Any]]]:
    traffic, samples = Traffic(), list[dict[str, Any]]()
    started = time.monotonic()
    end = started + 60 * settings.minutes
    async with httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S) as http, asyncio.TaskGroup() as group:
        for i in range(settings.clients):
            chosen = random.Random(f"{settings.seed}/{i}")
            group.create_task(_client(http, deployment.config.name, chosen, settings.pause, end, traffic))
        while time.monotonic() < end:
            deployment.check_children()
            samples.append({"seconds": round(time.monotonic() - started, 1), **_sample(deployment, kept)})
            say(f"{(end - time.monotonic()) / 60:.1f} minutes left, {sum(traffic.ends.values())} requests so far")
            await asyncio.sleep(settings.every)
    return traffic, samples


async def _client(
    http: httpx.AsyncClient, model: str, chosen: random.Random, pause: float, end: float, traffic: Traffic
) -> None:
    kinds = [_chat, _long, _short, _sampled, _disconnects, _repeated]
    while time.monotonic() < end:
        if time.monotonic() % IDLE_EVERY_S < IDLE_S:
            await asyncio.sleep(IDLE_S)
        await chosen.choice(kinds)(http, model, chosen, traffic)
        await asyncio.sleep(chosen.uniform(0, 2 * pause))


async def _chat(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    prompt = _tokens(chosen, 60)
    for _ in range(3):
        answer = await _complete(http, traffic, model=model, prompt=prompt, max_tokens=20)
        prompt = [*prompt, *answer, *_tokens(chosen, 25)]


async def _long(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    await _complete(http, traffic, model=model, prompt=_tokens(chosen, chosen.randrange(300, 800)), max_tokens=10)


async def _short(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    await _complete(http, traffic, model=model, prompt=_tokens(chosen, chosen.randrange(1, 40)), max_tokens=30)


async def _sampled(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    prompt = _tokens(chosen, chosen.randrange(10, 200))
    await _complete(
        http, traffic, model=model, prompt=prompt, max_tokens=20, temperature=1.0, seed=chosen.randrange(99)
    )


async def _repeated(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    answer = await _complete(http, traffic, model=model, prompt=[i % 250 for i in range(333)], max_tokens=30)
    traffic.answers.add(" ".join(map(str, answer)))


async def _disconnects(http: httpx.AsyncClient, model: str, chosen: random.Random, traffic: Traffic) -> None:
    """Disconnect after the first few tokens, or before."""
    body = {"model": model, "prompt": _tokens(chosen, 150), "max_tokens": 300, "ignore_eos": True, "stream": True}
    stay = chosen.randrange(4)
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for _ in read_events_async(reply.aiter_bytes()):
            stay -= 1
            if stay < 0:
                break
    traffic.ends["cancelled"] += 1


async def _complete(http: httpx.AsyncClient, traffic: Traffic, **body: Any) -> list[int]:
    reply = await http.post("/v1/completions", json={"temperature": 0, "return_token_ids": True, **body})
    if reply.status_code != 200:
        traffic.complaints.append(f"{reply.status_code}: {reply.text[:200]}")
        await asyncio.sleep(1)
        return []
    choice = reply.json()["choices"][0]
    traffic.ends[choice["finish_reason"]] += 1
    tokens: list[int] = choice["token_ids"]
    return tokens


def _tokens(chosen: random.Random, count: int) -> list[int]:
    return [chosen.randrange(250) for _ in range(count)]


# ---- samples and verdicts ------------------------------------------------------------------------------------------------


def _sample(deployment: Deployment, kept: dict[str, str]) -> dict[str, float]:
    sample: dict[str, float] = {}
    for child in deployment.children:
        sample |= {f"{child.name} {name}": value for name, value in _process(child.pid).items()}
    segments = [path for path in Path("/dev/shm").iterdir() if kept["shm"] in path.name]
    sample["shm tier bytes"] = sum(path.stat().st_blocks * 512 for path in segments)
    sample["file tier bytes"] = sum(_sizes(kept["file"]))
    return sample


def _sizes(root: str) -> Iterator[int]:
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):  # files may vanish meanwhile
                yield os.stat(f"{folder}/{name}").st_size


def _process(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory bytes": int(status["RssAnon"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def _settled(deployment: Deployment) -> dict[str, float]:
    """Return the relevant counters once no request is running."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = totals(deployment)
        busy = found["pdserve_kv_cache_blocks_held"] or found["pdserve_num_requests_running"]
        if not busy or time.monotonic() > deadline:
            keep = ["requests_total", "blocks_held", "num_requests", "preempt", "failures", "in_flight", "by_source"]
            keep += ["lost_total", "migrations", "fallbacks", "integrity", "transfer_blocks"]
            return {name: value for name, value in sorted(found.items()) if any(part in name for part in keep)}
        time.sleep(0.2)


def _flat(samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Check that each quantity's median over the last quarter exceeds that over the second one only by random variation."""
    quarter = max(1, len(samples) // 4)
    for name in samples[0]:
        if name == "seconds":
            continue
        before = statistics.median(sample[name] for sample in samples[quarter : 2 * quarter])
        after = statistics.median(sample[name] for sample in samples[-quarter:])
        slack = max(SLACK_BYTES, SLACK_SHARE * before) if name.endswith("bytes") else SLACK_FILES
        yield {"what": f"{name} flat", "before": before, "after": after, "holds": after <= before + slack}


def _consistent(traffic: Traffic, counters: dict[str, float]) -> Iterator[dict[str, Any]]:
    def verdict(what: str, expected: float, found: float, holds: bool | None = None) -> dict[str, Any]:
        return {
            "what": what,
            "before": expected,
            "after": found,
            "holds": expected == found if holds is None else holds,
        }

    counted = {
        name.removeprefix("pdserve_requests_total "): value
        for name, value in counters.items()
        if name.startswith("pdserve_requests_total ")
    }
    yield verdict("requests seen by clients and by the router", sum(traffic.ends.values()), sum(counted.values()))
    for reason in ("stop", "length"):
        # A client that disconnects after the complete answer has not cancelled it.
        seen, found = traffic.ends[reason], counted.get(reason, 0)
        yield verdict(f"of these {reason}", seen, found, seen <= found <= seen + traffic.ends["cancelled"])
    yield verdict("errors", 0, len(traffic.complaints) + counted.get("error", 0))
    yield verdict("answers to the known prompt", 1, len(traffic.answers))
    for name in ("kv_cache_blocks_held", "num_requests_running", "num_requests_waiting", "instances_lost_total"):
        yield verdict(name, 0, counters.get(f"pdserve_{name}", 0))
    yield verdict("blocks corrupt", 0, counters.get("pdserve_kv_transfer_failures_total corrupt", 0))
    checks = counters.get("pdserve_integrity_checks_total", 0)
    yield verdict("looks at idle pools", 1, checks, checks >= 1)


def _print(verdicts: list[dict[str, Any]], traffic: Traffic) -> None:
    columns = {"second quarter, or expected": "before", "last quarter, or found": "after"}
    shown = [
        {"what": verdict["what"]}
        | {column: f"{verdict[side]:,.0f}" for column, side in columns.items()}
        | {"holds": "yes" if verdict["holds"] else "NO"}
        for verdict in verdicts
    ]
    report.show(shown)
    for complaint in traffic.complaints[:10]:
        print(complaint)


if __name__ == "__main__":
    report.main(command_from_config(Settings, soak))
