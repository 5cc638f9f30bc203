"""Prometheus metrics of the router, and of its instances, whose counters arrive with their heartbeats."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve import plugins
from pdserve.counters import metric_families
from pdserve.lifetime import LATENCY_METRICS
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.breaker import BreakerState
from pdserve.router.telemetry.timeline import Timeline

BREAKER_HELP = "circuit breaker of an instance: 0 closed (serves), 1 half-open (one request at a time), 2 open (none)"
MILLISECONDS = (1, 2, 3, 5, 7.5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 200, 500)
# Up to two hours; ITL has targets between 20 and 50 ms.
LATENCY_BUCKETS = (*(one / 1e3 for one in MILLISECONDS), 1, 2, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 3600, 7200)
LOST = ("instance_lost", "drained", "timeout")  # why requests move to another instance
# Counter → values of its label from the start, so that the first event is an increase.
FROM_START = {
    "requests": ("stop", "length", "cancelled", "error"),
    "refusals": (
        *("max_requests", "slo_ttft", "slo_itl", "body_bytes", "too_many_choices"),
        *("rate_limit_requests", "rate_limit_tokens", "rate_limit_concurrency"),
    ),
    "fallbacks": LOST,
    "migrations": LOST,
    "refused_connections": (
        "too_many_connections",
        "invalid_http",
        "head_too_slow",
        "headers_too_large",
        "too_many_pipelined",
    ),
    "instance_waits": ("placed", "expired", "refused", "cancelled"),
    "unauthorized": ("missing", "wrong"),
}


class Metrics:
    """The metrics of one router, in a registry of their own, so that several routers can share a process (as in tests).

    Args:
        vllm_model: export metrics by vLLM's names too, with this name of the model; empty: do not.

    Attributes:
        key_names: names of API keys, by the numbers by which instances know them, in hexadecimal.
    """

    def __init__(self, fleet: Fleet, vllm_model: str = "") -> None:
        self._vllm_model = vllm_model
        self.key_names: dict[str, str] = {}
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=LATENCY_BUCKETS)
        self._add_of_requests(counter, histogram)
        self._add_of_admission(counter, gauge)
        self._add_of_faults(counter, gauge, histogram)
        self._add_of_process(counter, gauge)
        self.queued: Callable[[], Iterable[tuple[float, int]]] = tuple
        self.registry.register(_FleetCollector(fleet, lambda: self.queued(), self.key_names))
        for name, values in FROM_START.items():
            for value in values:
                getattr(self, name).labels(value)
        for metric in (self.requests, self.decisions, self.placements, self.key_requests, self.key_tokens):
            metric.labels = cache(metric.labels)  # type: ignore[assignment]  # every request uses the same few labels

    def _add_of_requests(self, counter: Callable[..., Counter], histogram: Callable[..., Histogram]) -> None:
        self.spans = {
            name: histogram(f"pdserve_{name}_seconds", f"from {start.value} to {end.value}")
            for name, (start, end) in LATENCY_METRICS.items()
        }
        self.inter_token_latency = histogram(
            "pdserve_inter_token_latency_seconds", "time between two tokens of a request"
        )
        self.release_latency = histogram(
            "pdserve_release_after_cancel_seconds",
            "from a cancellation until an instance has freed the request's blocks",
            ["role"],
        )
        self.requests = counter("pdserve_requests_total", "finished requests by finish reason", ["finish_reason"])
        self._prompt_tokens = counter("pdserve_prompt_tokens_total", "of finished requests")
        self.output_tokens = counter("pdserve_output_tokens_total", "of finished requests")
        self._adapter_requests = counter(
            "pdserve_adapter_requests_total", "finished requests of an adapter", ["adapter"]
        )
        self._adapter_tokens = counter(
            "pdserve_adapter_tokens_total",
            "tokens of an adapter's finished requests, prompts or outputs",
            ["adapter", "of"],
        )
        self.decisions = counter(
            "pdserve_decisions_total",
            "instances selected, by role and by the policy that decided, after delegation",
            ["role", "policy"],
        )
        self.placements = counter(
            "pdserve_placements_total",
            "placements of prompts: split between prefill and decode, or one instance alone; and the reason",
            ["way", "reason"],
        )

    def _add_of_admission(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.refusals = counter("pdserve_refusals_total", "requests rejected by admission, by reason", ["reason"])
        self.ignored_fields = counter(
            "pdserve_ignored_fields_total", "unknown fields of requests that were ignored, with --unknown-fields ignore"
        )
        self.key_requests = gauge(
            "pdserve_key_requests_under_way", "running requests of an API key, each choice counted", ["key"]
        )
        self.key_waiting = gauge(
            "pdserve_key_requests_waiting",
            "requests of an API key that wait for admission, requests with several choices counted once",
            ["key"],
        )
        self.key_tokens = counter(
            "pdserve_key_tokens_total", "prompt and output tokens of an API key's finished requests", ["key"]
        )
        self.key_refusals = counter(
            "pdserve_key_refusals_total",
            "requests of an API key that were rejected because of its limits or a full queue",
            ["key", "reason"],
        )
        self.unauthorized = counter(
            "pdserve_unauthorized_total", "requests without a valid key: with none, or with a wrong one", ["reason"]
        )

    def _add_of_faults(
        self, counter: Callable[..., Counter], gauge: Callable[..., Gauge], histogram: Callable[..., Histogram]
    ) -> None:
        self.fallbacks = counter(
            "pdserve_handover_fallbacks_total",
            "hand-overs that decode completed by computing, by the fault of prefill",
            ["kind"],
        )
        self._kv_event_batches = counter(
            "pdserve_kv_event_batches_followed_total",
            "batches of KV events of --kv-events-subscribe: applied, refused because they are malformed, or lost",
            ["endpoint", "outcome"],
        )
        self.migrations = counter(
            "pdserve_migrations_total", "streams moved to other instances, by the fault of the first", ["kind"]
        )
        self.migration_pause = histogram(
            "pdserve_migration_pause_seconds", "time that the client of a moved stream waited for its next token"
        )
        self.invalid_outputs = counter(
            "pdserve_invalid_outputs_total",
            "requests that failed because their output had invalid content, such as NaN",
        )
        self.waiting_for_instance = gauge(
            "pdserve_requests_waiting_for_instance",
            "requests, new or moving, that wait because no instance is eligible",
        )
        self.instance_waits = counter(
            "pdserve_instance_waits_total",
            "waits for an eligible instance: placed on one, refused by the SLO then, expired, or cancelled by the client",
            ["outcome"],
        )
        self.failed_handovers = counter(
            "pdserve_handovers_in_vain_total",
            "hand-overs in which decode found none of the blocks that prefill had stored",
            ["prefill", "decode"],
        )
        self.retry_budget = gauge("pdserve_retry_budget", "migrations left for requests that have migrated before")

    def _add_of_process(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.connections = gauge("pdserve_connections", "open connections of clients")
        self.refused_connections = counter(
            "pdserve_connections_refused_total",
            "connections of clients that the router ended before their request was read, by reason",
            ["reason"],
        )
        self.grammars = counter(
            "pdserve_grammars_compiled_total",
            "new grammars of structured output that the router compiled to check them, by result",
            ["result"],
        )
        self.grammars_waiting = gauge("pdserve_grammars_waiting", "grammars that the router compiles or has queued")
        self.registry_failures = counter("pdserve_registry_failures_total", "failed calls to the registry")
        tasks = gauge("pdserve_router_tasks", "asyncio tasks of the router")
        tasks.set_function(_num_tasks)

    def count_kv_event_batches(self, endpoint: str, outcome: str, count: int) -> None:
        self._kv_event_batches.labels(endpoint=endpoint, outcome=outcome).inc(count)

    def record_finished(self, timeline: Timeline) -> None:
        """Add a finished request's timeline to the histograms and counters."""
        stamps = timeline.stamps
        for name, (start, end) in LATENCY_METRICS.items():
            if start in stamps and end in stamps:
                self.spans[name].observe(max(0.0, stamps[end] - stamps[start]))
        self.requests.labels(finish_reason=timeline.finish_reason or "stop").inc()
        self._prompt_tokens.inc(timeline.prompt_tokens)
        self.output_tokens.inc(timeline.output_tokens)
        if timeline.adapter:
            self._adapter_requests.labels(timeline.adapter).inc()
            self._adapter_tokens.labels(timeline.adapter, "prompt").inc(timeline.prompt_tokens)
            self._adapter_tokens.labels(timeline.adapter, "output").inc(timeline.output_tokens)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return b"".join(self.parts())

    def parts(self, *, with_keys: bool = True) -> Iterator[bytes]:
        """Return the same in parts, a family each. All of them take half a second with a thousand instances.

        Args:
            with_keys: include the families that name API keys and adapters, and tell their use.
        """
        for family in self.registry.collect():
            if with_keys or not any(sample.labels.keys() & {"key", "adapter"} for sample in family.samples):
                yield generate_latest(_Family(family))
        if self._vllm_model:
            for family in plugins.extension("router-vllm-metrics")(self.registry.collect(), self._vllm_model):
                yield generate_latest(_Family(family))


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # called outside of the event loop
        return 0


def prefill_backlog_seconds(instance: InstanceHandle, queued: float) -> float:
    """Return how long an instance will compute the prompts that all routers have given it, by its cost model.

    Args:
        queued: prompt tokens of this router's admission queue that will come to it, by its share of the prefill instances.
    """
    load = instance.candidate
    return load.costs.total_prefill_seconds(load.prefills, load.prefill_tokens + queued, load.attended_tokens)


def kv_occupancy(instance: InstanceHandle, queued: float) -> float:
    """Return the share of an instance's pool that is in use or reserved; over 1 if requests wait for room.

    It is the larger of what the instance reported and of what the requests need that all routers have given it, of which
    shared prefixes count for each request, and those of the admission queue by the instance's share.
    """
    num_blocks = instance.hello.num_blocks
    held = (
        num_blocks - instance.heartbeat.free_blocks if instance.heartbeat.counters else 0
    )  # 0 before the first heartbeat
    return max(held / num_blocks, (instance.candidate.context_tokens + queued) / instance.candidate.capacity_tokens)


LOAD_GAUGES: list[tuple[str, str, str, Callable[[InstanceHandle, float], float]]] = [  # name, help, role, value
    (
        "prefill_backlog_seconds",
        "forecast time to compute the prompts that wait at an instance, or for it in the router's queue",
        "prefill",
        prefill_backlog_seconds,
    ),
    (
        "kv_occupancy",
        "share of an instance's KV pool in use or reserved, or needed by the router's queue; over 1: requests wait for room",
        "decode",
        kv_occupancy,
    ),
]

PREFIX_INDEX_GAUGES: list[tuple[str, str, Callable[[Fleet, InstanceHandle, float], float]]] = [
    (
        "blocks",
        "blocks of an instance in the prefix index",
        lambda fleet, instance, _: fleet.index.num_blocks(instance.id),
    ),
    (
        "untold_blocks",
        "block keys that an instance has not yet reported to the prefix index",
        lambda _, instance, __: instance.unpublished_blocks,
    ),
    (
        "age_seconds",
        "lag of the prefix index behind an instance's pool",
        lambda _, instance, now: instance.index_age(now),
    ),
]


class _Family(Collector):
    """One family, as a collector."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


class _FleetCollector(Collector):
    """Collects the metrics per instance at scrape time."""

    def __init__(
        self, fleet: Fleet, queued: Callable[[], Iterable[tuple[float, int]]], key_names: dict[str, str]
    ) -> None:
        self._fleet = fleet
        self._queued = queued
        self._key_names = key_names

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "pdserve_instances_lost", "instances that left without a drain, or with requests", self._fleet.num_lost
        )
        num_invalid = self._fleet.num_invalid_frames
        yield CounterMetricFamily("pdserve_invalid_frames", "frames for which an instance was dropped", num_invalid)
        now = self._fleet.now()
        for name, help, value in PREFIX_INDEX_GAUGES:
            gauge = GaugeMetricFamily(f"pdserve_prefix_index_{name}", help, labels=["instance"])
            for instance in self._fleet.instances.values():
                gauge.add_metric([instance.id], value(self._fleet, instance, now))
            yield gauge
        queued = sum(tokens for _, tokens in self._queued())
        for name, help, role, load in LOAD_GAUGES:
            gauge = GaugeMetricFamily(f"pdserve_{name}", help, labels=["instance", "role"])
            able = sum(instance.role in (role, "both") for instance in self._fleet.instances.values())
            for instance in self._fleet.instances.values():
                own = queued / able if instance.role in (role, "both") else 0.0
                gauge.add_metric([instance.id, instance.role], load(instance, own))
            yield gauge
        gauge = GaugeMetricFamily("pdserve_breaker_state", BREAKER_HELP, labels=["instance"])
        for instance in self._fleet.instances.values():
            gauge.add_metric([instance.id], list(BreakerState).index(self._fleet.breakers.state(instance.id, now)))
        yield gauge
        for family in metric_families(
            ({"instance": instance.id, "role": instance.hello.role}, dict(instance.heartbeat.counters))
            for instance in self._fleet.instances.values()
        ):
            for sample in family.samples if family.name == "pdserve_kv_cache_blocks_of_key" else ():
                sample.labels["key"] = self._key_names.get(sample.labels["key"], sample.labels["key"])
            yield family
