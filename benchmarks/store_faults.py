"""Latency of requests while Redis hangs (SIGSTOP) or is gone (SIGKILL), beside healthy phases of the same run.

`python benchmarks/store_faults.py`. A router, a prefill and a decode instance serve the demo model. Requests come one at a
time, with prompts that are handed over and begin differently, so no KV is reused.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import report
import stores
from rich.table import Table

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag, parse_size

WARM_UP = 10  # requests
PROMPT_TOKENS = 400
OUTPUT_TOKENS = 16
COLUMNS = ("Redis", "answers", "p50 ms", "p99 ms", "max ms", "p50 / healthy p50")


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("in each phase", 300)


QUICK = {"requests": 4}


def store_faults(settings: Settings) -> None:
    """Serve requests with a healthy, a hanging, a healthy, a killed and a restarted Redis."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory(prefix="pdserve-benchmark-") as folder:
        server = stores.RedisServer(folder, parse_size("1GiB"))
        config = UpConfig(
            model="demo",
            port=free_port(),
            local_prefill_tokens=0,
            threads=1,
            num_blocks=1024,
            connector=f"redis://127.0.0.1:{server.port}/0",
        )
        try:
            with Deployment(config, lambda _: None) as deployment:
                deployment.wait_ready()
                rows = asyncio.run(_rows(deployment.url, server, settings.requests))
        finally:
            server.process.send_signal(signal.SIGCONT)  # does nothing once it has ended
            server.kill()
    table = Table(*COLUMNS, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row.values()))
    report.show(table)
    print(report.write("store_faults", settings, {"rows": rows}))


async def _rows(url: str, server: stores.RedisServer, requests: int) -> list[dict[str, Any]]:
    phases: list[tuple[str, Callable[[], None]]] = [
        ("healthy", lambda: None),
        ("stopped", lambda: server.process.send_signal(signal.SIGSTOP)),
        ("continued", lambda: server.process.send_signal(signal.SIGCONT)),
        ("killed", server.kill),
        ("restarted", server.start),
    ]
    rows, healthy = list[dict[str, Any]](), 0.0
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as http:
        for number in range(WARM_UP):
            await _serve(http, len(phases), number)
        for phase, (name, change) in enumerate(phases):
            change()
            times = sorted([await _serve(http, phase, number) for number in range(requests)])
            p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
            healthy = healthy or p50
            milliseconds = [f"{1e3 * seconds:.0f}" for seconds in (p50, p99, times[-1])]
            rows.append(dict(zip(COLUMNS, [name, len(times), *milliseconds, f"{p50 / healthy:.2f}"], strict=True)))
    return rows


async def _serve(http: httpx.AsyncClient, phase: int, number: int) -> float:
    """Return the seconds that a request took, which must be answered in full."""
    prompt = [100 + phase, number % 200, number // 200, *((number + i * 7) % 200 for i in range(PROMPT_TOKENS))]
    started = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = await http.post("/v1/completions", json=body)
    seconds = time.perf_counter() - started
    assert reply.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS, reply.text
    return seconds


if __name__ == "__main__":
    report.main(command_from_config(Settings, store_faults))
