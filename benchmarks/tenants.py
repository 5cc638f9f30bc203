"""TTFTs of one API key for prompts that another key has sent: `python benchmarks/tenants.py`.

1P+1D with a keys file. alice sends a prompt; mallory then sends the same one ("of another key"), one that no key has sent
("fresh"), and this one again ("of its own"), in random order but for the last, one request at a time. If the KV of keys is
kept apart, the TTFTs of the first two have one distribution: the two-sample Kolmogorov-Smirnov statistic is below its
critical value for 1 % in 99 of 100 runs. With `--share-kv`, as before there were tenants, the two are apart.
"""

import math
import random
import statistics
import tempfile
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import report

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag
from pdserve.lines.event_stream import read_events


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    repeat: int = flag("prompts of each kind", 200)
    tokens: int = flag("of each prompt", 700)


QUICK = {"repeat": 5, "tokens": 100}
CRITICAL = math.sqrt(-math.log(0.01 / 2) / 2)  # of the statistic for 1 %, times the root of 1/n + 1/m


def tenants(settings: Settings) -> None:
    """Measure the TTFT of prompts of another key, of fresh ones and of one's own, with KV apart and shared."""
    settings = settings.sized(QUICK)
    rows = [_row(settings, share_kv) for share_kv in (False, True)]
    report.show(rows)
    print(report.write("tenants", settings, {"rows": rows}))


def _row(settings: Settings, share_kv: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text('[alice]\nkey = "a"\n[mallory]\nkey = "m"\n')
        config = UpConfig(port=free_port(), local_prefill_tokens=0, keys_file=str(keys), share_kv=share_kv)
        with Deployment(config, lambda _: None) as deployment:
            deployment.wait_ready()
            with httpx.Client(base_url=deployment.url, timeout=60.0) as http:
                samples = _measure(http, settings)
    other, fresh = samples["of another key"], samples["fresh"]
    distance, critical = _distance(other, fresh), CRITICAL * math.sqrt(1 / len(other) + 1 / len(fresh))
    medians = {f"{kind}, p50 ms": round(1000 * statistics.median(values), 1) for kind, values in samples.items()}
    return {"share_kv": share_kv, **medians, "KS distance": round(distance, 3), "critical (1 %)": round(critical, 3)}


def _measure(http: httpx.Client, settings: Settings) -> dict[str, list[float]]:
    """Return the TTFTs in seconds of mallory's prompts, by kind."""
    drawn = random.Random(0)
    samples: dict[str, list[float]] = {"of another key": [], "fresh": [], "of its own": []}
    for number in range(settings.repeat + 3):  # the first rounds warm up
        known, fresh = ([drawn.randrange(250) for _ in range(settings.tokens)] for _ in range(2))
        _ttft(http, "a", known)
        first = [("of another key", known), ("fresh", fresh)]
        drawn.shuffle(first)
        for kind, prompt in [*first, ("of its own", fresh)]:
            ttft = _ttft(http, "m", prompt)
            samples[kind] += [ttft] if number >= 3 else []
    return samples


def _ttft(http: httpx.Client, key: str, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
        events = read_events(reply.iter_bytes())
        next(events)
        took = time.perf_counter() - started
        for _ in events:
            pass
    return took


def _distance(one: list[float], other: list[float]) -> float:
    """Return the two-sample Kolmogorov-Smirnov statistic."""
    one, other = sorted(one), sorted(other)
    return max(abs(bisect_right(one, x) / len(one) - bisect_right(other, x) / len(other)) for x in (*one, *other))


if __name__ == "__main__":
    report.main(command_from_config(Settings, tenants))
