"""Cost of handing a prompt's KV from prefill to decode: `python benchmarks/handover.py`.

For each connector, a router, a prefill and a decode instance run as processes. Prompts of each length are sent one at a
time, streaming; the stages come from /debug/requests/{id}, the gap before the second token from the client's clock. Every
prompt is new, so no cache contains it. The hand-over is compared with one plain memcpy of its bytes, and with that and a
frame of the control plane each way between two processes.

With --turns, each prompt is followed by the next turn of its conversation: prompt, answer and 32 new tokens. Decode has the
KV of the first two, so only the rest should move to it; prefill has that of the prompt, and should load the answer's from the
store. The bytes are compared with that forecast.
"""

import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import numpy as np
import report
import stores
from rich.console import Console

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, UpConfig, flag, parse_size
from pdserve.control.frame_connection import FrameConnection
from pdserve.errors import SetupError
from pdserve.lifetime import Stage
from pdserve.lines.event_stream import read_events
from pdserve.proto import pdserve_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    tokens: str = flag("prompt lengths, comma separated", "1,16,128,512,1024,2048,8192")
    connectors: str = flag("comma separated, see the README", "shm,file-tmpfs,file-disk,redis-tcp,redis-unix,nixl")
    model: str = flag("checkpoint directory; default: a random one with the KV of Qwen3-0.6B and little else", "")
    repeat: int = flag("prompts of each length", 3)
    turns: bool = flag("also ask the next turn, and compare the bytes that move with the forecast", False)
    threads: int | None = flag("CPU threads of each instance; default: an equal share of the cores", None)
    max_num_batched_tokens: int = flag("tokens of a prefill chunk at most", EngineConfig.max_num_batched_tokens)
    store_size: str = flag("what each store may take; twice the KV of the longest prompt is enough", "1536MiB")
    disk: str = flag("folder for file-disk; default: the system's for temporary files", "")

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        for name in self.connector_names:
            if name not in CONNECTORS:
                raise ValueError(f"--connectors {name!r} is not known; there are: {', '.join(CONNECTORS)}")
        if not all(length.isdecimal() and int(length) for length in self.tokens.split(",")):
            raise ValueError(f"--tokens must be numbers from 1 on, comma separated, not {self.tokens!r}")

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.tokens.split(",")]

    @property
    def connector_names(self) -> list[str]:
        return self.connectors.split(",")


QUICK = {"tokens": "1,40", "repeat": 1, "connectors": "shm", "store_size": "64MiB"}
WARM_UPS = 2  # with the longest prompt: touches the memory of pools, stores and buffers
OUTPUT_TOKENS = 3
ANSWER_TOKENS, NEW_TOKENS = 65, 32  # of a turn with --turns; the answer's last token has no KV
TIMELINE_TIMEOUT_S = 10.0  # the last stamps of a request reach the router after its last token
TIMEOUT_S = 300.0  # per request
STORE_BACK_S = 1.0  # for decode's last stores of an answer, which no stage shows
MIB = 1 << 20


@dataclass
class Sample:
    """One request. Times in milliseconds.

    Attributes:
        store, load: from the first token until all KV is in the store, and from then until decode has it.
        second_token: between the first two tokens, as the client sees them.
        decode_started: the same on the side of the instances.
        memcpy: of the same bytes, just after the request.
        frames: a frame each way between two processes, just after the request.
        whole: all of the prompt's KV was computed by prefill, and loaded by decode.
    """

    prefill: float
    store: float
    load: float
    second_token: float
    decode_started: float
    bytes: int
    store_gb_per_s: float
    load_gb_per_s: float
    memcpy: float
    frames: float
    whole: bool

    @property
    def handover(self) -> float:
        return self.store + self.load


@dataclass
class Measured:
    """Results of one connector by prompt length, or the reason why it could not be measured completely."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""


def benchmark(settings: Settings) -> None:
    """Measure the hand-over: its stages, bytes and rates, for each prompt length and connector."""
    shape = checkpoints.TINY if settings.quick else checkpoints.WIDE_KV
    settings = settings.sized(QUICK)
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making the checkpoint") as status:
        model = Path(settings.model) if settings.model else checkpoints.make(shape, Path(folder))
        for name in settings.connector_names:
            measured[name] = _measure(name, model, settings, status.update)
    skipped = {name: one.skipped for name, one in measured.items() if one.skipped}
    rows = [_row(name, length, samples) for name, one in measured.items() for length, samples in one.samples.items()]
    _print(rows, skipped)
    turns = [turn for one in measured.values() for turn in one.turns]
    if turns:
        report.show(turns)
    shown = replace(settings, model=Path(settings.model).name, disk="")
    print(report.write("handover", shown, {"skipped": skipped, "rows": rows, "turns": turns}))


# ---- connectors: each a context manager that gives the URL of a store -----------------------------------

CONNECTORS: dict[str, Callable[[Settings], AbstractContextManager[str]]] = {
    "shm": lambda settings: stores.shm(parse_size(settings.store_size)),
    "file-tmpfs": lambda settings: stores.file("/dev/shm", parse_size(settings.store_size)),
    "file-disk": lambda settings: stores.file(settings.disk or None, parse_size(settings.store_size)),
    "redis-tcp": lambda settings: stores.redis("redis://127.0.0.1:{port}/0", parse_size(settings.store_size)),
    "redis-unix": lambda settings: stores.redis("redis+unix://{socket}", parse_size(settings.store_size)),
    "nixl": lambda settings: nullcontext("nixl://"),
}


# ---- measuring --------------------------------------------------------------------------------------------------------


def _measure(name: str, model: Path, settings: Settings, say: Callable[[str], None]) -> Measured:
    """Start a deployment for one connector, and send prompts: each length in turn, `repeat` times."""
    measured = Measured()
    log_lines: list[str] = []
    say(f"{name}: starting")
    try:
        with (
            CONNECTORS[name](settings) as url,
            Deployment(_config(model, url, settings), log_lines.append) as deployment,
        ):
            deployment.wait_ready()
            client = Client(deployment)
            for i in range(WARM_UPS):
                say(f"{name}: warming up, {i + 1} of {WARM_UPS}")
                client.ask(max(settings.lengths))
            for turn in range(settings.repeat):
                for length in settings.lengths:
                    say(f"{name}: {length} tokens, {turn + 1} of {settings.repeat}")
                    measured.samples.setdefault(length, []).append(client.ask(length))
                    if settings.turns:
                        measured.turns.append({"connector": name, **client.ask_turns(length)})
    except SetupError as error:
        reason = next((line for line in reversed(log_lines) if " pdserve: " in line), str(error))
        measured.skipped = reason.partition(" pdserve: ")[2] or reason
    except BaseException:
        print("\n".join(log_lines))
        raise
    return measured


def _config(model: Path, connector: str, settings: Settings) -> UpConfig:
    """Configure pools of twice the longest prompt: an instance has at most half of its pool in flight."""
    return UpConfig(
        local_prefill_tokens=0,
        model=str(model),
        connector=connector,
        port=free_port(),
        threads=settings.threads,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        # Twice the longest: what is stored while it is computed may be in flight, too.
        num_blocks=2
        * _blocks(max(settings.lengths) + (2 * ANSWER_TOKENS + NEW_TOKENS if settings.turns else OUTPUT_TOKENS)),
        store_generated="on" if settings.turns else "auto",
    )


def _blocks(tokens: int) -> int:
    return -(-tokens // EngineConfig.block_size)


class Client:
    """Sends one request at a time, and reads its timeline."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._http = httpx.Client(base_url=deployment.url, timeout=TIMEOUT_S)
        self._random = random.Random(0)
        self._requests = 0
        self._copier = Copier()
        self._echo = Echo()

    def ask(self, length: int) -> Sample:
        """Send a prompt that has not been sent before."""
        self._deployment.check_children()
        self._requests += 1
        name = f"handover-{self._requests}"
        times = [at for at, _ in self._stream(name, self._tokens(length), OUTPUT_TOKENS)]
        timeline = self._timeline(name)
        at = {Stage(stage): float(ms) for stage, ms in timeline["stages_ms"].items()}
        stored, loaded = timeline["stored"], timeline["loaded"]
        return Sample(
            prefill=at[Stage.FIRST_TOKEN] - at[Stage.PREFILL_STARTED],
            store=at[Stage.KV_STORED] - at[Stage.FIRST_TOKEN],
            load=at[Stage.KV_READY] - at[Stage.KV_STORED],
            second_token=(times[1] - times[0]) * 1e3,
            decode_started=at[Stage.DECODE_STARTED] - at[Stage.FIRST_TOKEN],
            bytes=loaded["bytes"],
            store_gb_per_s=stored["gb_per_s"],
            load_gb_per_s=loaded["gb_per_s"],
            memcpy=self._copier.milliseconds(loaded["bytes"]),
            frames=self._echo.milliseconds(),
            whole=loaded["blocks"] == _blocks(length) and timeline["prompt_tokens_by_source"]["computed"] == length,
        )

    def ask_turns(self, length: int) -> dict[str, Any]:
        """Send a new prompt and its next turn; return what moved for that, and what had to."""
        self._requests += 1
        name, prompt = f"turn-{self._requests}", self._tokens(length)
        answer = [token for _, token in self._stream(name, prompt, ANSWER_TOKENS)]
        block_bytes = self._timeline(name)["loaded"]["bytes"] // _blocks(length)
        full_prompt, full = length // EngineConfig.block_size, (length + ANSWER_TOKENS - 1) // EngineConfig.block_size
        next_prompt = [*prompt, *answer, *self._tokens(NEW_TOKENS)]
        time.sleep(STORE_BACK_S)
        self._stream(f"{name}-next", next_prompt, OUTPUT_TOKENS)
        timeline = self._timeline(f"{name}-next")
        return {
            "tokens": length,
            "next turn": len(next_prompt),
            "whole bytes": _blocks(len(next_prompt)) * block_bytes,
            "forecast bytes": (_blocks(len(next_prompt)) - full) * block_bytes,
            "bytes to decode": timeline["loaded"]["bytes"],
            "answer's tokens in the store": (full - full_prompt) * EngineConfig.block_size,
            "loaded by prefill": timeline["prompt_tokens_by_source"]["loaded"],
            "computed by prefill": timeline["prompt_tokens_by_source"]["computed"],
        }

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(count)]

    def _stream(self, name: str, prompt: list[int], count: int) -> list[tuple[float, int]]:
        """Return the arrival time of each of `count` tokens, and its id."""
        body = {"model": self._deployment.config.name, "prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens: list[tuple[float, int]] = []
        with self._http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as reply:
            if reply.status_code != 200:
                raise SetupError(f"the router answered {reply.status_code}: {reply.read().decode()}")
            for data in read_events(reply.iter_bytes()):
                if data != "[DONE]":
                    now = time.perf_counter()
                    for choice in json.loads(data).get("choices", []):
                        tokens += [(now, token) for token in choice.get("token_ids") or []]
        if len(tokens) != count:
            raise SetupError(f"{len(tokens)} tokens came instead of {count}")
        return tokens

    def _timeline(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + TIMELINE_TIMEOUT_S
        while True:
            timeline: dict[str, Any] = self._http.get(f"/debug/requests/{name}").raise_for_status().json()
            if {Stage.KV_READY, Stage.KV_STORED, Stage.FINISHED} <= timeline["stages_ms"].keys():
                return timeline
            if time.monotonic() > deadline:
                raise SetupError(f"the timeline of {name} stays incomplete: {timeline['stages_ms']}")
            time.sleep(0.02)


class Copier:
    """Measures memcpy between two buffers whose pages have been touched before."""

    COPIES = 9
    MIN_BYTES = 1 << 28  # buffer length; small copies use different offsets, so that no cache serves them

    def __init__(self) -> None:
        self._source = self._target = np.ones(0, np.uint8)

    def milliseconds(self, nbytes: int) -> float:
        """Return the median of several copies."""
        if nbytes > len(self._source) or not len(self._source):
            size = max(nbytes, self.MIN_BYTES)
            self._source, self._target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        step = (len(self._source) - nbytes) // self.COPIES
        times = []
        for i in range(self.COPIES):
            span = slice(i * step, i * step + nbytes)
            started = time.perf_counter()
            np.copyto(self._target[span], self._source[span])
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3


HAND_OVER = pb.RouterFrame(hand_over=pb.HandOver(request_id="handover-1", num_blocks=1, coming=1, first_token=1))


class _Peer(FrameConnection[pb.RouterFrame, pb.RouterFrame]):
    """One end of a connection that passes frames to `receive`."""

    def __init__(self, on_frame: Callable[["_Peer"], object]) -> None:
        super().__init__(pb.RouterFrame)
        self._on_frame = on_frame

    def receive(self, frame: pb.RouterFrame) -> None:
        self._on_frame(self)


def _echo(port: Connection) -> None:
    """Answer each frame with another, in a process of its own."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Peer(lambda peer: peer.send(HAND_OVER)), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class Echo:
    """Measures a frame each way between this process and another one."""

    FRAMES = 51

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        here, there = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=_echo, args=(there,), daemon=True).start()
        there.close()  # so that this end notices if the other has failed
        self._port = here.recv()

    def milliseconds(self) -> float:
        """Return the median of several exchanges."""
        return self._loop.run_until_complete(self._exchange())

    async def _exchange(self) -> float:
        times = list[float]()
        arrived = asyncio.Event()
        connection = _Peer(lambda _: arrived.set())
        await self._loop.create_connection(lambda: connection, "127.0.0.1", self._port)
        for _ in range(self.FRAMES):
            arrived.clear()
            started = time.perf_counter()
            connection.send(HAND_OVER)
            await arrived.wait()
            times.append(time.perf_counter() - started)
        connection.close()
        return statistics.median(times) * 1e3


def _row(connector: str, length: int, samples: list[Sample]) -> dict[str, Any]:
    def median(value: Callable[[Sample], float], digits: int = 4) -> float:
        return report.rounded(statistics.median(map(value, samples)), digits)

    return {
        "connector": connector,
        "prompt_tokens": length,
        "bytes": samples[-1].bytes,
        "prefill_ms": median(lambda s: s.prefill),
        "first_token_to_kv_stored_ms": median(lambda s: s.store),
        "kv_stored_to_kv_ready_ms": median(lambda s: s.load),
        "handover_ms": median(lambda s: s.handover),
        "handover_ms_best": round(min(s.handover for s in samples), 3),
        "handover_ms_all": [round(s.handover, 3) for s in samples],
        "second_token_gap_ms": median(lambda s: s.second_token),
        "first_token_to_decode_started_ms": median(lambda s: s.decode_started),
        "store_gb_per_s": median(lambda s: s.store_gb_per_s),
        "load_gb_per_s": median(lambda s: s.load_gb_per_s),
        "memcpy_ms": median(lambda s: s.memcpy),
        "handover_to_memcpy": median(lambda s: s.handover / s.memcpy, 3),
        "frames_ms": median(lambda s: s.frames),
        "handover_to_frames_and_memcpy": median(lambda s: s.handover / (s.frames + s.memcpy), 3),
        "whole": sum(s.whole for s in samples),
        "requests": len(samples),
    }


STAGES = {
    "prefill ms": "prefill_ms",
    "store ms": "first_token_to_kv_stored_ms",
    "load ms": "kv_stored_to_kv_ready_ms",
    "hand-over ms": "handover_ms",
    "best": "handover_ms_best",
    "2nd token ms": "second_token_gap_ms",
}
RATES = {"store GB/s": "store_gb_per_s", "load GB/s": "load_gb_per_s", "memcpy ms": "memcpy_ms"}


def _print(rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    shown = [
        {"connector": row["connector"], "tokens": row["prompt_tokens"], "MiB": f"{row['bytes'] / MIB:.2f}"}
        | {column: f"{row[name]:.1f}" for column, name in STAGES.items()}
        | {column: f"{row[name]:.2f}" for column, name in RATES.items()}
        | {"ratio": f"{row['handover_to_memcpy']:.2f}", "with frames": f"{row['handover_to_frames_and_memcpy']:.2f}"}
        | {"whole": f"{row['whole']}/{row['requests']}"}
        for row in rows
    ]
    if shown:
        report.show(shown)
    for name, reason in skipped.items():
        print(f"{name} was not measured, or not to the end: {reason}")


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
