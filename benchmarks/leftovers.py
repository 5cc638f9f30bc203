"""Leak checks of a deployment: counters that must be 0 when idle, and process sizes that must not grow."""

import asyncio
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from stage import LEASE_S, Stage

from pdserve.cli.deployment import Deployment

SETTLE_S = 3 * LEASE_S
SLACK = 4  # sockets and threads of an instance: connections to the store are opened on demand
LABELS = ("kind", "finish_reason", "source")

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
