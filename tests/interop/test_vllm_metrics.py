"""Metrics by vLLM's names, as Prometheus reads them."""

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.counters import metric_families, series
from pdserve.interop.vllm_metrics import instance_families
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import Fleet
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline

COUNTERS = {
    "num_requests_running": 3.0,
    "num_requests_waiting": 2.0,
    "kv_cache_blocks": 10.0,
    "kv_cache_blocks_held": 4.0,
    series("prompt_tokens_by_source", source="computed"): 20.0,
    series("prompt_tokens_by_source", source="loaded"): 5.0,
    "spec_decode_num_draft_tokens": 9.0,
    series("spec_decode_num_accepted_tokens_per_pos", position="0"): 4.0,
    series("spec_decode_num_accepted_tokens_per_pos", position="1"): 2.0,
}


class Connection:
    def send(self, frame: pb.RouterFrame) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def values(text: str) -> dict[str, float]:
    """Return the values of vLLM's series; each has the label model_name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels.pop("model_name") == "demo"
                found["/".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def test_an_instance() -> None:
    class Collector:
        def collect(self):  # type: ignore[no-untyped-def]
            yield from instance_families(metric_families([({}, COUNTERS)]), "demo")

    registry = CollectorRegistry()
    registry.register(Collector())
    assert values(generate_latest(registry).decode()) == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:prompt_tokens_total": 25,
        "vllm:spec_decode_num_draft_tokens_total": 9,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total/0": 4,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total/1": 2,
    }


def test_a_router_sums_over_its_instances() -> None:
    fleet = Fleet("router", "demo", 1.0, time.monotonic)
    for name in ("a", "b"):
        hello = pb.Hello(instance_id=name, role="both", model="demo", max_model_len=9, num_blocks=9, block_size=2)
        fleet.register(hello, Connection()).update_heartbeat(pb.Heartbeat(counters=COUNTERS))
    assert "vllm:" not in Metrics(fleet).text().decode()
    metrics = Metrics(fleet, "demo")
    stamps = {Stage.RECEIVED: 0.0, Stage.FIRST_TOKEN: 0.3, Stage.FINISHED: 1.5}
    metrics.record_finished(Timeline("r", stamps=stamps, prompt_tokens=7, output_tokens=5, finish_reason="length"))
    found = values(metrics.text().decode())
    assert found.items() >= {
        ("vllm:num_requests_running", 6),
        ("vllm:num_requests_waiting", 4),
        ("vllm:kv_cache_usage_perc", 0.4),
        ("vllm:prompt_tokens_total", 7),
        ("vllm:generation_tokens_total", 5),
        ("vllm:request_success_total/length", 1),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:time_to_first_token_seconds_bucket/0.2", 0),
        ("vllm:time_to_first_token_seconds_bucket/0.5", 1),
        ("vllm:e2e_request_latency_seconds_sum", 1.5),
        ("vllm:inter_token_latency_seconds_count", 0),
    }
