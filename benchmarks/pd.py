"""What disaggregation costs or gains on this machine: `python benchmarks/pd.py`.

Two deployments of one model side by side: 1P+1D with a share of the cores each, and one `both` instance with all cores.
A closed loop of streaming clients sends the same requests to each of them in turn, round after round.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import report
from rich.console import Console
from rich.table import Table

from pdserve.config import UpConfig, flag
from pdserve.deployment import Deployment, free_port
from pdserve.errors import SetupError
from pdserve.flags import command_of
from pdserve.lifetime import Stage


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("requests of a round", 96)
    concurrency: int = flag("requests under way at a time", 16)
    prompt_tokens: int = flag("tokens of each prompt", 128)
    output_tokens: int = flag("tokens of each answer", 64)
    connector: str = flag("of the 1P+1D deployment; default: a segment of shared memory", "")
    repeat: int = flag("rounds of each deployment, in turn", 3)
    dtype: str = flag("of weights and KV", "bfloat16")


QUICK = {"requests": 4, "concurrency": 2, "prompt_tokens": 20, "output_tokens": 5, "repeat": 1}
# Hidden 256, 4 layers, a vocabulary of 4,096: what FLOPs there are, two cores have to share with everything else.
SMALL = checkpoints.Shape(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=688, context=2048, vocabulary=4096
)
COLOCATED, SPLIT = "1 both", "1P+1D"
TIMEOUT_S = 300.0


@dataclass
class Reply:
    """One request, seen by its client. Seconds on one clock; `arrivals` has one entry per token."""

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
        seconds: from the first request to the last token.
        handovers: of each request, first token → decode has its KV; empty where nothing was handed over.
    """

    seconds: float
    replies: list[Reply]
    handovers: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(reply.arrivals) for reply in self.replies) / self.seconds


def benchmark(settings: Settings) -> None:
    """Compare 1P+1D with one colocated instance: throughput, TTFT, ITL, hand-over."""
    shape = checkpoints.TINY if settings.quick else replace(SMALL, dtype=settings.dtype)
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making the checkpoint") as status:
        model = checkpoints.make(shape, Path(folder))
        with ExitStack() as stack:
            deployments = {
                name: stack.enter_context(Deployment(config, lambda _: None))
                for name, config in _configs(model, settings).items()
            }
            for deployment in deployments.values():
                deployment.wait_ready()
            rounds: dict[str, list[Round]] = {name: [] for name in deployments}
            for turn in range(settings.repeat + 1):
                for name, deployment in deployments.items():
                    status.update(f"{name}: " + (f"round {turn} of {settings.repeat}" if turn else "warming up"))
                    measured = asyncio.run(_round(deployment, settings, shape.vocabulary, seed=turn))
                    if turn:
                        rounds[name].append(measured)
    rows = [_row(name, each, rounds[COLOCATED]) for name, each in rounds.items()]
    _print(rows)
    print(report.write("pd", settings, {"rows": rows}))


def _configs(model: Path, settings: Settings) -> dict[str, UpConfig]:
    common = UpConfig(model=str(model), dtype=settings.dtype, max_num_seqs=settings.concurrency)
    split = replace(common, port=free_port(), prefill=1, decode=1, local_prefill_tokens=0)
    colocated = replace(common, port=free_port(), prefill=0, decode=0, both=1)
    return {COLOCATED: colocated, SPLIT: replace(split, connector=settings.connector) if settings.connector else split}


async def _round(deployment: Deployment, settings: Settings, vocabulary: int, seed: int) -> Round:
    chosen = random.Random(seed)
    prompts = [[chosen.randrange(vocabulary) for _ in range(settings.prompt_tokens)] for _ in range(settings.requests)]
    waiting = iter(enumerate(prompts))
    replies: list[Reply] = []
    names: list[str] = []
    async with httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S) as http:

        async def client() -> None:
            for i, prompt in waiting:
                name = f"pd-{seed}-{i}"
                replies.append(await ask(http, deployment.config.name, name, prompt, settings.output_tokens))
                names.append(name)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(settings.concurrency)))
        seconds = time.perf_counter() - started
        timelines = [(await http.get(f"/debug/requests/{name}")).json() for name in names]
    handovers = [_handover(timeline) for timeline in timelines]
    return Round(seconds, replies, [one for one in handovers if one is not None])


async def ask(http: httpx.AsyncClient, model: str, name: str, prompt: list[int], count: int, **fields: object) -> Reply:
    """Streams one answer of so many tokens, by a request of that name.

    Raises:
        SetupError: it was refused, or is of another length.
    """
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **fields}
    reply = Reply(time.perf_counter(), [])
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as response:
        if response.status_code != 200:
            raise SetupError(f"the router answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                    reply.arrivals += [now] * len(choice.get("token_ids") or [])
    if len(reply.arrivals) != count:
        raise SetupError(f"{len(reply.arrivals)} tokens came instead of {count}")
    return reply


def _handover(timeline: dict[str, Any]) -> float | None:
    stages = timeline["stages_ms"]
    if Stage.KV_READY not in stages:
        return None
    return float(stages[Stage.KV_READY] - stages[Stage.FIRST_TOKEN]) / 1e3


def _row(name: str, rounds: list[Round], colocated: list[Round]) -> dict[str, Any]:
    """Medians over rounds; the ratios are medians of each round's ratio to the colocated round beside it."""

    replies = [reply for each in rounds for reply in each.replies]
    ttfts, gaps = [reply.ttft for reply in replies], [gap for reply in replies for gap in reply.gaps]
    handovers = [one for each in rounds for one in each.handovers]
    pairs = list(zip(rounds, colocated, strict=True))
    return {
        "deployment": name,
        "requests": len(replies),
        "output_tok_per_s": round(statistics.median(each.tokens_per_s for each in rounds), 1),
        "output_tok_per_s_all": [round(each.tokens_per_s, 1) for each in rounds],
        "ttft_ms_p50": milliseconds(ttfts, 50),
        "ttft_ms_p99": milliseconds(ttfts, 99),
        "itl_ms_p50": milliseconds(gaps, 50),
        "itl_ms_p99": milliseconds(gaps, 99),
        "handover_ms_p50": milliseconds(handovers, 50),
        "handed_over": len(handovers),
        "throughput_ratio": round(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs), 2),
        "ttft_p50_ratio": round(statistics.median(_ttft_p50(a) / _ttft_p50(b) for a, b in pairs), 2),
    }


def milliseconds(seconds: list[float], percent: int) -> float:
    """A percentile; 0 of nothing."""
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1e3, 2) if seconds else 0.0


def _ttft_p50(one: Round) -> float:
    return statistics.median(reply.ttft for reply in one.replies)


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("deployment")
    for column in (
        "output tok/s",
        "ratio",
        "TTFT p50 ms",
        "ratio",
        "TTFT p99",
        "ITL p50 ms",
        "ITL p99",
        "hand-over p50 ms",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["deployment"],
            f"{row['output_tok_per_s']:,.0f}",
            f"{row['throughput_ratio']:.2f}",
            f"{row['ttft_ms_p50']:.1f}",
            f"{row['ttft_p50_ratio']:.2f}",
            f"{row['ttft_ms_p99']:.1f}",
            f"{row['itl_ms_p50']:.1f}",
            f"{row['itl_ms_p99']:.1f}",
            f"{row['handover_ms_p50']:.1f}" if row["handed_over"] else "–",
        )
    report.show(table)


if __name__ == "__main__":
    report.main(command_of(Settings, benchmark))
