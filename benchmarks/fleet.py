"""What a large fleet costs its routers: `python benchmarks/fleet.py`.

Real routers with mock instances (`mock_fleet.py`), each of which is attached to all routers: CPU time of heartbeats, block
news, requests and scrapes, memory per instance and per key, and a router that is killed and started again under requests.
"""

import asyncio
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import report
import uvloop
from decisions import MODEL, decide_among
from fleet_processes import TIMEOUT_S, Fleet, RouterProcess, attached, running_routers
from rich.console import Console

import router
from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError

PAUSE_S = 0.05  # of a client between two requests while a router restarts
SCRAPED = ("/metrics", "/debug/instances", "/debug/overview", "/ready")


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    fleets: str = flag("routers x instances, each attached to all routers; comma separated", "1x64,1x256,4x1000")
    seconds: float = flag("for which each rate is measured", 20.0)
    pool: int = flag("block keys that each instance holds", 1024, least=1)
    news: str = flag("block keys that each instance adds, and removes, a second; of each fleet", "80,80,20")
    connections: int = flag("of the client to each router", 4, least=1)
    output_tokens: int = flag("of each answer, as many events", 16, least=2)
    scrapes: int = flag("of each page", 5, least=1)
    decisions: int = flag("timed of each kind", 300, least=1)
    lease_seconds: float = flag("the routers' --instance-timeout-seconds", 1.5, above=0)


QUICK = {
    "fleets": "1x64",
    "seconds": 0.5,
    "pool": 64,
    "news": "80",
    "scrapes": 1,
    "decisions": 3,
    "lease_seconds": 30.0,
}


def benchmark(settings: Settings) -> None:
    """Measure routers with fleets of mock instances."""
    settings = settings.sized(QUICK)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    shapes = [_shape(text) for text in settings.fleets.split(",")]
    news = [float(text) for text in settings.news.split(",")]
    if len(news) != len(shapes):
        raise SetupError("--news needs one number for each of --fleets")
    with Console(stderr=True).status("decisions") as status:
        counts = sorted({count for _, count in shapes})
        decisions = [row for count in counts for row in decide_among(count, settings.decisions)]
        rows = []
        for (num_routers, count), rate in zip(shapes, news, strict=True):
            status.update(f"{num_routers}x{count}")
            rows.append(_measure(num_routers, count, rate, settings))
    _print(rows)
    print(report.write("fleet", settings, {"rows": rows, "decisions": decisions, "growth": _growth(decisions)}))


def _shape(text: str) -> tuple[int, int]:
    try:
        routers, instances = map(int, text.split("x"))
    except ValueError:
        raise SetupError(f"{text!r} is not a fleet; write such as 4x1000") from None
    if routers < 1 or instances < 2:
        raise SetupError(f"{text!r}: a fleet has at least one router and two instances")
    return routers, instances


def _growth(decisions: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many µs each kind of decision grows per instance, from the smallest to the largest fleet."""
    growth = {}
    for what in dict.fromkeys(row["what"] for row in decisions):
        rows = [row for row in decisions if row["what"] == what]
        (few, low), (many, high) = ((row["instances"], row["us_p50"]) for row in (rows[0], rows[-1]))
        if many > few:
            growth[what] = round((high - low) / (many - few), 3)
    return growth


def _measure(num_routers: int, num_instances: int, news: float, settings: Settings) -> dict[str, Any]:
    """Measure one fleet in all respects."""
    with running_routers(num_routers, settings.lease_seconds) as routers:
        time.sleep(settings.seconds / 10)
        start_cpu, empty_memory = routers[0].cpu_s, routers[0].memory_kib
        time.sleep(settings.seconds / 2)
        empty = (routers[0].cpu_s - start_cpu) / (settings.seconds / 2)
        with attached(routers, num_instances) as fleet:
            time.sleep(settings.seconds / 10)
            joined_memory = routers[0].memory_kib
            idle = fleet.measure(settings.seconds)
            row: dict[str, Any] = {
                "routers": num_routers,
                "instances": num_instances,
                "start_cpu_s": round(start_cpu, 2),
                "empty_cpu": report.rounded(empty, 3),
                "idle_cpu": report.rounded(idle["cpu"], 3),
                "heartbeats_per_s": round(idle["heartbeats"], 1),
                "heartbeat_us": round((idle["cpu"] - empty) / idle["heartbeats"] * 1e6, 1),
                "memory_kib_per_instance": round((joined_memory - empty_memory) / num_instances, 1),
            }
            row |= _fill(fleet, idle["cpu"], settings.pool)
            row |= _news(fleet, idle["cpu"], news, settings.seconds)
            row |= _requests(fleet, idle["cpu"], settings)
            row |= {"scrapes": [_scrape(routers[0], path, idle["cpu"], settings.scrapes) for path in SCRAPED]}
            row |= {"restart": asyncio.run(_restart(fleet, start_cpu, settings))}
    return row


def _fill(fleet: Fleet, idle_cpu: float, pool: int) -> dict[str, Any]:
    """Fill all pools at once: the cost of keys in full frames, and their memory."""
    first = fleet.routers[0]
    memory, cpu, started = first.memory_kib, first.cpu_s, time.perf_counter()
    fleet.tell(f"pool {pool}")
    keys = fleet.num_instances * pool
    for one in fleet.routers:
        one.wait_indexed(keys)
    cpu = first.cpu_s - cpu - (time.perf_counter() - started) * idle_cpu
    return {
        "keys": keys,
        "fill_us_per_key": report.rounded(cpu / keys * 1e6, 3),
        "bytes_per_key": round((first.memory_kib - memory) * 1024 / keys),
    }


def _news(fleet: Fleet, idle_cpu: float, rate: float, seconds: float) -> dict[str, Any]:
    """Replace keys of all pools at this rate."""
    fleet.tell(f"news {rate}")
    time.sleep(seconds / 10)
    measured = fleet.measure(seconds)
    fleet.tell("news 0")
    keys = measured["keys"]
    return {
        "news_keys_per_s": round(keys),
        "news_cpu": report.rounded(measured["cpu"] - idle_cpu, 3),
        "news_us_per_key": report.rounded((measured["cpu"] - idle_cpu) / keys * 1e6, 3),
    }


def _requests(fleet: Fleet, idle_cpu: float, settings: Settings) -> dict[str, Any]:
    """Send streams to all routers in closed loops."""
    case = router.Case("split", router.SHORT, settings.output_tokens, True, settings.connections)
    measured = [router.Measured() for _ in fleet.routers]
    pids = [mocks.pid for mocks in fleet.mocks]

    async def play() -> None:
        await asyncio.gather(
            *(
                router.play(case, router.Served(one.port, [one.pid], pids), settings.seconds, into)
                for one, into in zip(fleet.routers, measured, strict=True)
            )
        )

    uvloop.run(play())
    requests = sum(len(one.latencies) for one in measured)
    seconds = statistics.mean(one.seconds for one in measured)
    cpu = sum(one.cpu_seconds[0] - idle_cpu * one.seconds for one in measured)
    return {"requests_per_s": round(requests / seconds, 1), "request_cpu_ms": round(cpu / requests * 1e3, 3)}


def _scrape(one: RouterProcess, path: str, idle_cpu: float, repeat: int) -> dict[str, Any]:
    cpu, started = one.cpu_s, time.perf_counter()
    sizes = [len(one.get(path).content) for _ in range(repeat)]
    elapsed = time.perf_counter() - started
    ms = (one.cpu_s - cpu - idle_cpu * elapsed) / repeat * 1e3
    return {"path": path, "cpu_ms": round(ms, 1), "wall_ms": round(elapsed / repeat * 1e3, 1), "bytes": max(sizes)}


# ---- a router is killed and started again ------------------------------------------------------------------------


class Client:
    """A closed loop on one router that behaves as one behind a load balancer: after a fault it waits for /ready.

    Attributes:
        outcomes: number of answers that were `exact`, `wrong` or `broken`, which are those under way when a router dies.
        longest_s: the longest time of an exact answer.
    """

    def __init__(self, port: int, output_tokens: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self._url = f"http://127.0.0.1:{port}"
        prompt = "the river runs past a small town"
        self._body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        self._text = ""

    async def run(self, until: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as http:
            while not until.is_set():
                started = time.perf_counter()
                try:
                    self._judge(await http.post("/v1/completions", json=self._body), time.perf_counter() - started)
                except httpx.TransportError:
                    self.outcomes["broken"] += 1
                    await self._wait_ready(http)
                await asyncio.sleep(PAUSE_S)

    def _judge(self, answer: httpx.Response, seconds: float) -> None:
        if answer.status_code != 200:
            self.outcomes[str(answer.status_code)] += 1
            return
        text = answer.json()["choices"][0]["text"]
        self._text = self._text or text
        self.outcomes["exact" if text == self._text else "wrong"] += 1
        self.longest_s = max(self.longest_s, seconds)

    async def _wait_ready(self, http: httpx.AsyncClient) -> None:
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(PAUSE_S)


async def _restart(fleet: Fleet, start_cpu: float, settings: Settings) -> dict[str, Any]:
    """Kill the first router and start it again, under requests to all of them. Seconds count from the kill.

    CPU seconds are those of the new process beyond `start_cpu`, what one needs without instances.
    """
    clients = [[Client(one.port, settings.output_tokens) for _ in range(settings.connections)] for one in fleet.routers]
    until = asyncio.Event()
    running = [asyncio.create_task(client.run(until)) for group in clients for client in group]
    await asyncio.sleep(settings.seconds / 10)
    result = await asyncio.to_thread(_converge, fleet, start_cpu, fleet.num_instances * settings.pool)
    await asyncio.sleep(settings.seconds / 10)
    until.set()
    await asyncio.gather(*running)
    for name, chosen in (("killed", clients[0]), ("others", [client for group in clients[1:] for client in group])):
        if chosen:
            result[f"{name}_outcomes"] = dict(sum((client.outcomes for client in chosen), Counter()))
            result[f"{name}_longest_s"] = round(max(client.longest_s for client in chosen), 3)
    return result


def _converge(fleet: Fleet, start_cpu: float, num_keys: int) -> dict[str, Any]:
    first, times = fleet.routers[0], {}
    killed_at = time.perf_counter()
    first.kill()
    first.start()
    first.wait_alive()
    times["alive"] = time.perf_counter()
    first.wait_attached(fleet.num_instances)
    times["attached"], attached_cpu = time.perf_counter(), first.cpu_s
    first.wait_indexed(num_keys)
    times["whole"], whole_cpu = time.perf_counter(), first.cpu_s
    seconds = {f"{name}_s": round(at - killed_at, 2) for name, at in times.items()}
    return seconds | {
        "attached_cpu_s": round(attached_cpu - start_cpu, 2),
        "whole_cpu_s": round(whole_cpu - start_cpu, 2),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    titles = [f"{row['routers']} × {row['instances']}" for row in rows]
    lines = {name: [f"{row[name]:,}" for row in rows] for name in rows[0] if name not in ("scrapes", "restart")}
    for i, path in enumerate(SCRAPED):
        lines[f"{path}, CPU ms"] = [f"{row['scrapes'][i]['cpu_ms']:,}" for row in rows]
    for name in rows[-1]["restart"]:
        lines[f"restart: {name}"] = [str(row["restart"].get(name, "")) for row in rows]
    report.show([{"": name} | dict(zip(titles, cells, strict=True)) for name, cells in lines.items()])


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
