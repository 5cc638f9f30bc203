"""Cumulative metrics of one instance, by name and labels: sent to routers in heartbeats and served to Prometheus."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Metric name (without `pdserve_` and `_total`) → help text. Names in GAUGES are gauges, all others counters.
HELP = {
    "prompt_tokens_by_source": "prompt tokens by where their KV came from: computed, found in the pool, loaded, or "
    "unneeded, because no later token attends to them",
    "inexact_prompts": "prompts decoded from KV of another dtype or numerics class, so that their tokens may differ",
    "store_hits": "prompts, new or preempted, of which the KV store had more than the pool, by decision",
    "generation_tokens": "output tokens sampled",
    "prefix_cache_queries": "prompt tokens looked up in the pool",
    "prefix_cache_hits": "prompt tokens found in the pool",
    "num_pauses": "sequences that lost their slots to another API key, and kept their blocks",
    "grammar_mask_seconds": "CPU time of processes that compute which tokens grammars allow",
    "grammar_masks_late": "sequences left out of a step since the mask of their grammar was not there",
    "grammars_given_up": "requests that failed since the masks of their grammar exceed a limit",
    "grammar_workers_lost": "processes that followed a grammar and ended, or hung, while no limit was exceeded",
    "num_preemptions": "preemptions: sequences that lost their blocks",
    "recomputed_tokens": "tokens computed again after a preemption",
    "swap_seconds": "time in which steps waited for blocks that were copied to host memory or back",
    "swapped_blocks": "blocks of preempted sequences copied to host memory or back, by direction",
    "kv_transfer_bytes": "KV bytes transferred, after the codec, by connector and direction",
    "kv_transfer_seconds": "time spent in transfers, by connector and direction",
    "kv_transfer_blocks": "KV blocks moved, by connector and direction",
    "kv_transfer_failures": "KV blocks that a transfer failed to move, by connector, direction and kind",
    "kv_store_out": "1 while the KV store does not answer and requests go on without it, by connector",
    "kv_transfer_bytes_in_flight": "KV bytes that the connector is moving",
    "kv_transfer_bytes_waiting": "KV bytes queued until fewer are in flight",
    "kv_transfer_given_up_blocks": "KV blocks of queued transfers that failed because the store did not answer",
    "kv_leases_prolonged": "KV blocks whose leases were prolonged because their prompts wait for room on decode",
    "kv_lease_overruns": "prompts that wait for room on decode for longer than a lease that cannot be prolonged",
    "adapter_transfers": "adapters stored in the KV store for other instances, or loaded from it, by direction and outcome",
    "prefill_steps_held_back": "steps that excluded prefill because stores were queued",
    "store_skipped_blocks": "KV blocks of prompts not stored because they left the attention window before",
    "store_back_skipped_blocks": "KV blocks not stored back because too many bytes were in flight",
    "integrity_checks": "checks of the whole pool while idle, each of which passed",
    "kv_event_batches_dropped": "batches of KV events not published because the queue was full",
    "engine_steps": "forward passes",
    "spec_decode_num_drafts": "drafts computed ahead of a sequence, each of one token or more (`--speculate`)",
    "spec_decode_num_draft_tokens": "tokens of these drafts",
    "spec_decode_num_accepted_tokens": "those of them that the model sampled itself, which answers got",
    "spec_decode_num_accepted_tokens_per_pos": "accepted tokens by their position in the draft, from 0",
    "spec_decode_draft_seconds": "time of steps that a draft model took",
    "spec_decode_num_without_drafts": "sequences for which a draft model (`--speculate draft`) proposed nothing in a step: "
    "it was behind and computed what came before, or had no room in its pool or context",
    "steps_launched_ahead": "decode steps that were launched before the tokens of the last one were read",
    "rows_launched_in_vain": "rows of these that no schedule asked for, since their sequence had ended or was preempted",
    "lookups_of_routers_failed": "failed lookups of the router list in the registry",
    "num_requests_running": "sequences in the running batch, loading or storing",
    "num_requests_waiting": "sequences that have no blocks yet, or were preempted",
    "kv_cache_blocks": "blocks of the pool",
    "kv_cache_blocks_held": "blocks that a sequence or a transfer holds",
    "kv_cache_blocks_empty": "blocks that requests hold although no KV is in them or being loaded",
    "kv_cache_blocks_promised": "free blocks that requests will take when further KV of their prompts comes",
    "kv_cache_blocks_shared": "blocks with several holders",
    "kv_cache_slots_behind_kv": "tokens for which there is room behind the KV in the last blocks of sequences",
    "kv_cache_blocks_pinned": "blocks of --warm-prompts, which are not evicted",
    "kv_cache_blocks_of_key": "blocks that requests of an API key hold, shared ones counted for each; instances tell keys by "
    "number, routers by name",
    "kv_cache_usage_perc": "share of the pool's blocks that are held, 0 to 1",
    "profile_ratio": "median of the time of a step, divided by that of the profile, by phase",
}
# Metric name → its labels, sorted; without an entry it has none.
LABELS: dict[str, tuple[str, ...]] = {
    "adapter_transfers": ("direction", "outcome"),
    "kv_cache_blocks_of_key": ("key",),
    "kv_store_out": ("connector",),
    "profile_ratio": ("phase",),
    "prompt_tokens_by_source": ("source",),
    "store_hits": ("decision",),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
    "spec_decode_num_without_drafts": ("reason",),
    "swapped_blocks": ("direction",),
    "kv_transfer_bytes": ("connector", "direction"),
    "kv_transfer_seconds": ("connector", "direction"),
    "kv_transfer_blocks": ("connector", "direction"),
    "kv_transfer_failures": ("connector", "direction", "kind"),
}
GAUGES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_blocks",
        "kv_cache_blocks_held",
        "kv_cache_blocks_empty",
        "kv_cache_blocks_promised",
        "kv_cache_blocks_shared",
        "kv_cache_slots_behind_kv",
        "kv_cache_blocks_pinned",
        "kv_cache_blocks_of_key",
        "kv_cache_usage_perc",
        "kv_store_out",
        "kv_transfer_bytes_in_flight",
        "kv_transfer_bytes_waiting",
        "profile_ratio",
    }
)
_LABEL = re.compile(r'(\w+)="([^"]*)"', re.ASCII)
_SERIES = re.compile(rf"(?P<name>\w+)(?:\{{(?P<labels>{_LABEL.pattern}(?:,{_LABEL.pattern})*)\}})?", re.ASCII)


@lru_cache(4096)
def series(name: str, **labels: str) -> str:
    """Return `name{a="b"}`, the key under which a series is stored and sent. `LABELS` names its labels: routers check it."""
    assert tuple(sorted(labels)) == LABELS.get(name, ()), f"LABELS does not name the labels of {name}: {sorted(labels)}"
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def parse_series(key: str) -> tuple[str, dict[str, str]] | None:
    """Return the name and the labels of a series, or None if `key` is not one."""
    match = _SERIES.fullmatch(key)
    return None if match is None else (match["name"], dict(_LABEL.findall(match["labels"] or "")))


def metric_families(processes: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> Iterator[Metric]:
    """Return the Prometheus metric families of several processes, each given as (process labels, values by series).

    Series with an unknown name, from a process of another version, are left out.
    """
    processes = list(processes)
    labels_of: dict[str, dict[str, dict[str, str]]] = {}  # name → series → labels
    for key in dict.fromkeys(key for _, values in processes for key in values):
        parsed = parse_series(key)
        assert parsed is not None, f"not a series: {key}"
        labels_of.setdefault(parsed[0], {})[key] = parsed[1]
    for name in filter(HELP.__contains__, labels_of):
        yield _family(name, labels_of[name], processes)


def _family(
    name: str,
    labels_of: Mapping[str, Mapping[str, str]],
    processes: Sequence[tuple[Mapping[str, str], Mapping[str, float]]],
) -> Metric:
    """Return the family of one name, whose series have these labels."""
    kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
    names = sorted({*processes[0][0], *next(iter(labels_of.values()))})
    family = kind(f"pdserve_{name}", HELP[name], labels=names)
    for process_labels, values in processes:
        for key, labels in labels_of.items():
            if key in values:
                all_labels = {**process_labels, **labels}
                family.add_metric([all_labels[label] for label in names], values[key])
    return family
