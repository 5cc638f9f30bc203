"""Throughput and overhead of a router in front of mock instances: `python benchmarks/router.py`.

Client, router and mocks (`mock_instance.py`) are one process each and share the machine's cores. The client writes prepared
bytes and looks for the end of each answer. The fleet `none` is a server that answers at once (`mock_server.py`), without a
router: the router's added latency is the difference to it. Other routers (`--peers`) run in front of two such servers.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pd
import report
import uvloop
from decisions import LONG, MODEL, decide_among, prompt_text
from peer_routers import SERVER, peer
from rich.console import Console

from pdserve.cli.deployment import free_port
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.settings import Settings as CommandSettings

SHORT = 16  # tokens of a prompt, about
START_S = 600.0
END = b"\r\n0\r\n\r\n"  # of a chunked response
MOCK = Path(__file__).parent / "mock_instance.py"


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    seconds: float = flag("that each case is measured, after half a second or a tenth of it", 8.0)
    connections: str = flag("of the client, a request at a time on each; comma separated", "1,32")
    output_tokens: int = flag("of each answer: as many events where it is streamed", 16)
    step_ms: float = flag("between two steps of an instance, each with a token for all its streams; 0: at once", 0.0)
    fleets: str = flag("behind a router of their own each: none, both, split; comma separated", "none,both,split")
    workers: str = flag("routers that share a port, each with the most connections; comma separated", "1,2")
    peers: str = flag("nginx, smg, vllm_router, sglang_router, dynamo, litellm beside it; comma separated", "")
    peers_folder: str = flag("where peers/install has put them", "")
    instances: str = flag("candidates of a decision; comma separated", "8,64,256")
    decisions: int = flag("timed of each kind", 300)
    repeat: int = flag("rounds of all cases, in turn", 1)
    beside: str = flag("folder of another version of pdserve, whose router takes turns with this one in each case", "")
    quick: bool = flag(report.QUICK_HELP, False)
    note: str = flag(report.NOTE_HELP, "")
    out: str = flag(report.OUT_HELP, "")


QUICK = {"seconds": 0.3, "connections": "2", "fleets": "none,split", "workers": "1", "output_tokens": 4, "decisions": 5}
FLEETS = {"none": [], "both": ["both-0", "both-1"], "split": ["prefill-0", "decode-0"]}


@dataclass(frozen=True)
class Case:
    """One kind of traffic. In the fleet `both`, one instance serves the whole request; in `split`, there is a hand-over;
    `none` has no router.
    """

    fleet: str
    prompt_tokens: int
    output_tokens: int
    stream: bool
    connections: int
    workers: int = 1


class Served(NamedTuple):
    """The measured router: its port, its processes, and those behind it."""

    port: int
    pids: list[int]
    mocks: list[int]


@dataclass
class Measured:
    """Seconds: `latencies` to the end of an answer, `firsts` to its first bytes; processor time of all threads of the
    router's processes, of the client, of the mocks."""

    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def row(self, case: Case) -> dict[str, Any]:
        router, client, mocks = (seconds / len(self.latencies) * 1e3 for seconds in self.cpu_seconds)
        return vars(case) | {
            "requests": len(self.latencies),
            "requests_per_s": round(len(self.latencies) / self.seconds, 1),
            "router_cpu_ms": round(router, 3),
            "client_cpu_ms": round(client, 3),
            "mocks_cpu_ms": round(mocks, 3),
            "router_cores": round(self.cpu_seconds[0] / self.seconds, 2),
            "first_byte_ms_p50": pd.milliseconds(self.firsts, 50),
            "ms_p50": pd.milliseconds(self.latencies, 50),
            "ms_p99": pd.milliseconds(self.latencies, 99),
        }


def benchmark(settings: Settings) -> None:
    """Measure a router in front of mock instances: requests/s, processor time, decisions."""
    if settings.quick:
        settings = report.with_defaults_replaced(settings, QUICK)
    with Console(stderr=True).status("decisions") as status:
        decisions = [row for count in _numbers(settings.instances) for row in decide_among(count, settings.decisions)]
        measured: dict[Case, Measured] = {}
        other: dict[Case, Measured] = {}
        with ExitStack() as stack:
            kinds = dict.fromkeys((case.fleet, case.workers) for case in _cases(settings))
            served = {kind: stack.enter_context(_served(*kind, settings)) for kind in kinds}
            beside = {
                kind: stack.enter_context(_served(*kind, settings, settings.beside))
                for kind in kinds
                if settings.beside and kind[0] != "none"
            }
            for turn in range(settings.repeat):
                for case in _cases(settings):
                    status.update(str(case))
                    kind = case.fleet, case.workers
                    both = [(served[kind], measured)] + ([(beside[kind], other)] if kind in beside else [])
                    for one, into in both if turn % 2 else reversed(both):
                        uvloop.run(play(case, one, settings.seconds, into.setdefault(case, Measured())))
    rows = [one.row(case) for case, one in measured.items()]
    for row, case in zip(rows, measured, strict=True):
        if case in other:
            row["cpu_of_beside_ms"] = other[case].row(case)["router_cpu_ms"]
            row["cpu_ratio"] = round(row["router_cpu_ms"] / row["cpu_of_beside_ms"], 3)
    _add_router_latency(rows)
    _print(rows, decisions)
    content = {"rows": rows, "per_token_cpu_us": per_token_cpu(rows), "decisions": decisions}
    print(report.write("router", replace(settings, peers_folder="", beside=""), content))


def _add_router_latency(rows: list[dict[str, Any]]) -> None:
    """Add the median latency in excess of the same traffic without a router, if that was measured."""
    kind = ("prompt_tokens", "output_tokens", "stream", "connections")
    direct = {tuple(row[name] for name in kind): row["ms_p50"] for row in rows if row["fleet"] == "none"}
    for row in rows:
        reference = direct.get(tuple(row[name] for name in kind))
        row["added_ms_p50"] = None if reference is None else round(row["ms_p50"] - reference, 3)


def per_token_cpu(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the router's CPU microseconds per token: the excess of streams of many tokens over streams of one."""
    streams = [row for row in rows if row["stream"] and row["workers"] == 1 and row["fleet"] != "none"]
    costs: dict[str, float] = {}
    for many in streams:
        for one in streams:
            alike = all(many[name] == one[name] for name in ("fleet", "prompt_tokens", "connections"))
            if alike and one["output_tokens"] == 1 < many["output_tokens"]:
                more = (many["router_cpu_ms"] - one["router_cpu_ms"]) * 1e3
                tokens = many["output_tokens"] - 1
                costs[f"{many['fleet']}, {many['connections']} connections"] = round(more / tokens, 1)
    return costs


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SetupError(f"{text!r} is not a list of whole numbers; write such as 1,32") from None


def _fleets(settings: Settings) -> list[str]:
    fleets = settings.fleets.split(",")
    for name in fleets:
        if name not in FLEETS:
            raise SetupError(f"there is no fleet {name!r}; there are {', '.join(FLEETS)}")
    return fleets + (settings.peers.split(",") if settings.peers else [])


def _cases(settings: Settings) -> Iterator[Case]:
    tokens = settings.output_tokens
    for connections in _numbers(settings.connections):
        for fleet in _fleets(settings):
            yield Case(fleet, SHORT, 1, False, connections)
            yield Case(fleet, SHORT, tokens, False, connections)
            yield Case(fleet, SHORT, 1, True, connections)
            yield Case(fleet, SHORT, tokens, True, connections)
            if FLEETS.get(fleet):
                yield Case(fleet, LONG, tokens, True, connections)
    for workers in sorted(set(_numbers(settings.workers)) - {1}):
        for fleet in filter(FLEETS.get, _fleets(settings)):
            for tokens, stream in ((1, False), (settings.output_tokens, False), (settings.output_tokens, True)):
                yield Case(fleet, SHORT, tokens, stream, max(_numbers(settings.connections)) * workers, workers)


# ---- over the network --------------------------------------------------------------------------------------------


@contextmanager
def _served(fleet: str, workers: int, settings: Settings, version: str = "") -> Iterator[Served]:
    """Start routers on one port with mock instances, or a server without a router, or another router.

    Args:
        version: folder of the version of pdserve whose routers and mocks these are; empty: this one.
    """
    names = FLEETS.get(fleet, [])
    port, spare, *others = free_ports(2 + 2 * workers)
    controls, own = others[:workers], others[workers:] if workers > 1 else [port]
    environment, mock = {"OMP_NUM_THREADS": "1"}, MOCK
    if version:
        mock = Path(version, "benchmarks", MOCK.name)
        environment |= {"PYTHONPATH": f"{version}:{mock.parent}", "PYTHONSAFEPATH": "1"}  # not the working directory
    with ExitStack() as stack:
        if names:
            addresses = ",".join(f"127.0.0.1:{control}" for control in controls)
            commands = [router_command(port, *ports) for ports in zip(controls, own, strict=True)]
            behind = [[sys.executable, str(mock), str(settings.step_ms), addresses, *names]]
        elif fleet in FLEETS:
            commands, behind = [[sys.executable, str(SERVER), str(port)]], []
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            other = peer(fleet, settings.peers_folder, work, (port, spare), others)
            commands, behind, environment = [other.router], [other.backend], environment | other.environment
        mocks = [stack.enter_context(_process(command, environment)) for command in behind]
        routers = [stack.enter_context(_process(command, environment)) for command in commands]
        deadline = time.monotonic() + START_S
        while not all(_ready(one, len(names)) for one in own):
            if any(process.poll() is not None for process in routers + mocks) or time.monotonic() > deadline:
                raise SetupError(f"{fleet} does not serve; start it by hand to see why: {' '.join(commands[0])}")
            time.sleep(0.05)
        yield Served(port, [process.pid for process in routers], [process.pid for process in mocks])


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def router_command(port: int, control: int, own: int) -> list[str]:
    """Start one router. `own` is the port of this router only; if it is the shared port, there are no others."""
    command = [sys.executable, "-m", "pdserve", "router", "--model", MODEL, "--port", str(port)]
    command += ["--control-port", str(control), "--local-prefill-tokens", "0", "--timelines", "100"]
    return command if own == port else [*command, "--reuse-port", "--own-port", str(own)]


def _ready(port: int, instances: int) -> bool:
    """Return True if the router answers a request and, if it is ours, has this many instances."""
    try:
        url, body = f"http://127.0.0.1:{port}", {"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": False}
        with httpx.Client(timeout=5.0, verify=False) as http:
            if instances and http.get(f"{url}/ready").json().get("instances") != instances:
                return False
            return http.post(f"{url}/v1/completions", json=body).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | environment
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def play(case: Case, served: Served, seconds: float, into: Measured) -> None:
    """Run a closed loop on each connection for the given time, and until a request has been answered.

    Requests that are sent in the warm-up do not count.
    """
    request = request_bytes(case, served.port)
    begin = time.perf_counter() + min(0.5, seconds / 10)
    end = begin + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        while (sent := time.perf_counter()) < end or not into.latencies:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            first = time.perf_counter()
            await read_answer(case, head, reader)
            now = time.perf_counter()
            if sent >= begin:
                into.firsts.append(first - sent)
                into.latencies.append(now - sent)
        writer.close()

    async def watch() -> None:
        await asyncio.sleep(begin - time.perf_counter())
        parts = served.pids, [os.getpid()], served.mocks
        started, cpu = time.perf_counter(), [report.cpu_seconds(pids) for pids in parts]
        await asyncio.gather(*clients)
        into.seconds += time.perf_counter() - started
        for part, (pids, before) in enumerate(zip(parts, cpu, strict=True)):
            into.cpu_seconds[part] += report.cpu_seconds(pids) - before

    clients = [asyncio.create_task(client()) for _ in range(case.connections)]
    await watch()


async def read_answer(case: Case, head: bytes, reader: asyncio.StreamReader) -> None:
    """Read an answer to its end and check that it is complete."""
    assert head.startswith(b"HTTP/1.1 200"), head + await reader.read(1000)
    tokens = case.output_tokens
    if case.stream:
        events = (await reader.readuntil(END)).count(b"data: ")
        assert events in (tokens + 1, tokens + 2), f"{events} events instead of {tokens}, the end perhaps, and [DONE]"
        return
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    body = await (reader.readexactly(int(length)) if length else reader.readuntil(END))
    had = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["usage"]["completion_tokens"]
    assert had == tokens, f"{had} tokens instead of {tokens}"


def request_bytes(case: Case, port: int) -> bytes:
    """Return a complete HTTP request with its prompt as text."""
    body = {
        "model": MODEL,
        "prompt": prompt_text(case.prompt_tokens),
        "max_tokens": case.output_tokens,
        "stream": case.stream,
        "temperature": 0,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


TIMES = {"first byte ms": "first_byte_ms_p50", "ms p50": "ms_p50", "p99": "ms_p99"}
CPU = {"CPU ms": "router_cpu_ms", "client": "client_cpu_ms", "mocks": "mocks_cpu_ms"}


def _print(rows: list[dict[str, Any]], decisions: list[dict[str, Any]]) -> None:
    shown = [
        {"fleet": row["fleet"], "workers": row["workers"], "prompt": f"{row['prompt_tokens']:,}"}
        | {
            "tokens": row["output_tokens"],
            "stream": "yes" if row["stream"] else "no",
            "connections": row["connections"],
        }
        | {"requests/s": f"{row['requests_per_s']:,.0f}"}
        | {column: f"{row[name]:.2f}" for column, name in (CPU | TIMES).items()}
        | {"added ms": "" if row["added_ms_p50"] is None else f"{row['added_ms_p50']:.2f}"}
        | ({"CPU / other version's": f"{row['cpu_ratio']:.3f}"} if "cpu_ratio" in row else {})
        for row in rows
    ]
    report.show(shown)
    counts = sorted({row["instances"] for row in decisions})
    times = {(row["what"], row["instances"]): f"{row['us_p50']:.0f}" for row in decisions}
    kinds = [
        {"decision, CPU µs, 8k tokens": what} | {f"{count} instances": times.get((what, count), "") for count in counts}
        for what in dict.fromkeys(row["what"] for row in decisions)
    ]
    report.show(kinds)


if __name__ == "__main__":
    from pdserve.cli.flags import command_from_config

    report.main(command_from_config(Settings, benchmark))
