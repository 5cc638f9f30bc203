"""Leak checks of a deployment: counters that must be 0 when idle, and sizes of processes and tiers that must not grow."""

import asyncio
import os
import re
import statistics
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from stage import LEASE_S, Stage

from pdserve.cli.deployment import Deployment

SETTLE_S = 3 * LEASE_S
SLACK = 4  # sockets and threads of an instance: connections to the store are opened on demand
LABELS = ("kind", "finish_reason", "source")
SAMPLES, EVERY_S = 40, 5.0  # sizes are looked at so often at least, and as often
# Tolerances for random growth: allocator arenas, log buffers, connections of short-lived clients.
SLACK_BYTES, SLACK_SHARE, SLACK_COUNT = 8 << 20, 0.03, 12

Counts = dict[str, float]


def totals(deployment: Deployment) -> dict[str, float]:
    """Return the metrics summed over all labels, and for each value of LABELS; missing ones are 0."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(f"{deployment.url}/metrics", timeout=60).text):
        for sample in family.samples:
            by_label = (f"{sample.name} {sample.labels[label]}" for label in LABELS if label in sample.labels)
            for name in (sample.name, *by_label):
                found[name] += sample.value
    return found


def leak_counters(at: Stage) -> Counts:
    """Return the counters that must be 0 when no request is running."""
    metrics = totals(at.deployment)
    names = ["kv_cache_blocks_held", "num_requests_running", "num_requests_waiting"]
    names += ["kv_transfer_bytes_in_flight", "kv_transfer_bytes_waiting"]
    attached = httpx.get(f"{at.deployment.url}/debug/instances", timeout=60).json()["instances"]
    found: Counts = {name: metrics[f"pdserve_{name}"] for name in names}
    for name in ("requests", "prefill_tokens", "output_tokens", "draining"):
        found[f"{name} on the router's books"] = sum(one[name] for one in attached)
    found["instances not attached"] = len(at.deployment.instances) - len(attached)
    return found | {"leases in the store": at.leases()}


def footprint(at: Stage) -> Counts:
    """Return the number of sockets and threads of each process, and the router's tasks, when no request is running."""
    found: Counts = {}
    for child in at.deployment.children:
        descriptors = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        found[f"sockets of {child.name}"] = sum(one.startswith("socket:") for one in descriptors)
        found[f"threads of {child.name}"] = len(os.listdir(f"/proc/{child.pid}/task"))
    return found | {"tasks of router": totals(at.deployment)["pdserve_router_tasks"]}


def allowed(name: str, before: float) -> float:
    return before if name in ("sockets of router", "tasks of router") else before + SLACK


async def settled(at: Stage, seconds: float = SETTLE_S, before: Counts | None = None) -> tuple[Counts, Counts]:
    """Return the leak counters and footprint once they are as expected, or after a timeout."""
    deadline = time.monotonic() + seconds
    while True:
        at.deployment.check_children()
        with suppress(FileNotFoundError, ProcessLookupError, AssertionError):  # a process has just exited
            left, after = leak_counters(at), footprint(at)
            grown = before and [name for name, value in after.items() if value > allowed(name, before[name])]
            if time.monotonic() > deadline or not (grown or any(left.values())):
                return left, after
        await asyncio.sleep(0.2)


class Growth:
    """Sizes of the processes and of the store's tiers over time, under a load that stays the same."""

    def __init__(self, at: Stage) -> None:
        self._deployment = at.deployment
        self._samples: list[Counts] = []

    async def watch(self, seconds: float) -> None:
        """Look at the sizes again and again for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._samples.append(self._sizes())
            await asyncio.sleep(min(EVERY_S, seconds / SAMPLES))

    def verdicts(self) -> list[dict[str, Any]]:
        """Return what the median of the last quarter may be for each size, by that of the second one, and what it is."""
        quarter, found = max(1, len(self._samples) // 4), []
        for name in self._samples[0]:
            before = statistics.median(sample[name] for sample in self._samples[quarter : 2 * quarter])
            after = statistics.median(sample[name] for sample in self._samples[-quarter:])
            slack = max(SLACK_BYTES, SLACK_SHARE * before) if name.startswith("bytes") else SLACK_COUNT
            found.append({"what": f"{name}, in the end", "may be": before + slack, "is": after})
        return found

    def _sizes(self) -> Counts:
        sizes: Counts = {}
        for child in self._deployment.children:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
            sizes[f"bytes of {child.name}"] = int(status["RssAnon"].split()[0]) * 1024
            sizes[f"threads of {child.name}"] = int(status["Threads"])
            sizes[f"files of {child.name}"] = len(os.listdir(f"/proc/{child.pid}/fd"))
        for scheme, name in re.findall(r"(shm|file)://([^?,]+)", self._deployment.connector):
            folder, pattern = ("/dev/shm", f"*{name}*") if scheme == "shm" else (name, "**/*")
            sizes[f"bytes of {scheme}://"] = 0
            for path in Path(folder).glob(pattern):
                with suppress(FileNotFoundError):  # files may vanish meanwhile
                    sizes[f"bytes of {scheme}://"] += path.stat().st_blocks * 512
        return sizes
