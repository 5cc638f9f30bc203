"""The router's Prometheus metrics: the lifetime stamps as histograms, and what the instances count, with their labels."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.counters import families
from pdserve.lifetime import SPANS
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.breaker import BreakerState
from pdserve.router.telemetry.timeline import Timeline

BREAKER_HELP = "whether an instance gets requests: 0 closed (yes), 1 half-open (one at a time), 2 open (none)"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class Metrics:
    """One registry per router, so that several can live in one process (as in tests)."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.spans = {
            name: Histogram(
                f"pdserve_{name}_seconds",
                f"from {start.value} to {end.value}",
                buckets=SECONDS,
                registry=self.registry,
            )
            for name, (start, end) in SPANS.items()
        }
        self.inter_token = Histogram(
            "pdserve_inter_token_latency_seconds",
            "between two tokens of one request",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.released = Histogram(
            "pdserve_release_after_cancel_seconds",
            "from a client's leaving until an instance holds nothing of its request any more",
            ["role"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.requests = Counter(
            "pdserve_requests_total", "requests by how they ended", ["finish_reason"], registry=self.registry
        )
        self._prompt_tokens = Counter("pdserve_prompt_tokens_total", "of finished requests", registry=self.registry)
        self.output_tokens = Counter(
            "pdserve_output_tokens_total", "sent to clients or dropped with them", registry=self.registry
        )
        self.decisions = Counter(
            "pdserve_decisions_total",
            "instances picked, by role and by the policy that picked: not the one asked for where that could not judge",
            ["role", "policy"],
            registry=self.registry,
        )
        self.placements = Counter(
            "pdserve_placements_total",
            "who computes prompts: split between prefill and decode, or one instance alone; and what decided it",
            ["way", "reason"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "pdserve_refusals_total",
            "requests that were not let in, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.key_requests = Gauge(
            "pdserve_key_requests_under_way",
            "requests of an API key, each choice counted",
            ["key"],
            registry=self.registry,
        )
        self.key_waiting = Gauge(
            "pdserve_key_requests_waiting",
            "requests of an API key that wait to be let in, answers of several choices counted once",
            ["key"],
            registry=self.registry,
        )
        self.key_tokens = Counter(
            "pdserve_key_tokens_total",
            "prompt and output tokens of an API key's requests that ended",
            ["key"],
            registry=self.registry,
        )
        self.key_refusals = Counter(
            "pdserve_key_refusals_total",
            "requests of an API key that were refused for its limits, or because too many waited",
            ["key", "reason"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "pdserve_handover_fallbacks_total",
            "hand-overs that decode had to complete by computing, by what happened to prefill",
            ["kind"],
            registry=self.registry,
        )
        self.hedges = Counter(
            "pdserve_prefill_hedges_total",
            "late prefills that a second instance was asked for too, and those that went on with it",
            ["outcome"],
            registry=self.registry,
        )
        self.migrations = Counter(
            "pdserve_migrations_total",
            "streams that other instances took over, by what happened to the first",
            ["kind"],
            registry=self.registry,
        )
        self.failed_handovers = Counter(
            "pdserve_handovers_in_vain_total",
            "hand-overs in which decode found nothing of what prefill had stored",
            ["prefill", "decode"],
            registry=self.registry,
        )
        self.retry_budget = Gauge(
            "pdserve_retry_budget", "moves left for requests that have moved before", registry=self.registry
        )
        self.registry_failures = Counter(
            "pdserve_registry_failures_total", "calls that the registry did not answer", registry=self.registry
        )
        tasks = Gauge(
            "pdserve_router_tasks", "asyncio tasks: a few, and some for each connection", registry=self.registry
        )
        tasks.set_function(_tasks)
        self.registry.register(_FleetCounts(fleet))
        for asked in (self.requests, self.decisions, self.placements, self.key_requests, self.key_tokens):
            asked.labels = cache(asked.labels)  # type: ignore[assignment]  # each request asks for the same few

    def finished(self, timeline: Timeline) -> None:
        """Takes a request's complete timeline into the histograms."""
        for name, (start, end) in SPANS.items():
            seconds = timeline.span(start, end)
            if seconds is not None:
                self.spans[name].observe(seconds)
        self.requests.labels(finish_reason=timeline.finish_reason or "stop").inc()
        self._prompt_tokens.inc(timeline.prompt_tokens)
        self.output_tokens.inc(timeline.output_tokens)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # not asked by the router itself
        return 0


INDEX: list[tuple[str, str, Callable[[Fleet, InstanceHandle, float], float]]] = [
    (
        "blocks",
        "blocks of an instance that the prefix index knows",
        lambda fleet, instance, _: fleet.index.blocks(instance.id),
    ),
    (
        "untold_blocks",
        "blocks of which an instance has yet to tell the prefix index",
        lambda _, instance, __: instance.untold,
    ),
    (
        "age_seconds",
        "how old the prefix index's picture of an instance is",
        lambda _, instance, now: instance.index_age(now),
    ),
]


class _FleetCounts(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("pdserve_instances_lost", "instances that left since the start", self._fleet.num_lost)
        now = time.monotonic()
        for name, help, value in INDEX:
            gauge = GaugeMetricFamily(f"pdserve_prefix_index_{name}", help, labels=["instance"])
            for instance in self._fleet.instances.values():
                gauge.add_metric([instance.id], value(self._fleet, instance, now))
            yield gauge
        gauge = GaugeMetricFamily("pdserve_breaker_state", BREAKER_HELP, labels=["instance"])
        for instance in self._fleet.instances.values():
            gauge.add_metric([instance.id], list(BreakerState).index(self._fleet.breakers.state(instance.id, now)))
        yield gauge
        yield from families(
            ({"instance": instance.id, "role": instance.hello.role}, dict(instance.beat.counters))
            for instance in self._fleet.instances.values()
        )
