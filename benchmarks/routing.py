"""Gain of prefix-aware routing on conversations: `python benchmarks/routing.py`.

One deployment per policy, otherwise identical, side by side. A closed loop of streaming clients sends the turns of real
conversations, scaled down, in order of time, to each of them in turn. Every round has its own cache salt, so that it finds no
blocks of other rounds in pools or store.
"""

import asyncio
import json
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import pd
import report
from rich.console import Console
from rich.table import Table

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag
from pdserve.lines.json_lines import json_lines

TRACE = Path(__file__).parent / "traces" / "mooncake-turns.jsonl"
TRACE_BLOCK = 512  # tokens per hash of the trace


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    policies: str = flag("of prefill and decode, comma separated; the first is what the others are compared with", "")
    requests: int = flag("of the trace, the first so many", 400)
    concurrency: int = flag("requests under way at a time", 8)
    prefill: int = flag("prefill instances of each deployment", 3)
    num_blocks: int = flag("blocks of 16 tokens in each pool", 1024)
    scale: int = flag("prompts and answers are shorter by this factor than in the trace", 32)
    repeat: int = flag("rounds of each deployment, in turn", 3)


POLICIES = "round_robin,prefix_aware,auto"
QUICK = {"policies": "prefix_aware", "requests": 30, "repeat": 1, "prefill": 1, "concurrency": 2}


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    output: int


@dataclass
class Round:
    """Time to first token of each request, and the sources of the prompts' KV in tokens."""

    ttfts: list[float]
    sources: dict[str, int]

    @property
    def tokens(self) -> int:
        return sum(self.sources.values())


def benchmark(settings: Settings) -> None:
    """Compare routing policies on conversations: hit rate, time to the first token."""
    shape = checkpoints.TINY if settings.quick else pd.SMALL
    settings = settings.sized(QUICK)
    settings = report.with_defaults_replaced(settings, {"policies": POLICIES})
    turns = read(settings, shape.vocabulary)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making the checkpoint") as status:
        model = checkpoints.make(shape, Path(folder))
        with ExitStack() as stack:
            deployments = {
                name: stack.enter_context(Deployment(_config(model, name, settings), lambda _: None))
                for name in settings.policies.split(",")
            }
            for deployment in deployments.values():
                deployment.wait_ready()
            rounds: dict[str, list[Round]] = {name: [] for name in deployments}
            for number in range(settings.repeat):
                for name, deployment in deployments.items():
                    status.update(f"{name}: round {number + 1} of {settings.repeat}")
                    rounds[name].append(asyncio.run(play(deployment, turns, settings.concurrency, f"{name}-{number}")))
    base = next(iter(rounds.values()))
    rows = [_row(name, each, base) for name, each in rounds.items()]
    _print(rows)
    print(report.write("routing", settings, {"rows": rows, "most_hits": round(most_hits(turns), 3)}))


def read(settings: Settings, vocabulary: int) -> list[Turn]:
    """Read the trace; each of its blocks becomes `TRACE_BLOCK / scale` tokens, drawn with its hash as the seed."""
    turns = []
    for _, line in islice(json_lines(TRACE.read_text()), settings.requests):
        row = json.loads(line)
        prompt: list[int] = []
        for block in row["hash_ids"]:
            drawn = random.Random(block)
            prompt += [drawn.randrange(vocabulary) for _ in range(TRACE_BLOCK // settings.scale)]
        length = max(1, row["input_length"] // settings.scale)
        turns.append(Turn(prompt[:length], max(2, row["output_length"] // settings.scale)))
    return turns


def most_hits(turns: list[Turn], block: int = 16) -> float:
    """Return the hit rate of a single unbounded cache."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for turn in turns:
        prefixes = [tuple(turn.prompt[:stop]) for stop in range(block, len(turn.prompt) + 1, block)]
        hits += block * sum(prefix in known for prefix in prefixes)
        known.update(prefixes)
    return hits / sum(len(turn.prompt) for turn in turns)


def _config(model: Path, policy: str, settings: Settings) -> UpConfig:
    """Configure every prompt to go to prefill, so that only the policies differ."""
    return UpConfig(
        model=str(model),
        port=free_port(),
        prefill=settings.prefill,
        policy=policy,
        local_prefill_tokens=0,
        num_blocks=settings.num_blocks,
        threads=1,
    )


async def play(deployment: Deployment, turns: list[Turn], concurrency: int, salt: str) -> Round:
    """Send all turns with the given concurrency."""
    waiting = iter(enumerate(turns))
    ttfts: list[float] = []
    async with httpx.AsyncClient(base_url=deployment.url, timeout=pd.TIMEOUT_S) as http:
        model = deployment.config.name

        async def client() -> None:
            for i, turn in waiting:
                name = f"{salt}-{i}"
                reply = await pd.ask(http, model, name, turn.prompt, turn.output, cache_salt=salt)
                ttfts.append(reply.ttft)
                timeline = (await http.get(f"/debug/requests/{name}")).json()
                for source, tokens in timeline["prompt_tokens_by_source"].items():
                    sources[source] += tokens

        sources = {"computed": 0, "local_hit": 0, "loaded": 0}
        await asyncio.gather(*(client() for _ in range(concurrency)))
    return Round(ttfts, sources)


def _row(name: str, rounds: list[Round], base: list[Round]) -> dict[str, Any]:
    """Over all rounds; the ratios are medians of each round's ratio to the first policy's round beside it."""
    ttfts = [ttft for each in rounds for ttft in each.ttfts]
    tokens = sum(each.tokens for each in rounds)
    share = {
        source: sum(each.sources[source] for each in rounds) / tokens for source in ("computed", "local_hit", "loaded")
    }
    pairs = list(zip(rounds, base, strict=True))
    return {
        "policy": name,
        "requests": len(ttfts),
        "prompt_tokens": tokens,
        "hit_rate": round(1 - share["computed"], 3),
        "local_hit_rate": round(share["local_hit"], 3),
        "loaded_rate": round(share["loaded"], 3),
        "ttft_ms_p50": pd.milliseconds(ttfts, 50),
        "ttft_ms_p99": pd.milliseconds(ttfts, 99),
    } | {
        f"ttft_p{percent}_ratio": round(
            statistics.median(
                pd.milliseconds(ours.ttfts, percent) / pd.milliseconds(first.ttfts, percent) for ours, first in pairs
            ),
            2,
        )
        for percent in (50, 99)
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("policy")
    for column in ("hit rate", "of it local", "loaded", "TTFT p50 ms", "ratio", "TTFT p99 ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['hit_rate']:.1%}",
            f"{row['local_hit_rate']:.1%}",
            f"{row['loaded_rate']:.1%}",
            f"{row['ttft_ms_p50']:.1f}",
            f"{row['ttft_p50_ratio']:.2f}",
            f"{row['ttft_ms_p99']:.1f}",
            f"{row['ttft_p99_ratio']:.2f}",
        )
    report.show(table)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
