"""Cost and gain of disaggregation on this machine: `python benchmarks/pd.py`.

Deployments of one model in turn on the same cores: 1P+1D with every prompt on prefill, by forecast, and with targets between
which roles give way; and the colocated arrangements that one would run instead: one `both` instance with all threads, or two
with half of them, also with the ITL targets. A closed loop of streaming clients sends the same requests to each of them,
round after round, each time to a new deployment. For each figure, each 1P+1D is compared with the colocated arrangement that
is best in it. With --peers, vLLM takes turns too: as one server, and in its disaggregated mode.

With --paced, instances sleep for the times of forecast.py's profile instead of computing, so that --instances may be more
than the cores: 2P+2D beside four colocated ones.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import checkpoints
import httpx
import peer_process
import report
from forecast import PROFILE
from peer_process import Server
from rich.console import Console

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag
from pdserve.errors import SetupError
from pdserve.lifetime import Stage
from pdserve.lines.event_stream import read_events_async
from pdserve.profile.profile import EngineFacts


@dataclass(frozen=True, kw_only=True)
class Settings(peer_process.Settings):
    requests: int = flag("requests of a round", 96)
    concurrency: int = flag("requests under way at a time", 16)
    mix: str = flag("long-prompts: 1,500 tokens in, 64 out; long-answers: 200, 128; balanced: 600, 100", "long-answers")
    prompt_tokens: int = flag("mean length of a prompt, which is half to one and a half of it; default: of the mix", 0)
    output_tokens: int = flag("tokens of each answer; default: of the mix", 0)
    itl_targets: str = flag("values of --itl-target-ms, of 1P+1D and of two colocated instances", "50")
    ttft_target_ms: int = flag("--ttft-target-ms of 1P+1D with an ITL target; default: of the mix", 0)
    connector: str = flag("of the 1P+1D deployment; default: a segment of shared memory", "")
    instances: int = flag("of each arrangement, half of them for prefill; 2 or 4", 2, least=2)
    paced: bool = flag("instances sleep for profiled times instead of computing", False)
    repeat: int = flag("rounds of each deployment, started anew, in turn", 3)
    dtype: str = flag("of weights and KV", "bfloat16")
    peers: str = flag("also measure, in its own environment: vllm", "")


QUICK = {
    "requests": 4,
    "ttft_target_ms": 20,
    "concurrency": 2,
    "prompt_tokens": 20,
    "output_tokens": 5,
    "itl_targets": "20",
    "repeat": 1,
}
MIXES = {
    "long-prompts": {"prompt_tokens": 1500, "output_tokens": 64, "ttft_target_ms": 500},
    "long-answers": {"prompt_tokens": 200, "output_tokens": 128, "ttft_target_ms": 100},
    "balanced": {"prompt_tokens": 600, "output_tokens": 100, "ttft_target_ms": 200},
}
# Hidden 256, 4 layers, a vocabulary of 4,096: small enough for two cores, which all processes share.
SMALL = checkpoints.Shape(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=688, context=4096, vocabulary=4096
)
DEMO_VOCABULARY = 2048
FIGURES = {  # key in the JSON: name in the table
    "output_tok_per_s": "output tok/s",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p99": "TTFT p99 ms",
    "itl_ms_p50": "ITL p50 ms",
    "itl_ms_p99": "ITL p99 ms",
}
TIMEOUT_S = 300.0
KV_CACHE_MEMORY = "192MiB"  # of each instance: all requests fit, and many deployments
PEER_ROUND_S = 25.0  # limit of a peer's round: vLLM's pair may stall


@dataclass
class Reply:
    """One request as measured by its client. Seconds on one clock; `arrivals` has one entry per token."""

    sent: float
    arrivals: list[float]

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass
class Round:
    """All requests of one round on one deployment.

    Attributes:
        seconds: from the first request to the last token, or until the round was stopped.
        replies: those complete at that time.
        handovers: of each request, from the first token until decode has its KV; empty without hand-overs.
        unfinished: number of incomplete requests.
    """

    seconds: float
    replies: list[Reply]
    handovers: list[float]
    unfinished: int

    def figures(self) -> dict[str, float]:
        ttfts, gaps = [one.ttft for one in self.replies], [gap for one in self.replies for gap in one.gaps]
        return {
            "output_tok_per_s": round(sum(len(one.arrivals) for one in self.replies) / self.seconds, 1),
            "ttft_ms_p50": milliseconds(ttfts, 50),
            "ttft_ms_p99": milliseconds(ttfts, 99),
            "itl_ms_p50": milliseconds(gaps, 50),
            "itl_ms_p99": milliseconds(gaps, 99),
        }


class Ours:
    """A deployment of pdserve."""

    round_s: float | None = None  # no limit

    def __init__(self, config: UpConfig, stack: ExitStack) -> None:
        self._deployment = stack.enter_context(Deployment(config, lambda _: None))
        self.url, self.model = self._deployment.url, config.name

    def wait_ready(self) -> None:
        self._deployment.wait_ready()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        yield

    async def ask(self, http: httpx.AsyncClient, name: str, prompt: list[int], count: int) -> Reply:
        # Deployments of this process share a store, in which one would find the KV that another has computed.
        return await ask(http, self.model, name, prompt, count, cache_salt=self.url)

    async def handovers(self, http: httpx.AsyncClient, names: list[str]) -> list[float]:
        """Return the hand-over seconds of the requests that had one."""
        stages = [(await http.get(f"/debug/requests/{name}")).json()["stages_ms"] for name in names]
        return [(each[Stage.KV_READY] - each[Stage.FIRST_TOKEN]) / 1e3 for each in stages if Stage.KV_READY in each]


class Vllm:
    """One vLLM server, or a prefill and a decode server. The clients do the work of vLLM's proxy, which costs nothing."""

    round_s: float | None = PEER_ROUND_S

    def __init__(self, settings: Settings, model: Path, stack: ExitStack, *roles: str) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(roles))
        self._servers: list[Server] = []
        for role in roles:
            context = 3 * settings.prompt_tokens // 2 + settings.output_tokens
            server = Server("vllm", settings.peers_folder, model, threads, settings.dtype, context, role)
            stack.callback(server.close)
            self._servers.append(server)
        self.url = self._servers[-1].url

    def wait_ready(self) -> None:
        for server in self._servers:
            server.wait_ready()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server.at_work())
            yield

    async def ask(self, http: httpx.AsyncClient, name: str, prompt: list[int], count: int) -> Reply:
        sent = time.perf_counter()
        fields = {}
        if len(self._servers) > 1:
            wanted = {"do_remote_decode": True, "do_remote_prefill": False}
            body = {"model": "model", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted}
            answer = await http.post(f"{self._servers[0].url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise SetupError(f"vLLM's prefill answered {answer.status_code}: {answer.text}")
            fields["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        return replace(await ask(http, "model", name, prompt, count, **fields), sent=sent)

    async def handovers(self, http: httpx.AsyncClient, names: list[str]) -> list[float]:
        """Return nothing: vLLM reports no such figure."""
        return []


def benchmark(settings: Settings) -> None:
    """Compare 1P+1D with the best colocated arrangement of the same cores: throughput, TTFT, ITL."""
    peers = settings.named(("vllm",))
    shape = checkpoints.TINY if settings.quick else replace(SMALL, dtype=settings.dtype)
    if settings.mix not in MIXES:
        raise SetupError(f"--mix {settings.mix} is not known; there is: {', '.join(MIXES)}")
    settings = report.with_defaults_replaced(settings.sized(QUICK), MIXES[settings.mix])
    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("making the checkpoint"))
        model = stack.enter_context(peer_process.checkpoint(shape, settings.peers_folder))
        common = UpConfig(
            model=str(model), dtype=settings.dtype, max_num_seqs=settings.concurrency, kv_cache_memory=KV_CACHE_MEMORY
        )
        vocabulary = shape.vocabulary
        if settings.paced:
            profile = Path(stack.enter_context(TemporaryDirectory()), "profile.json")
            PROFILE.save(profile)
            common, vocabulary = paced(common, PROFILE.engine, profile), DEMO_VOCABULARY
        if settings.connector:
            common = replace(common, connector=settings.connector)
        targets = [float(each) for each in settings.itl_targets.split(",") if each]
        disaggregated, colocated = _disaggregated(common, settings, targets), _colocated(common, settings, targets)
        ours, running = disaggregated | colocated, dict[str, Vllm]()
        if peers:
            status.update("starting vLLM, which compiles the first time")
            vllm = {"vLLM, 1 server": [""], "vLLM, 1P+1D": ["kv_producer", "kv_consumer"]}
            running = {name: Vllm(settings, model, stack, *roles) for name, roles in vllm.items()}
            for server in running.values():
                server.wait_ready()
        names = [*ours, *running]
        rounds: dict[str, list[Round]] = {name: [] for name in names}
        for turn in range(settings.repeat):
            offset = turn % len(names)  # another deployment is the first one in each round
            for name in names[offset:] + names[:offset]:
                status.update(f"{name}: round {turn + 1} of {settings.repeat}")
                with ExitStack() as own:  # started anew: the speed of a process varies from start to start
                    candidate = running[name] if name in running else Ours(replace(ours[name], port=free_port()), own)
                    candidate.wait_ready()
                    with candidate.at_work():
                        asyncio.run(_round(candidate, settings, vocabulary, f"warm-up-{turn}"))
                        rounds[name].append(asyncio.run(_round(candidate, settings, vocabulary, f"round-{turn}")))
    rows = {name: _row(name, each) for name, each in rounds.items()}
    against = [_against_best(name, key, rows, [*colocated]) for name in disaggregated for key in FIGURES]
    _print(rows, against)
    for row in rows.values():
        if row["unfinished"]:
            print(
                f"{row['deployment']}: {row['unfinished']} requests were cut off, after {PEER_ROUND_S:g} s of their rounds"
            )
    print(report.write("pd", replace(settings, peers_folder=""), {"rows": [*rows.values()], "against_best": against}))


def paced(common: UpConfig, engine: EngineFacts, profile: Path) -> UpConfig:
    """Return the settings with instances that sleep for the times of a profile."""
    sizes = {name: getattr(engine, name) for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens")}
    return replace(common, model="demo", paced=str(profile), threads=1, kv_cache_memory=None, **sizes)


def _disaggregated(common: UpConfig, settings: Settings, targets: list[float]) -> dict[str, UpConfig]:
    """Return the arrangements of a split into halves, by name: every prompt to prefill, by forecast, and with targets."""
    half = settings.instances // 2
    split, common = f"{half}P+{half}D", replace(common, prefill=half, decode=half)
    with_targets = {
        f"{split}, ITL {target:g} ms": replace(common, itl_target_ms=target, ttft_target_ms=settings.ttft_target_ms)
        for target in targets
    }
    return {f"{split}, fixed": replace(common, local_prefill_tokens=0), split: common, **with_targets}


def _colocated(common: UpConfig, settings: Settings, targets: list[float]) -> dict[str, UpConfig]:
    """Return the arrangements that do not disaggregate, by name. Instances divide the threads; of paced ones, each has its
    own, so that fewer of them would be fewer cores."""
    size = settings.instances
    arrangements: list[tuple[int, float | None]] = [(size, None), *((size, target) for target in targets)]
    if not settings.paced:
        arrangements.insert(0, (1, None))
    return {
        f"{both} both" + (f", ITL {target:g} ms" if target else ""): replace(
            common, prefill=0, decode=0, both=both, itl_target_ms=target
        )
        for both, target in arrangements
    }


async def _round(candidate: Ours | Vllm, settings: Settings, vocabulary: int, stream: str) -> Round:
    """Send prompts that are drawn from a stream of this name: the same ones to each candidate, and no others."""
    chosen = random.Random(stream)
    mean = settings.prompt_tokens
    lengths = [chosen.randint(mean - mean // 2, mean + mean // 2) for _ in range(settings.requests)]
    prompts = [[chosen.randrange(vocabulary) for _ in range(length)] for length in lengths]
    waiting = iter(enumerate(prompts))
    replies: list[Reply] = []
    names: list[str] = []
    async with httpx.AsyncClient(base_url=candidate.url, timeout=TIMEOUT_S) as http:

        async def client() -> None:
            for i, prompt in waiting:
                name = f"pd-{stream}-{i}"
                replies.append(await candidate.ask(http, name, prompt, settings.output_tokens))
                names.append(name)

        started = time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(candidate.round_s):
                await asyncio.gather(*(client() for _ in range(settings.concurrency)))
        seconds = time.perf_counter() - started
        return Round(seconds, replies, await candidate.handovers(http, names), len(prompts) - len(replies))


async def ask(http: httpx.AsyncClient, model: str, name: str, prompt: list[int], count: int, **fields: object) -> Reply:
    """Stream one answer of the given number of tokens, with the given request id.

    Raises:
        SetupError: the request was refused, or the answer has another length.
    """
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **fields}
    reply = Reply(time.perf_counter(), [])
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as response:
        if response.status_code != 200:
            raise SetupError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for data in read_events_async(response.aiter_bytes()):
            if data != "[DONE]":
                now = time.perf_counter()
                for choice in json.loads(data).get("choices", []):
                    reply.arrivals += [now] * len(choice.get("token_ids") or [])
    if len(reply.arrivals) != count:
        raise SetupError(f"{len(reply.arrivals)} tokens came instead of {count}")
    return reply


def _row(name: str, rounds: list[Round]) -> dict[str, Any]:
    """Each figure is the median over rounds; `rounds` has all of them."""
    figures = [each.figures() for each in rounds]
    handovers = [one for each in rounds for one in each.handovers]
    return {
        "deployment": name,
        "requests": sum(len(each.replies) for each in rounds),
        "unfinished": sum(each.unfinished for each in rounds),
        **{key: round(statistics.median(each[key] for each in figures), 2) for key in FIGURES},
        "handover_ms_p50": milliseconds(handovers, 50),
        "handed_over": len(handovers),
        "rounds": figures,
    }


def _against_best(name: str, key: str, rows: dict[str, dict[str, Any]], colocated: list[str]) -> dict[str, Any]:
    """Compare a deployment with the colocated arrangement that is best in this figure, each round with the one beside it."""
    choose = max if key == "output_tok_per_s" else min
    best = choose(colocated, key=lambda name: rows[name][key])
    pairs = zip(rows[name]["rounds"], rows[best]["rounds"], strict=True)
    ratios = [round(one[key] / beside[key], 3) for one, beside in pairs if beside[key]]
    return {
        "deployment": name,
        "figure": key,
        "best_colocated": best,
        "ratio": round(statistics.median(ratios or [0]), 2),
        "ratios": ratios,
    }


def milliseconds(seconds: list[float], percent: int) -> float:
    """Return a percentile, or 0 if empty."""
    if len(seconds) < 2:
        return round(sum(seconds) * 1e3, 2)
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1e3, 2)


def _print(rows: dict[str, dict[str, Any]], against: list[dict[str, Any]]) -> None:
    """Print a row per deployment, with the ratios to the best colocated arrangement in brackets."""
    ratios = {(one["deployment"], one["figure"]): f" ({one['ratio']:.2f})" for one in against}
    digits = {key: 0 if key == "output_tok_per_s" else 1 for key in FIGURES}
    shown = [
        {"": name}
        | {title: f"{row[key]:,.{digits[key]}f}{ratios.get((name, key), '')}" for key, title in FIGURES.items()}
        | {"hand-over p50 ms": f"{row['handover_ms_p50']:.1f}" if row["handed_over"] else "–"}
        for name, row in rows.items()
    ]
    report.show(shown)
    print("in brackets: divided by the colocated arrangement that is best in the figure")


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
