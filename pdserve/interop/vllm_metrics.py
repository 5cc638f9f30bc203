"""Metrics by vLLM's names, for dashboards and endpoint pickers that know these: `--vllm-metrics`.

Each has one series for the whole process, labelled with the model only: llm-d's endpoint picker reads the first series.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Our family → vLLM's, without the suffix of counters. Values are summed over instances and labels.
GAUGES = {
    "pdserve_num_requests_running": "vllm:num_requests_running",
    "pdserve_num_requests_waiting": "vllm:num_requests_waiting",
}
# Of an instance.
INSTANCE_COUNTERS = {
    "pdserve_prompt_tokens_by_source": "vllm:prompt_tokens",
    "pdserve_generation_tokens": "vllm:generation_tokens",
    "pdserve_prefix_cache_queries": "vllm:prefix_cache_queries",
    "pdserve_prefix_cache_hits": "vllm:prefix_cache_hits",
    "pdserve_num_preemptions": "vllm:num_preemptions",
    "pdserve_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "pdserve_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "pdserve_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "pdserve_spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
# Of a router. The counters of its instances are not among them: a sum would fall when an instance leaves.
ROUTER_COUNTERS = {
    "pdserve_prompt_tokens": "vllm:prompt_tokens",
    "pdserve_output_tokens": "vllm:generation_tokens",
    "pdserve_requests": "vllm:request_success",
}
# vLLM's family → our label and theirs, of those that have one beside the model.
KEPT_LABELS = {
    "vllm:request_success": ("finish_reason", "finished_reason"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position", "position"),
}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
BLOCKS, HELD_BLOCKS = "pdserve_kv_cache_blocks", "pdserve_kv_cache_blocks_held"


def instance_families(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Return vLLM's families for an instance's, which are read as the result is; `model` is the served model's name."""
    return _families(families, INSTANCE_COUNTERS, model)


def router_families(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Return the same for a router's."""
    return _families(families, ROUTER_COUNTERS, model)


def _families(families: Iterable[Metric], counters: dict[str, str], model: str) -> Iterator[Metric]:
    labels, blocks = {"model_name": model}, {BLOCKS: 0.0, HELD_BLOCKS: 0.0}
    for family in families:
        total = sum(sample.value for sample in family.samples if sample.name in (family.name, f"{family.name}_total"))
        name = family.name.removeprefix("pdserve_")
        if family.name in blocks:
            blocks[family.name] = total
        elif family.name in GAUGES:
            yield _gauge(GAUGES[family.name], family.documentation, total, labels)
        elif family.name in counters:
            yield _counter(counters[family.name], family, labels)
        elif name in HISTOGRAMS:
            yield _renamed(f"vllm:{name}", family, labels)
    usage = blocks[HELD_BLOCKS] / blocks[BLOCKS] if blocks[BLOCKS] else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "share of the KV blocks that are held, 0 to 1", usage, labels)


def _gauge(name: str, help: str, value: float, labels: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(name, help, labels=[*labels])
    family.add_metric([*labels.values()], value)
    return family


def _counter(name: str, family: Metric, labels: dict[str, str]) -> Metric:
    """Return a counter with the sum, or with one series for each value of the label that vLLM has, too."""
    ours, theirs = KEPT_LABELS.get(name, ("", ""))
    by_value: dict[str, float] = {}
    for sample in family.samples:
        if sample.name == f"{family.name}_total":
            value = sample.labels.get(ours, "")
            by_value[value] = by_value.get(value, 0.0) + sample.value
    counter = CounterMetricFamily(name, family.documentation, labels=[*labels, *([theirs] if theirs else [])])
    for value, total in by_value.items():
        counter.add_metric([*labels.values(), *([value] if theirs else [])], total)
    return counter


def _renamed(name: str, family: Metric, labels: dict[str, str]) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            renamed.add_sample(name + sample.name.removeprefix(family.name), {**sample.labels, **labels}, sample.value)
    return renamed
