"""The cost of one API key's load to another key: `python benchmarks/fairness.py`.

A router, a prefill and a decode instance run as processes, with the demo model. One key sends a few short requests per second
(*light*), another keeps 96 choices running (*heavy*). Measured in turns: light alone, both, heavy alone, and two heavy
keys of the weights 1 and 3. Latency is compared with that of the light key alone, throughput with the heavy key's alone.
"""

import asyncio
import itertools
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import report

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag
from pdserve.lines.event_stream import read_events_async

KEYS = '[light]\nkey = "light"\n\n[heavy]\nkey = "heavy"\n\n[heavier]\nkey = "heavier"\nweight = 3\n'


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    seconds: float = flag("of each phase", 15.0)
    rounds: int = flag("turns of the phases", 3)
    rate: float = flag("requests per second of the light key", 4.0)
    tokens: int = flag("of each answer to the light key", 16)
    connections: int = flag("of the heavy key", 12)
    choices: int = flag("of each of its requests", 8)


QUICK = {"seconds": 2.0, "rounds": 1}


@dataclass
class Phase:
    """Measurements of a time in which some keys sent requests: latencies of the light key in ms, tokens of the others."""

    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: float = 0.0


def fairness(settings: Settings) -> None:
    """Measure the latency of one key beside the load of another."""
    settings = settings.sized(QUICK)
    phases: defaultdict[str, Phase] = defaultdict(Phase)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        config = UpConfig(model="demo", port=free_port(), prefill=1, decode=1, keys_file=str(keys))
        with Deployment(config, lambda _: None) as deployment:
            deployment.wait_ready()
            asyncio.run(_measure(Clients(deployment.url, settings), phases))
    rows = _rows(phases)
    report.show([{"phase": name} | row for name, row in zip(phases, rows, strict=True)])
    summary = _summary(phases)
    print(", ".join(f"{name}: {value:g}" for name, value in summary.items()))
    print(report.write("fairness", settings, {"phases": dict(zip(phases, rows, strict=True)), "summary": summary}))


async def _measure(clients: "Clients", phases: defaultdict[str, Phase]) -> None:
    await clients.run(Phase(), ["heavy"], light=True, seconds=2.0)  # warms up
    for _ in range(clients.settings.rounds):
        await clients.run(phases["light alone"], [], light=True)
        await clients.run(phases["light and heavy"], ["heavy"], light=True)
        await clients.run(phases["heavy alone"], ["heavy"], light=False)
        await clients.run(phases["weights 1 and 3"], ["heavy", "heavier"], light=False)


class Clients:
    """The clients of all keys."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._url = url
        self.settings = settings
        self._numbers = itertools.count()

    async def run(self, phase: Phase, heavy: list[str], *, light: bool, seconds: float | None = None) -> None:
        """Let the heavy keys reach their load, then measure for some seconds."""
        seconds = seconds or self.settings.seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:
            before, counts = phase.tokens.copy(), phase.tokens
            loads = [self._keep_busy(http, key, counts) for key in heavy for _ in range(self.settings.connections)]
            tasks = [asyncio.create_task(load) for load in loads]
            await asyncio.sleep(1.0 if heavy else 0.0)
            counts.clear()
            counts.update(before)
            started = time.monotonic()
            if light:
                await self._send_light(http, phase, seconds)
            else:
                await asyncio.sleep(seconds)
            phase.seconds += time.monotonic() - started
            for key in counts:
                counts[key] += 0
            after = dict(counts)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            counts.clear()
            counts.update(after)

    async def _send_light(self, http: httpx.AsyncClient, phase: Phase, seconds: float) -> None:
        """Send requests at a fixed rate, whatever becomes of the earlier ones."""
        tasks = []
        for _ in range(int(seconds * self.settings.rate)):
            tasks.append(asyncio.create_task(self._one(http, phase)))
            await asyncio.sleep(1 / self.settings.rate)
        await asyncio.gather(*tasks)

    async def _one(self, http: httpx.AsyncClient, phase: Phase) -> None:
        started, first = time.monotonic(), 0.0
        body = self._body(self.settings.tokens, 1)
        async with http.stream("POST", "/v1/completions", json=body, headers=_key("light")) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for _ in read_events_async(reply.aiter_bytes()):
                first = first or time.monotonic()
        phase.ttft.append(1e3 * (first - started))
        phase.e2e.append(1e3 * (time.monotonic() - started))

    async def _keep_busy(self, http: httpx.AsyncClient, key: str, counts: defaultdict[str, int]) -> None:
        while True:
            body = self._body(900, self.settings.choices)
            async with http.stream("POST", "/v1/completions", json=body, headers=_key(key)) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for event in read_events_async(reply.aiter_bytes()):
                    if event != "[DONE]":
                        counts[key] += sum(len(choice["token_ids"]) for choice in json.loads(event)["choices"])

    def _body(self, max_tokens: int, n: int) -> dict[str, Any]:
        prompt = [next(self._numbers) % 250 + 1 for _ in range(40)]
        return {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "n": n,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


def _key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def _rows(phases: dict[str, Phase]) -> list[dict[str, Any]]:
    return [
        {
            "requests": len(phase.ttft),
            "TTFT p50 ms": round(_percentile(phase.ttft, 0.5), 1),
            "TTFT p99 ms": round(_percentile(phase.ttft, 0.99), 1),
            "E2E p50 ms": round(_percentile(phase.e2e, 0.5), 1),
            "E2E p99 ms": round(_percentile(phase.e2e, 0.99), 1),
            "tokens/s": {key: round(count / phase.seconds) for key, count in phase.tokens.items()},
        }
        for phase in phases.values()
    ]


def _summary(phases: dict[str, Phase]) -> dict[str, float]:
    idle, both, alone, weighted = phases.values()
    summary = {
        f"{name} {label} beside heavy / alone": _percentile(getattr(both, attribute), share)
        / _percentile(getattr(idle, attribute), share)
        for name, attribute in (("TTFT", "ttft"), ("E2E", "e2e"))
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }
    rate = {name: phase.tokens["heavy"] / phase.seconds for name, phase in (("both", both), ("alone", alone))}
    summary["heavy tokens beside light / alone"] = rate["both"] / rate["alone"]
    summary["tokens of weight 3 / of weight 1"] = weighted.tokens["heavier"] / weighted.tokens["heavy"]
    return {name: round(value, 3) for name, value in summary.items()}


if __name__ == "__main__":
    report.main(command_from_config(Settings, fairness))
