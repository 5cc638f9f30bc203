"""What the live page shows: a picture of what the router knows at this moment. It keeps nothing of its own."""

import math
import time
from collections.abc import Mapping
from itertools import pairwise

from prometheus_client import Counter, Histogram

from pdserve import __version__
from pdserve.counters import series
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.telemetry.events import Events
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline

LATEST = 100  # requests
COUNTS = ("generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "kv_cache_blocks_held")


class Overview:
    """The body of /debug/overview. Counts are those since the router, or the instance, has started: who wants rates takes
    two pictures. `router` tells pictures of several routers apart."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, events: Events) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._events = events
        self._started = time.monotonic()

    def now(self) -> dict[str, object]:
        """Times of day are in seconds since 1970, by this machine's clock, which `time` tells; durations are in seconds."""
        dispatcher, metrics, now = self._dispatcher, self._metrics, time.monotonic()
        ready, why = dispatcher.ready()
        since_1970 = time.time() - now
        instances = dispatcher.fleet.instances
        return {
            "time": since_1970 + now,
            "router": dispatcher.fleet.router_id,
            "version": __version__,
            "model": dispatcher.config.name,
            "uptime": now - self._started,
            "ready": ready,
            "why": why,
            "slo": {name: limit for name, limit in vars(dispatcher.slo).items() if math.isfinite(limit)},
            "under_way": len(dispatcher.states),
            "waiting": sum(sample.value for one in metrics.key_waiting.collect() for sample in one.samples),
            "max_requests": dispatcher.config.max_requests,
            "requests": _by_label(metrics.requests),
            "placements": _by_label(metrics.placements),
            "refusals": _by_label(metrics.refusals),
            "migrations": _by_label(metrics.migrations),
            "fallbacks": _by_label(metrics.fallbacks),
            "ttft": _distribution(metrics.spans["time_to_first_token"]),
            "itl": _distribution(metrics.inter_token),
            "instances": [{**one, **_counts(instances[str(one["instance_id"])])} for one in dispatcher.instances()],
            "events": self._events.latest(),
            "timelines": [_row(one, since_1970) for one in dispatcher.timelines.latest(LATEST)],
        }


def _by_label(counter: Counter) -> dict[str, float]:
    """By the values of its first label."""
    found: dict[str, float] = {}
    for sample in (sample for metric in counter.collect() for sample in metric.samples):
        if sample.name.endswith("_total"):
            name = next(iter(sample.labels.values()))
            found[name] = found.get(name, 0) + sample.value
    return found


def _distribution(histogram: Histogram) -> dict[str, list[float]]:
    """Upper limits of the buckets but the last, which has none, and how many are in each bucket alone."""
    samples = [one for metric in histogram.collect() for one in metric.samples if one.name.endswith("_bucket")]
    upto = [one.value for one in samples]
    alone = [upto[0], *(after - before for before, after in pairwise(upto))]
    return {"limits": [float(one.labels["le"]) for one in samples[:-1]], "counts": alone}


def _counts(instance: InstanceHandle) -> dict[str, float]:
    """What an instance has counted, by its last heartbeat."""
    counters: Mapping[str, float] = dict(instance.beat.counters)
    found = {name: counters.get(name, 0) for name in COUNTS}
    found["computed_tokens"] = counters.get(series("prompt_tokens_by_source", source="computed"), 0)
    for direction in ("store", "load"):
        for unit in ("bytes", "seconds"):
            one = series(f"kv_transfer_{unit}", connector=instance.hello.connector, direction=direction)
            found[f"{direction}_{unit}"] = counters.get(one, 0)
    return found


def _row(timeline: Timeline, since_1970: float) -> dict[str, object]:
    """A request in short."""
    start = min(timeline.stamps.values(), default=0.0)
    return {
        "request_id": timeline.request_id,
        "time": since_1970 + start,
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
        "migrations": timeline.migrations,
    }
