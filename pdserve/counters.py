"""Cumulative counts of one process, by metric name and labels: sent to routers in heartbeats, served to Prometheus."""

import re
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Name (without `pdserve_` and `_total`) → help. Those in GAUGES may fall.
HELP = {
    "prompt_tokens_by_source": "prompt tokens whose KV was computed here, found in the pool, or loaded from the KV store",
    "store_hits": "prompts, new or preempted, of which the KV store had more than the pool, by what was decided about that",
    "generation_tokens": "output tokens sampled",
    "prefix_cache_queries": "prompt tokens looked up in the pool",
    "prefix_cache_hits": "prompt tokens found in the pool",
    "num_preemptions": "times that a sequence lost its blocks",
    "swapped_blocks": "blocks of preempted sequences copied to host memory or back, by direction",
    "kv_transfer_bytes": "KV bytes that crossed, after the codec, by connector and direction",
    "kv_transfer_seconds": "time spent in transfers, by connector and direction",
    "kv_transfer_blocks": "KV blocks moved, by connector and direction",
    "kv_transfer_failures": "KV blocks that a transfer did not move, by connector, direction and kind",
    "kv_transfer_bytes_in_flight": "KV bytes that the connector is moving",
    "kv_transfer_bytes_waiting": "KV bytes that wait until fewer are in flight",
    "kv_transfer_given_up_blocks": "KV blocks for which there was no room while the store did not answer",
    "prefill_steps_held_back": "steps that left prefill out because stores waited",
    "store_back_skipped_blocks": "KV blocks not stored back because too many bytes were in flight",
    "integrity_checks": "looks at the whole pool while idle, each of which found every block in its place",
    "engine_steps": "forward passes",
    "lookups_of_routers_failed": "times that the registry did not say which routers there are",
    "num_requests_running": "sequences in the running batch, loading or storing",
    "num_requests_waiting": "sequences that have not started",
    "kv_cache_blocks": "blocks of the pool",
    "kv_cache_blocks_held": "blocks that a sequence or a transfer holds",
    "kv_cache_usage_perc": "share of the pool's blocks that are held, 0 to 1",
}
GAUGES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_blocks",
        "kv_cache_blocks_held",
        "kv_cache_usage_perc",
        "kv_transfer_bytes_in_flight",
        "kv_transfer_bytes_waiting",
    }
)
_SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def series(name: str, **labels: str) -> str:
    """`name{a="b"}`, the form in which a count travels."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def families(counts: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> list[Metric]:
    """Prometheus metric families of several processes: (labels of the process, its counts by series)."""
    metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for process, values in counts:
        for key, value in values.items():
            match = _SERIES.fullmatch(key)
            assert match is not None, f"not a series: {key}"
            labels = dict(process) | dict(_LABEL.findall(match["labels"] or ""))
            family = metrics.setdefault(match["name"], _family(match["name"], list(labels)))
            family.add_metric([labels[name] for name in sorted(labels)], value)
    return list(metrics.values())


def _family(name: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
    return kind(f"pdserve_{name}", HELP.get(name, "from an instance of another version"), labels=sorted(labels))
