"""A deployment under load while its parts fail at random: `scripts/chaos`, for 15 minutes.

Two prefill and two decode instances behind a router serve clients of which each asks again as soon as it has its answer:
greedy and sampled, whole and as streams, of which some are left in the middle. Meanwhile instances are killed, frozen,
drained, given other roles, and cut off the network (in a namespace of their own, where we may make one), and the store is
restarted. What comes when is drawn from `--seed`.

First every request is asked for without faults. Later answers must have exactly those tokens, and what ends early their
beginning; what does not finish must say so with a 503 (or 429). No request may take longer than `--deadline`. At the end
nothing may be left: blocks, work on the routers' books, sockets, threads and tasks, processes, shared memory.
"""

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import report
import stores
from island import Island
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from pdserve.config import UpConfig, flag, parse_size
from pdserve.deployment import Deployment, free_port
from pdserve.errors import SetupError
from pdserve.flags import command_of
from pdserve.supervisor import Child


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    seconds: float = flag("how long faults come", 900.0)
    every: float = flag("seconds between two faults, on average", 3.0)
    lasting: float = flag("seconds that freezes, cuts and restarts of the store last, at most", 4.0)
    clients: int = flag("requests under way", 8)
    cases: int = flag("different requests", 64)
    pause: float = flag("seconds until a client asks again, on average", 0.0)
    deadline: float = flag("seconds that a request may take", 120.0)
    store: str = flag("where KV blocks go: redis, shm", "redis")
    seed: int = flag("of the order of faults, and of the requests", 0)


QUICK = {"seconds": 30.0, "every": 1.5, "lasting": 2.5, "clients": 4, "cases": 12, "pause": 0.1}
ON_ISLAND = "decode-1"
ROLES = ("prefill", "decode", "both")
STORE_BYTES = parse_size("64MiB")
LEASE_S = 5.0  # of blocks in the store: those of killed instances have run out when all is over
SETTLE_S = 90.0
SLACK_SOCKETS, SLACK_THREADS = 4, 4  # of instances: connections to the store are opened as they are needed
GAVE_UP = re.compile(r"(503|429) .*|cancelled")  # ends that are neither an answer nor a defect
EXCUSED = ("SIGKILL", "exit code 0", "exit code 2")  # killed, drained, started while the store or the network was out
NOBODY = "is there to take it"
ENDED = re.compile(r"\[(\S+)\] ended \((.+)\)")

Make = Callable[[UpConfig, Callable[[str], None]], Deployment]


# ---- the stage --------------------------------------------------------------------------------------------------------


class Chaotic(Deployment):
    """A deployment of which one instance lives on an island, if there is one. `pids` are all that it has ever started."""

    island: Island | None = None
    pids: set[int]

    def settle(self, island: Island | None) -> None:
        """Call it before it starts."""
        self.island, self.pids = island, set()
        self.child("router").arguments += ["--handover-timeout-seconds", "10"]
        for child in self.instances:
            child.arguments += ["--drain-seconds", "10"]
        if island is not None:
            router, there = self.child("router"), self.child(ON_ISLAND)
            router.arguments += ["--control-host", "0.0.0.0"]
            there.arguments = [word.replace("127.0.0.1", island.host) for word in there.arguments]

    @property
    def store_name(self) -> str:
        return self.connector.partition("://")[2].partition("?")[0]

    @property
    def instances(self) -> list[Child]:
        return [child for child in self.children if child.name != "router"]

    def _start(self, child: Child) -> None:
        super()._start(child)
        self.pids.add(child.pid)

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
        if self.island is None or ON_ISLAND not in arguments:
            return super()._spawn(arguments, environment)
        with self.island.entered():
            return Deployment._spawn(self, arguments, environment)


@dataclass
class Stage:
    """Attributes:
    store: to be restarted, if it can be.
    left_out: faults that there are not, and why.
    """

    deployment: Chaotic
    store: stores.RedisServer | None
    said: list[str]
    left_out: dict[str, str]


@contextmanager
def stage(settings: Settings, make: Make = Chaotic) -> Iterator[Stage]:
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        island = None
        try:
            island = stack.enter_context(Island())
        except SetupError as error:
            left_out["cut"] = str(error)
        store = None
        if settings.store == "redis":
            store = stores.RedisServer(folder, STORE_BYTES, "127.0.0.1", *([island.host] if island else []))
            stack.callback(store.kill)
            url = f"redis://127.0.0.1:{store.port}/0?timeout=2"
        else:
            url = stack.enter_context(stores.shm(STORE_BYTES))
            left_out["store"] = f"--store {settings.store} has no server"
        config = UpConfig(
            model=str(checkpoints.make(checkpoints.TINY, Path(folder) / "model")),
            dtype="float32",
            port=free_port(),
            prefill=2,
            decode=2,
            num_blocks=256,
            max_num_batched_tokens=128,
            threads=1,
            connector=url,
            lease_seconds=LEASE_S,
        )
        said: list[str] = []
        deployment = make(config, said.append)
        assert isinstance(deployment, Chaotic)
        deployment.settle(island)
        stack.enter_context(deployment)
        deployment.wait_ready()
        yield Stage(deployment, store, said, left_out)


# ---- the load ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One request, and its tokens and end without faults."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    end: str = ""


def cases(settings: Settings, model: str) -> list[Case]:
    """Prompts of which many begin alike; greedy and sampled."""
    drawn = random.Random(f"cases {settings.seed}")
    beginnings = [[drawn.randrange(250) for _ in range(150)] for _ in range(3)]
    found = []
    for number in range(settings.cases):
        prompt = [
            *drawn.choice([[], *beginnings]),
            *(drawn.randrange(250) for _ in range(drawn.choice([1, 20, 90, 300]))),
        ]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": drawn.choice([1, 20, 80, 250]),
            "return_token_ids": True,
        }
        body |= {"ignore_eos": drawn.random() < 0.8, "temperature": float(number % 2), "seed": number}
        found.append(Case(body))
    return found


@dataclass
class Traffic:
    """What the clients saw.

    Attributes:
        ends: answers by how they ended.
        avoidable: answers with a 503 that does not say that nobody is there.
        defects: what must not be, in words.
        seconds: that answers took which are whole.
        gaps: the longest pause in each stream that is whole.
    """

    ends: Counter[str] = field(default_factory=Counter)
    avoidable: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


async def fault_free(http: httpx.AsyncClient, all_cases: list[Case], clients: int) -> None:
    """Fills in what is right."""
    turns = asyncio.Semaphore(clients)

    async def ask(case: Case) -> None:
        async with turns:
            while case.end not in ("stop", "length"):  # a busy machine can look like a fault
                case.end, case.tokens, _ = await _ask(http, case.body)

    async with asyncio.TaskGroup() as group:
        for case in all_cases:
            group.create_task(ask(case))


async def client(
    http: httpx.AsyncClient,
    all_cases: list[Case],
    settings: Settings,
    drawn: random.Random,
    until: float,
    traffic: Traffic,
) -> None:
    """Asks, again and again, and compares."""
    while time.monotonic() < until:
        case, streams = drawn.choice(all_cases), drawn.random() < 0.6
        stay = drawn.choice([0.05, 0.2, 0.8]) if drawn.random() < 0.2 else None
        body = {**case.body, "stream": streams}
        started, end, tokens, gap = time.monotonic(), "", list[int](), 0.0
        try:
            async with asyncio.timeout(settings.deadline):
                end, tokens, gap = await _ask(http, body, stay)
        except TimeoutError:
            end = f"no end within {settings.deadline:g} s"
        except httpx.HTTPError as error:
            end = f"broken off: {error!r}"
        if end in ("stop", "length"):
            right = end == case.end and tokens == case.tokens
            traffic.seconds.append(time.monotonic() - started)
            traffic.gaps += [gap] if streams else []
        else:
            right = GAVE_UP.fullmatch(end) is not None and tokens == case.tokens[: len(tokens)]
        short, though, _ = end.partition(", though")
        traffic.ends[short] += 1
        if though:
            traffic.avoidable[end] += 1
        if not right:
            traffic.defects.append(f"{body} was answered {tokens} ({end}); right is {case.tokens} ({case.end})")
        refused = end.startswith(("503", "429"))
        await asyncio.sleep(drawn.uniform(0, 2 * settings.pause) + 0.2 * refused)


async def _ask(
    http: httpx.AsyncClient, body: dict[str, Any], stay: float | None = None
) -> tuple[str, list[int], float]:
    """How it ended (a finish reason, or status and code), its tokens, and the longest pause in a stream.

    Args:
        stay: seconds until the client leaves.
    """
    tokens: list[int] = []
    end, last, gap = "broken off", 0.0, 0.0
    with suppress(TimeoutError):
        async with asyncio.timeout(stay), http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200 or not body.get("stream"):
                whole = json.loads(await reply.aread())
                if reply.status_code != 200:
                    return _failure(reply.status_code, whole["error"]), tokens, gap
                return whole["choices"][0]["finish_reason"], whole["choices"][0]["token_ids"], gap
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return end, tokens, gap
                if not line.startswith("data: "):
                    continue
                event, now = json.loads(line.removeprefix("data: ")), time.monotonic()
                if "error" in event:
                    status = {"service_unavailable": 503, "rate_limit_error": 429}.get(event["error"]["type"], 500)
                    return _failure(status, event["error"]), tokens, gap
                gap, last = max(gap, now - last if last else 0.0), now
                tokens += event["choices"][0].get("token_ids") or []
                end = event["choices"][0].get("finish_reason") or end
            return "broken off", tokens, gap
    return "cancelled", tokens, gap


def _failure(status: int, error: dict[str, str]) -> str:
    words = "" if NOBODY in error["message"] else f", though: {error['message']}"
    return f"{status} {error['code']}{words}"


# ---- the faults -------------------------------------------------------------------------------------------------------


class Monkey:
    """Does what must not matter.

    Attributes:
        done: faults by kind and by what became of them: `done`, `refused` by the router, or `not now`, because one of the
            same victim lasts yet.
    """

    def __init__(self, at: Stage, settings: Settings) -> None:
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self._deployment, self._store, self._settings = at.deployment, at.store, settings
        self._http = httpx.AsyncClient(base_url=at.deployment.url, timeout=30.0)
        self._drawn = random.Random(f"faults {settings.seed}")
        self._lasting: dict[str, asyncio.Task[None]] = {}
        every: dict[str, Callable[[str, float, str], Awaitable[str]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "drain": self._drain,
            "flip": self._flip,
            "store": self._restart_store,
            "cut": self._cut,
        }
        self._kinds = {kind: fault for kind, fault in every.items() if kind not in at.left_out}

    async def rage(self, until: float) -> None:
        """Until then; what lasts longer is over when this returns."""
        started, names = time.monotonic(), [child.name for child in self._deployment.instances]
        async with self._http:
            while True:
                # All of it is drawn in any case, so that the order does not depend on what comes of it.
                pause = self._drawn.uniform(0, 2 * self._settings.every)
                kind, victim = self._drawn.choice(list(self._kinds)), self._drawn.choice(names)
                seconds, role = self._drawn.uniform(0.1, self._settings.lasting), self._drawn.choice(ROLES)
                if time.monotonic() + pause > until:
                    break
                await asyncio.sleep(pause)
                became = await self._kinds[kind](victim, seconds, role)
                self.done[f"{kind} {became}"] += 1
                self.log.append(f"{time.monotonic() - started:.1f} s: {kind} {victim} {seconds:.1f} s {role}: {became}")
            await asyncio.gather(*self._lasting.values())

    async def _kill(self, victim: str, _: float, __: str) -> str:
        child = self._deployment.child(victim)
        if victim in self._lasting or not child.running:
            return "not now"
        child.failures = 0
        os.kill(child.pid, signal.SIGKILL)
        return "done"

    async def _freeze(self, victim: str, seconds: float, _: str) -> str:
        child = self._deployment.child(victim)
        if not child.running:
            return "not now"
        pid = child.pid

        def thaw() -> None:
            if child.running and child.pid == pid:
                os.kill(pid, signal.SIGCONT)

        return self._for_a_while(victim, seconds, lambda: os.kill(pid, signal.SIGSTOP), thaw)

    async def _drain(self, victim: str, _: float, __: str) -> str:
        return await self._order(victim, "drain", {})

    async def _flip(self, victim: str, _: float, role: str) -> str:
        return await self._order(victim, "role", {"role": role})

    async def _restart_store(self, _: str, seconds: float, __: str) -> str:
        assert self._store is not None
        return self._for_a_while("store", seconds, self._store.kill, self._store.start)

    async def _cut(self, _: str, seconds: float, __: str) -> str:
        island = self._deployment.island
        assert island is not None
        return self._for_a_while("link", seconds, island.cut, island.mend)

    async def _order(self, victim: str, path: str, body: dict[str, str]) -> str:
        reply = await self._http.post(f"/admin/instances/{victim}/{path}", json=body)
        assert reply.status_code in (202, 404, 409), reply.text
        return "done" if reply.status_code == 202 else "refused"

    def _for_a_while(self, victim: str, seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> str:
        if victim in self._lasting:
            return "not now"

        async def last() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                end()
                del self._lasting[victim]

        begin()
        self._lasting[victim] = asyncio.create_task(last())
        return "done"


# ---- what is left -----------------------------------------------------------------------------------------------------


def footprint(deployment: Chaotic) -> dict[str, float]:
    """What may be there when nothing is under way, by process."""
    found: dict[str, float] = {}
    for child in deployment.children:
        descriptors = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        found[f"sockets of {child.name}"] = sum(one.startswith("socket:") for one in descriptors)
        found[f"threads of {child.name}"] = len(os.listdir(f"/proc/{child.pid}/task"))
    found["tasks of router"] = _metrics(deployment)["pdserve_router_tasks"]
    return found


def books(deployment: Chaotic) -> dict[str, float]:
    """What must be 0 when nothing is under way."""
    metrics = _metrics(deployment)
    names = ("kv_cache_blocks_held", "num_requests_running", "num_requests_waiting")
    names += ("kv_transfer_bytes_in_flight", "kv_transfer_bytes_waiting")
    attached = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
    found = {name: metrics[f"pdserve_{name}"] for name in names}
    for name in ("requests", "prefill_tokens", "output_tokens", "draining"):
        found[f"{name} on the router's books"] = sum(one[name] for one in attached)
    return found | {"instances not attached": len(deployment.instances) - len(attached)}


def _metrics(deployment: Chaotic) -> Counter[str]:
    """Over all labels but `kind` and `finish_reason`."""
    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{deployment.url}/metrics").text):
        for one in family.samples:
            totals[one.name] += one.value
            for label in ("kind", "finish_reason"):
                if label in one.labels:
                    totals[f"{one.name} {one.labels[label]}"] += one.value
    return totals


async def settled(
    deployment: Chaotic, before: dict[str, float] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Books and footprint once they are as they should be, or after a while."""
    give_up = time.monotonic() + SETTLE_S
    while True:
        deployment.tend()
        with suppress(FileNotFoundError, ProcessLookupError, AssertionError):  # one has just ended
            left, after = books(deployment), footprint(deployment)
            grown = before and [name for name, value in after.items() if value > before[name] + _slack(name)]
            if time.monotonic() > give_up or not (grown or any(left.values())):
                return left, after
        await asyncio.sleep(0.2)


def _slack(name: str) -> float:
    if name in ("sockets of router", "tasks of router"):
        return 0
    return SLACK_SOCKETS if name.startswith("sockets") else SLACK_THREADS


# ---- all of it --------------------------------------------------------------------------------------------------------


def play(settings: Settings, make: Make = Chaotic) -> dict[str, Any]:
    """Everything that the JSON holds."""
    with stage(settings, make) as at:
        try:
            shown, traffic = asyncio.run(_play(at, settings))
        finally:
            for child in at.deployment.instances:
                if child.running:
                    os.kill(child.pid, signal.SIGCONT)  # a frozen one hears nothing else
    left = {
        "processes": sum(Path(f"/proc/{pid}").exists() for pid in at.deployment.pids),
        "segments of shared memory": sum(at.deployment.store_name in name for name in os.listdir("/dev/shm")),
    }
    verdicts = [*shown.pop("verdicts"), *({"what": f"{name} left", "may be": 0, "is": n} for name, n in left.items())]
    ended = [match for match in map(ENDED.search, at.said) if match is not None]
    of_themselves = [match[0] for match in ended if match[2] not in EXCUSED]
    tracebacks = [line for line in at.said if "Traceback" in line]
    verdicts.append({"what": "instances that ended by themselves", "may be": 0, "is": len(of_themselves)})
    verdicts.append({"what": "tracebacks in logs", "may be": 0, "is": len(tracebacks)})
    return {"verdicts": verdicts, **shown, "left_out": at.left_out, "defects": traffic.defects, "log": at.said}


async def _play(at: Stage, settings: Settings) -> tuple[dict[str, Any], Traffic]:
    deployment, traffic, monkey = at.deployment, Traffic(), Monkey(at, settings)
    all_cases = cases(settings, deployment.config.name)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deployment.url, timeout=None, limits=limits) as http:
        await fault_free(http, all_cases, settings.clients)
    await asyncio.sleep(1.0)  # until the connections above are gone
    left, before = await settled(deployment)
    assert not any(left.values()), left
    started = time.monotonic()
    until = started + settings.seconds
    async with httpx.AsyncClient(base_url=deployment.url, timeout=None, limits=limits) as http:
        tending = asyncio.create_task(_tend(deployment))
        async with asyncio.TaskGroup() as group:
            group.create_task(monkey.rage(until))
            for number in range(settings.clients):
                drawn = random.Random(f"client {number} {settings.seed}")
                group.create_task(client(http, all_cases, settings, drawn, until, traffic))
        tending.cancel()
    took = time.monotonic() - started
    left, after = await settled(deployment, before)
    verdicts = [{"what": "requests that ended wrong, or not at all", "may be": 0, "is": len(traffic.defects)}]
    avoidable = sum(traffic.avoidable.values())
    verdicts.append({"what": "requests refused or ended though somebody was there", "may be": 0, "is": avoidable})
    verdicts += [{"what": name, "may be": 0, "is": value} for name, value in left.items()]
    verdicts += [{"what": n, "may be": before[n] + _slack(n), "is": value} for n, value in after.items()]
    metrics = _metrics(deployment)
    counted = (
        "migrations_total",
        "fallbacks_total",
        "instances_lost_total",
        "requests_total",
        "prompt_tokens_by_source",
    )
    shown = {
        "verdicts": verdicts,
        "seconds": took,
        "faults": dict(sorted(monkey.done.items())),
        "fault_log": monkey.log,
        "ends": dict(traffic.ends),
        "avoidable": dict(traffic.avoidable),
        "answers": {"seconds": _spread(traffic.seconds), "longest_pause_s": _spread(traffic.gaps)},
        "metrics": {name: value for name, value in sorted(metrics.items()) if any(one in name for one in counted)},
    }
    return shown, traffic


async def _tend(deployment: Chaotic) -> None:
    while True:
        deployment.tend()
        await asyncio.sleep(0.1)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        name: round(ordered[int(share * (len(ordered) - 1))], 3)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
    }


def chaos(settings: Settings) -> None:
    """Serve under load while instances, network and store fail at random, and see that no token and nothing else is lost."""
    settings = settings.sized(QUICK)
    if settings.store not in ("redis", "shm"):
        raise SetupError(f"--store is redis or shm, not {settings.store!r}")
    shown = play(settings)
    log = shown.pop("log")
    _print(shown)
    path = report.write("chaos", settings, shown)
    print(path)
    if any(verdict["is"] > verdict["may be"] for verdict in shown["verdicts"]):
        path.with_suffix(".log").write_text("\n".join(log))
        print(path.with_suffix(".log"))
        raise SystemExit(1)


def _print(shown: dict[str, Any]) -> None:
    for title, counts in (("fault", shown["faults"]), ("requests ended", shown["ends"])):
        table = Table(title, "times", show_edge=False, pad_edge=False)
        for name, count in sorted(counts.items()):
            table.add_row(name, f"{count:,}")
        report.show(table)
        print()
    for kind, why in shown["left_out"].items():
        print(f"no {kind}: {why}")
    for name, spread in shown["answers"].items():
        print(f"{name}: " + ", ".join(f"{part} {value:g}" for part, value in spread.items()))
    table = Table("at the end", "may be", "is", "holds", show_edge=False, pad_edge=False)
    for verdict in shown["verdicts"]:
        holds = "yes" if verdict["is"] <= verdict["may be"] else "NO"
        table.add_row(verdict["what"], f"{verdict['may be']:g}", f"{verdict['is']:g}", holds)
    report.show(table)
    for defect in [*shown["avoidable"], *shown["defects"]][:10]:
        print(defect)


if __name__ == "__main__":
    report.main(command_of(Settings, chaos))
