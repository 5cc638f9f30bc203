"""Snapshots of the router's state for the live page, and those of the last quarter of an hour."""

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from prometheus_client import Counter, Histogram

from pdserve import __version__
from pdserve.counters import series
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.telemetry.events import EventLog
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline

NUM_LATEST = 100  # requests in a snapshot
HISTORY_INTERVAL_S, HISTORY_LENGTH = 15.0, 60
MAX_INSTANCES_IN_HISTORY = 100  # beyond, which would take megabytes, it has the figures of the router only
NOT_IN_HISTORY = ("events", "timelines")
INSTANCE_COUNTERS = (
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "kv_cache_blocks_held",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
STORE_OUT = 'kv_store_out{connector="'  # a series' name up to that of the connector


class Overview:
    """Builds the body of /debug/overview.

    Counters count from the start of the router or of the instance; a rate is the difference between two snapshots. `router`
    distinguishes the snapshots of several routers that share a port.
    """

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, events: EventLog) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._events = events
        self._started_at = time.monotonic()
        self._history: deque[dict[str, object]] = deque(maxlen=HISTORY_LENGTH)

    def record(self) -> None:
        """Add the current state to the history; to be called every `HISTORY_INTERVAL_S`."""
        snapshot = {name: value for name, value in self.snapshot().items() if name not in NOT_IN_HISTORY}
        if len(self._dispatcher.fleet.instances) > MAX_INSTANCES_IN_HISTORY:
            snapshot["instances"] = []
        self._history.append(snapshot)

    def snapshot(self, with_history: bool = False) -> dict[str, object]:
        """Return the current state and, in `history`, the recorded ones, oldest first, without events and timelines.

        Times are seconds since 1970 by this machine's clock (`time` is the current one); durations are in seconds.
        """
        dispatcher, metrics, now = self._dispatcher, self._metrics, time.monotonic()
        ready, reason = dispatcher.ready()
        epoch_offset = time.time() - now
        instances = dispatcher.fleet.instances
        return {
            **({"history": list(self._history)} if with_history else {}),
            "time": epoch_offset + now,
            "router": dispatcher.fleet.router_id,
            "version": __version__,
            "model": dispatcher.config.name,
            "uptime": now - self._started_at,
            "ready": ready,
            "why": reason,
            "slo": {name: limit for name, limit in vars(dispatcher.slo).items() if math.isfinite(limit)},
            "under_way": len(dispatcher.states),
            "waiting": sum(sample.value for metric in metrics.key_waiting.collect() for sample in metric.samples),
            "max_requests": dispatcher.config.max_requests,
            "requests": _by_label(metrics.requests),
            "placements": _by_label(metrics.placements),
            "refusals": _by_label(metrics.refusals),
            "migrations": _by_label(metrics.migrations),
            "fallbacks": _by_label(metrics.fallbacks),
            "ttft": _histogram(metrics.spans["time_to_first_token"]),
            "itl": _histogram(metrics.inter_token_latency),
            "pauses": _histogram(metrics.migration_pause),
            "instances": [
                {**entry, **_instance_counters(instances[str(entry["instance_id"])])}
                for entry in dispatcher.instances()
            ],
            "events": self._events.latest(),
            "timelines": [_request_row(timeline, epoch_offset) for timeline in dispatcher.timelines.latest(NUM_LATEST)],
        }


def _by_label(counter: Counter) -> dict[str, float]:
    """Return the counter summed by the values of its first label."""
    totals: dict[str, float] = {}
    for sample in (sample for metric in counter.collect() for sample in metric.samples):
        if sample.name.endswith("_total") and sample.value:
            name = next(iter(sample.labels.values()))
            totals[name] = totals.get(name, 0) + sample.value
    return totals


def _histogram(histogram: Histogram) -> dict[str, list[float]]:
    """Return the upper limits of all buckets but the last, which has none, and the count of each bucket."""
    samples = [sample for metric in histogram.collect() for sample in metric.samples if sample.name.endswith("_bucket")]
    cumulative = [sample.value for sample in samples]
    counts = [cumulative[0], *(after - before for before, after in pairwise(cumulative))]
    return {"limits": [float(sample.labels["le"]) for sample in samples[:-1]], "counts": counts}


def _instance_counters(instance: InstanceHandle) -> dict[str, object]:
    """Return counters of an instance as of its last heartbeat, and the names of its stores that do not answer."""
    counters: Mapping[str, float] = dict(instance.heartbeat.counters)
    selected: dict[str, object] = {name: counters.get(name, 0) for name in INSTANCE_COUNTERS}
    selected["computed_tokens"] = counters.get(series("prompt_tokens_by_source", source="computed"), 0)
    name_at = len(STORE_OUT)
    selected["stores_out"] = [key[name_at:-2] for key, out in counters.items() if out and key.startswith(STORE_OUT)]
    for direction in ("store", "load"):
        for unit in ("bytes", "seconds"):
            counter = series(f"kv_transfer_{unit}", connector=instance.hello.connector, direction=direction)
            selected[f"{direction}_{unit}"] = counters.get(counter, 0)
    return selected


def _request_row(timeline: Timeline, epoch_offset: float) -> dict[str, object]:
    """Return the summary of one request."""
    start = min(timeline.stamps.values(), default=0.0)
    return {
        "request_id": timeline.request_id,
        "time": epoch_offset + start,
        "stages_ms": {stage.value: round((at - start) * 1e3, 1) for stage, at in timeline.stamps.items()},
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "finish_reason": timeline.finish_reason,
        "error": timeline.error,
        "prompt_tokens": timeline.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "local_hit_tokens": timeline.local_hit_tokens,
        "loaded_tokens": timeline.loaded_tokens,
        "computed_tokens": timeline.computed_tokens,
        "migrations": len(timeline.migrations),
    }
