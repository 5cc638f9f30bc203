"""What a router takes, in front of mock instances that answer at once: `python benchmarks/router.py`.

Client, router and mocks (`mock_instance.py`) are a process each and share the machine's cores. The client writes bytes that
were made before and looks for the end of each answer. Decisions are timed in this process, without a network.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import mock_instance
import pd
import report
import uvloop
from rich.console import Console
from rich.table import Table

from pdserve.config import RouterConfig, flag
from pdserve.deployment import free_port
from pdserve.errors import SetupError
from pdserve.keys import block_keys
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.metrics import Metrics
from pdserve.router.policy import POLICIES, Ask, decide
from pdserve.router.tokenizer import Tokenizer

MODEL = "demo"
WORDS = ["the", "river", "runs", "past", "a", "small", "town", "where", "the", "baker", "meets", "the", "fisher"]
SHORT, LONG = 16, 8192  # tokens of a prompt, about
START_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
MOCK = Path(__file__).parent / "mock_instance.py"


@dataclass(frozen=True, kw_only=True)
class Settings:
    seconds: float = flag("that each case is measured, after half a second or a tenth of it", 8.0)
    connections: str = flag("of the client, a request at a time on each; comma separated", "1,32")
    output_tokens: int = flag("of each answer: as many events where it is streamed", 16)
    fleets: str = flag("behind a router of their own each: both, split; comma separated", "both,split")
    instances: str = flag("candidates of a decision; comma separated", "8,64,256")
    decisions: int = flag("timed of each kind", 300)
    repeat: int = flag("rounds of all cases, in turn", 1)
    quick: bool = flag(report.QUICK_HELP, False)
    note: str = flag(report.NOTE_HELP, "")
    out: str = flag(report.OUT_HELP, "")


QUICK = {"seconds": 0.3, "connections": "2", "fleets": "split", "output_tokens": 4, "decisions": 5}
FLEETS = {"both": ["both-0", "both-1"], "split": ["prefill-0", "decode-0"]}


@dataclass(frozen=True)
class Case:
    """One kind of traffic. In a fleet of `both`, one instance does it all; in one of `split`, a hand-over is made."""

    fleet: str
    prompt_tokens: int
    output_tokens: int
    stream: bool
    connections: int


@dataclass
class Measured:
    """Seconds: `latencies` to the end of an answer, `firsts` to its first bytes; processor time of all threads."""

    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0

    def row(self, case: Case) -> dict[str, Any]:
        return vars(case) | {
            "requests": len(self.latencies),
            "requests_per_s": round(len(self.latencies) / self.seconds, 1),
            "router_cpu_ms": round(self.cpu_seconds / len(self.latencies) * 1e3, 3),
            "router_cores": round(self.cpu_seconds / self.seconds, 2),
            "first_byte_ms_p50": pd.milliseconds(self.firsts, 50),
            "ms_p50": pd.milliseconds(self.latencies, 50),
            "ms_p99": pd.milliseconds(self.latencies, 99),
        }


def benchmark(settings: Settings) -> None:
    """Measure a router in front of mock instances: requests/s, processor time, decisions."""
    if settings.quick:
        settings = report.in_place_of_defaults(settings, QUICK)
    with Console(stderr=True).status("decisions") as status:
        decisions = [row for count in _numbers(settings.instances) for row in decide_among(count, settings.decisions)]
        measured: dict[Case, Measured] = {}
        with ExitStack() as stack:
            ports = {fleet: stack.enter_context(_served(FLEETS[fleet])) for fleet in _fleets(settings)}
            for _ in range(settings.repeat):
                for case in _cases(settings):
                    status.update(str(case))
                    port, pid = ports[case.fleet]
                    uvloop.run(play(case, port, pid, settings.seconds, measured.setdefault(case, Measured())))
    rows = [one.row(case) for case, one in measured.items()]
    _print(rows, decisions)
    content = {"rows": rows, "per_token_cpu_us": per_token_cpu(rows), "decisions": decisions}
    print(report.write("router", settings, content))


def per_token_cpu(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the router, in microseconds, by fleet and connections: what streams of many tokens take beyond those of one."""
    streams = [row for row in rows if row["stream"]]
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
    return fleets


def _cases(settings: Settings) -> Iterator[Case]:
    tokens = settings.output_tokens
    for connections in _numbers(settings.connections):
        for fleet in _fleets(settings):
            yield Case(fleet, SHORT, 1, False, connections)
            yield Case(fleet, SHORT, tokens, False, connections)
            yield Case(fleet, SHORT, 1, True, connections)
            yield Case(fleet, SHORT, tokens, True, connections)
            yield Case(fleet, LONG, tokens, True, connections)


# ---- through the network ----------------------------------------------------------------------------------------


@contextmanager
def _served(names: list[str]) -> Iterator[tuple[int, int]]:
    """A router with these mock instances: its port and its process id."""
    port = free_port()
    control = free_port(but=port)
    router = ["-m", "pdserve", "router", "--model", MODEL, "--port", str(port), "--control-port", str(control)]
    router += ["--local-prefill-tokens", "0", "--timelines", "100"]
    with ExitStack() as stack:
        process = stack.enter_context(_process(router))
        stack.enter_context(_process([str(MOCK), f"127.0.0.1:{control}", *names]))
        deadline = time.monotonic() + START_S
        while not _ready(port, len(names)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SetupError("the router does not serve; start it by hand to see why: pdserve router --model demo")
            time.sleep(0.05)
        yield port, process.pid


def _ready(port: int, instances: int) -> bool:
    try:
        ready = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=1.0, verify=False)
    except httpx.TransportError:
        return False
    return ready.status_code == 200 and ready.json()["instances"] == instances


@contextmanager
def _process(arguments: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def play(case: Case, port: int, pid: int, seconds: float, into: Measured) -> None:
    """A closed loop on each connection for so long; what ends in the warm-up does not count."""
    request = request_bytes(case, port)
    begin = time.perf_counter() + min(0.5, seconds / 10)
    end = begin + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            first = time.perf_counter()
            await _rest(case, head, reader)
            now = time.perf_counter()
            if sent >= begin:
                into.firsts.append(first - sent)
                into.latencies.append(now - sent)
        writer.close()

    async def watch() -> None:
        await asyncio.sleep(begin - time.perf_counter())
        started, cpu = time.perf_counter(), cpu_seconds(pid)
        await asyncio.gather(*clients)
        into.seconds += time.perf_counter() - started
        into.cpu_seconds += cpu_seconds(pid) - cpu

    clients = [asyncio.create_task(client()) for _ in range(case.connections)]
    await watch()
    assert into.latencies, "nothing was answered in time; give more --seconds"


async def _rest(case: Case, head: bytes, reader: asyncio.StreamReader) -> None:
    """Reads an answer to its end and checks that it is whole."""
    assert head.startswith(b"HTTP/1.1 200"), head + await reader.read(1000)
    if case.stream:
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        events = body.count(b"data: ")
        assert events == case.output_tokens + 1, f"{events} events instead of {case.output_tokens} and [DONE]"
    else:
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        tokens = json.loads(body)["usage"]["completion_tokens"]
        assert tokens == case.output_tokens, f"{tokens} tokens instead of {case.output_tokens}"


def request_bytes(case: Case, port: int) -> bytes:
    """A whole HTTP request, its prompt as text."""
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


def prompt_text(tokens: int) -> str:
    """Of so many words; with the demo model's tokenizer, about as many tokens."""
    chosen = Random(tokens)
    return " ".join(chosen.choice(WORDS) for _ in range(tokens))


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in user and system mode."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / TICKS


# ---- in this process --------------------------------------------------------------------------------------------


def decide_among(count: int, repeat: int) -> list[dict[str, Any]]:
    """Times each policy over so many candidates, and `open`: all from an understood request to the frames for instances.

    Half of the instances prefill and half decode, all are busy, and each has the beginning of the prompt, all of another
    length. The prompt has been hashed before; how long that takes is a row of its own, as is tokenizing.
    """
    fleet = Fleet("router", MODEL, 1.0)
    dispatcher = Dispatcher(RouterConfig(model=MODEL), fleet, Metrics(fleet))
    prompt = [Random(0).randrange(2048) for _ in range(LONG)]
    keys = block_keys(b"root", prompt, mock_instance.BLOCK_SIZE)
    chosen = Random(count)
    for i in range(count):
        role = "decode" if i % 2 else "prefill"
        member = fleet._join(mock_instance.hello(f"{role}-{i}", role, MODEL))
        others = pb.Load(requests=chosen.randrange(1, 9), prefills=1)
        others.prefill_tokens, others.output_tokens = chosen.randrange(4096), chosen.randrange(4096)
        others.attended_tokens, others.context_tokens = chosen.randrange(1 << 20), chosen.randrange(1 << 16)
        member.heard_of_others(others)
        fleet.index.add(member.id, keys[: i * len(keys) // count])
    members = list(fleet.members.values())
    loads = [member.load for member in members]
    cached = {member.id: fleet.index.blocks(member.id) * mock_instance.BLOCK_SIZE for member in members}
    ask = Ask(LONG, session="somebody", cached=cached, output_tokens=64)

    def opened(turn: int) -> None:
        sampling = SamplingParams(max_tokens=64)
        request = Request(
            request_id=f"r{turn}", prompt=prompt, sampling=sampling, keys={mock_instance.BLOCK_SIZE: keys}
        )
        dispatcher.open(request)

    def closed(turn: int) -> None:
        dispatcher.flights[f"r{turn}"].cancel()
        for member in members:
            while not member.outbox.empty():
                member.outbox.get_nowait()

    def timed(policy: str) -> Callable[[int], object]:
        return lambda turn: decide(policy, loads, replace(ask, turn=turn))

    kinds = {policy: _microseconds(timed(policy), repeat) for policy in POLICIES}
    kinds["match the prompt's keys"] = _microseconds(lambda _: fleet.index.match(keys), repeat)
    kinds["open"] = _microseconds(opened, repeat, after=closed)
    if count == 8:  # the same for all
        kinds["hash the prompt"] = _microseconds(lambda _: block_keys(b"root", prompt, 16), repeat)
        tokenizer, text = Tokenizer(MODEL), prompt_text(LONG)
        kinds["tokenize the prompt"] = _microseconds(lambda _: tokenizer.encode(text), repeat)
    return [{"instances": count, "what": what, "us_p50": round(us, 1)} for what, us in kinds.items()]


def _microseconds(work: Callable[[int], object], repeat: int, after: Callable[[int], object] | None = None) -> float:
    """The median, of this thread's processor time."""
    times = []
    for turn in range(repeat):
        started = time.thread_time_ns()
        work(turn)
        times.append((time.thread_time_ns() - started) / 1e3)
        if after is not None:
            after(turn)
    return statistics.median(times)


def _print(rows: list[dict[str, Any]], decisions: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("fleet")
    for column in (
        "prompt",
        "tokens",
        "stream",
        "connections",
        "requests/s",
        "CPU ms",
        "first byte ms",
        "ms p50",
        "p99",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["fleet"],
            f"{row['prompt_tokens']:,}",
            str(row["output_tokens"]),
            "yes" if row["stream"] else "no",
            str(row["connections"]),
            f"{row['requests_per_s']:,.0f}",
            f"{row['router_cpu_ms']:.2f}",
            *(f"{row[name]:.2f}" for name in ("first_byte_ms_p50", "ms_p50", "ms_p99")),
        )
    report.show(table)
    counts = sorted({row["instances"] for row in decisions})
    table = Table("decision, CPU µs, 8k tokens", *(f"{count} instances" for count in counts), show_edge=False)
    times = {(row["what"], row["instances"]): f"{row['us_p50']:.0f}" for row in decisions}
    for what in dict.fromkeys(row["what"] for row in decisions):
        table.add_row(what, *(times.get((what, count), "") for count in counts))
    report.show(table)


if __name__ == "__main__":
    from pdserve.flags import command_of

    report.main(command_of(Settings, benchmark))
