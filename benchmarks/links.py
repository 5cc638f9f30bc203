"""Codecs over links of several rates, each in turn: `python benchmarks/links.py`, as root.

A redis-server in a network namespace is reached over a link that a token bucket slows down in both directions. What is moved
is the KV of a text, by the demo model in bfloat16: 2,048 tokens are stored, and loaded by another connector. In each round
the codecs take turns in another order; a figure is the median of the rounds. So of `auto` it does not show the first
transfers, in which it knows nothing of the link.
"""

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report
import stores
import torch
import transformers
from island import NetworkNamespace

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.rules.context import new_keys
from pdserve.model_path import DEMO

CODECS = ("none", "lz4", "zstd", "auto")
BLOCK_SIZE = 16
STORE_BYTES = 1 << 30
WARM_UP = 10  # rounds, in which `auto` tries all codecs


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    rates: str = flag("gigabytes per second", "0.05,0.5,5")
    tokens: int = flag("whose KV is moved", 2048)
    rounds: int = flag("of all codecs", 31)


QUICK = {"rates": "0.5", "tokens": 64, "rounds": 1}


def benchmark(settings: Settings) -> None:
    """Move the KV of a text over each link with each codec."""
    settings = settings.sized(QUICK)
    layout, kv = _kv(settings.tokens)
    rows: list[dict[str, Any]] = []
    with NetworkNamespace() as island, tempfile.TemporaryDirectory() as folder:
        with island.entered():
            server = stores.RedisServer(folder, STORE_BYTES, "0.0.0.0")
        try:
            for rate in map(float, settings.rates.split(",")):
                island.slow_down(rate * 1e9)
                seconds = _measure(f"redis://{island.inside}:{server.port}", layout, kv, settings.rounds)
                best = min(seconds[codec] for codec in CODECS if codec != "auto")
                rows += [
                    {"GB/s": rate, "codec": codec, "ms": round(took * 1000, 2), "of the best": round(took / best, 3)}
                    for codec, took in seconds.items()
                ]
        finally:
            server.kill()
    report.show(rows)
    print(report.write("links", settings, {"bytes": kv.nbytes, "rows": rows}))


def _kv(tokens: int) -> tuple[Layout, Row]:
    """Return the KV of the first tokens of a text in blocks, uint8 [blocks, block_bytes]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    text = (Path(__file__).parents[1] / "docs/architecture.md").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    kv_LCHTD = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers])
    kv_BLCHSD = kv_LCHTD.unflatten(3, (-1, BLOCK_SIZE)).movedim(3, 0).contiguous()
    layout = Layout(
        model_fingerprint="demo",
        num_layers=len(layers),
        num_kv_heads=kv_LCHTD.shape[2],
        head_dim=kv_LCHTD.shape[4],
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        itemsize=2,
    )
    return layout, kv_BLCHSD.view(torch.uint8).flatten(1).numpy()


def _measure(url: str, layout: Layout, rows: Row, rounds: int) -> dict[str, float]:
    """Return the median seconds of a store and a load with each codec."""
    seconds: dict[str, list[float]] = {codec: [] for codec in CODECS}
    pairs = {codec: [connect(f"{url}?codec={codec}") for _ in range(2)] for codec in CODECS}
    loaded = np.zeros_like(rows)
    for source, target in pairs.values():
        source.attach(PoolMemory(rows, layout))
        target.attach(PoolMemory(loaded, layout))
    try:
        for _ in range(WARM_UP + rounds):
            for codec, (source, target) in random.sample([*pairs.items()], len(pairs)):
                keys, blocks = new_keys(len(rows)), range(len(rows))
                loaded[:] = 0
                started = time.perf_counter()
                stored = source.store(keys, blocks, lease_s=60.0).result()
                done = target.load(keys, blocks).result()
                seconds[codec].append(time.perf_counter() - started)
                if stored.leading < len(rows) or done.leading < len(rows) or not np.array_equal(loaded, rows):
                    raise SetupError(f"codec={codec}: not all blocks were moved")
                source.release(keys)
    finally:
        for pair in pairs.values():
            for connector in pair:
                connector.close()
    return {codec: statistics.median(times[WARM_UP:]) for codec, times in seconds.items()}


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
