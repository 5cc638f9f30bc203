"""Time from a client's disconnect until all its resources are freed: `python benchmarks/cancel.py`.

A router, a prefill and a decode instance run as processes over `shm://`, with KV of Qwen3-0.6B's size. Clients disconnect
during prefill, at the first token, during the KV transfer, and during decode. Times run from the moment the router detects
the closed connection until an instance holds no work, no transfer and no block of the request.
"""

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import report
import stores
from leftovers import totals
from rich.table import Table

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag, parse_size
from pdserve.kv_transfer.connectors.shm.connector import count_leases
from pdserve.lines.event_stream import read_events_async


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    repeat: int = flag("clients that leave in each state", 50)
    tokens: int = flag("of each prompt", 1024)
    chunk: int = flag("tokens of a prefill chunk at most", 128)


QUICK = {"repeat": 2, "tokens": 256}
EVENTS = {"prefill": 0, "transfer": 1, "decode": 8}  # stream events before the client disconnects
RELEASE_TIMEOUT_S = 30.0  # for an instance to report that it holds nothing


def cancel(settings: Settings) -> None:
    """Cancel requests in every state, and measure the time until their resources are freed."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as folder, stores.shm(parse_size("1GiB")) as url:
        config = UpConfig(
            model=str(checkpoints.make(checkpoints.WIDE_KV, Path(folder) / "model")),
            port=free_port(),
            prefill=1,
            decode=1,
            local_prefill_tokens=0,
            num_blocks=256,
            max_num_batched_tokens=settings.chunk,
            connector=url,
        )
        with Deployment(config, lambda _: None) as deployment:
            deployment.wait_ready()
            rows = asyncio.run(_rows(deployment, settings))
            left = _left(deployment) | {"leases in the store": count_leases(url)}
    table = Table("left during", "instance", "clients", "p50 ms", "p99 ms", "max ms", show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row.values()))
    report.show(table)
    print("left: " + ", ".join(f"{value:g} {name}" for name, value in left.items()))
    print(report.write("cancel", settings, {"rows": rows, "left": left}))


async def _rows(deployment: Deployment, settings: Settings) -> list[dict[str, Any]]:
    drawn, samples = random.Random(0), dict[tuple[str, str], list[float]]()
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60.0) as http:
        for number in range(settings.repeat + 1):  # the first request warms up
            for state in EVENTS:
                for instance, ms in (await _leave(http, deployment.config.name, state, settings, drawn)).items():
                    samples.setdefault((state, instance), []).extend([ms] if number else [])
    return [
        {
            "left during": state,
            "instance": instance,
            "clients": len(took),
            **{
                name: round(took[int(share * (len(took) - 1))], 1)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
            },
        }
        for (state, instance), values in samples.items()
        if (took := sorted(values))
    ]


async def _leave(
    http: httpx.AsyncClient, model: str, state: str, settings: Settings, drawn: random.Random
) -> dict[str, float]:
    """Return the milliseconds until each instance released the request, unless it had finished it before."""
    name, events = f"cancel-{drawn.getrandbits(64):x}", EVENTS[state]
    body = {"model": model, "prompt": [drawn.randrange(250) for _ in range(settings.tokens)], "max_tokens": 500}
    body |= {"stream": True, "ignore_eos": True}

    async def read() -> None:
        async with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as reply:
            seen = read_events_async(reply.aiter_bytes())
            for _ in range(events):
                await anext(seen)

    reading = asyncio.create_task(read())
    if not events:
        while "prefill_started" not in (await _timeline(http, name))["stages_ms"]:
            await asyncio.sleep(0.005)
        reading.cancel()
    await asyncio.wait([reading])
    give_up = time.monotonic() + RELEASE_TIMEOUT_S
    while "decode-0" not in (await _timeline(http, name))["released_ms"]:
        assert time.monotonic() < give_up, f"{name} is still held"
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # prefill may report a release too
    told: dict[str, float] = (await _timeline(http, name))["released_ms"]
    return told


async def _timeline(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    reply = await http.get(f"/debug/requests/{name}")
    found: dict[str, Any] = reply.json()
    return found if reply.status_code == 200 else {"stages_ms": {}, "released_ms": {}}


def _left(deployment: Deployment) -> dict[str, float]:
    """Return what the instances still hold; the counters arrive with heartbeats."""
    time.sleep(1.0)
    found = totals(deployment)
    names = ("kv_cache_blocks_held", "num_requests_running", "kv_transfer_bytes_in_flight", "kv_transfer_bytes_waiting")
    return {name: found[f"pdserve_{name}"] for name in names}


if __name__ == "__main__":
    report.main(command_from_config(Settings, cancel))
