"""Gauges of the load of instances, by which fleets are scaled."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config import RouterConfig
from pdserve.costs import Costs
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.limits.admission_queue import AdmissionQueue
from pdserve.router.limits.key_file import ANONYMOUS
from tests.router.dispatch.conftest import Cluster

COSTS = Costs(prefill=(1.0, 0.5, 0.0), decode=(0.1, 0.0, 0.0))


def gauges(cluster: Cluster, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(cluster.dispatcher._metrics.text().decode())
    (family,) = [family for family in families if family.name == name]
    return {sample.labels["instance"]: sample.value for sample in family.samples}


def test_prefill_backlog_is_what_the_prompts_of_all_routers_take(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    prefill.candidate.update_costs(COSTS)
    assert gauges(cluster, "pdserve_prefill_backlog_seconds") == {prefill.id: 0, decode.id: 0}
    cluster.open("a")  # 3 tokens
    assert gauges(cluster, "pdserve_prefill_backlog_seconds") == {prefill.id: 1 + 3 * 0.5, decode.id: 0}
    prefill.update_other_load(pb.Load(requests=2, prefills=2, prefill_tokens=10))
    assert gauges(cluster, "pdserve_prefill_backlog_seconds") == {prefill.id: 2.5 + 2 + 10 * 0.5, decode.id: 0}


def test_kv_occupancy_counts_reservations_and_what_waits_for_room(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    assert gauges(cluster, "pdserve_kv_occupancy") == {prefill.id: 0, decode.id: 0}
    heartbeat = pb.Heartbeat(free_blocks=33, counters={"engine_steps": 1.0})
    cluster.fleet.handle_frame(decode, pb.InstanceFrame(heartbeat=heartbeat))
    assert gauges(cluster, "pdserve_kv_occupancy")[decode.id] == pytest.approx(66 / 99)
    cluster.open("a", prompt=[1] * 90)
    decode.update_other_load(pb.Load(requests=9, context_tokens=2 * 99))
    assert gauges(cluster, "pdserve_kv_occupancy")[decode.id] == pytest.approx((90 + 198) / 198)


def test_the_admission_queue_counts_for_the_instances_that_will_serve_it(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "decode")
    first, second, decode = cluster.instances
    for instance in cluster.instances:
        instance.candidate.update_costs(COSTS)
    queue = AdmissionQueue([], RouterConfig(model="m", max_requests=1), cluster.dispatcher._metrics, lambda: 7.0)
    for tokens in (5, 30, 10):
        queue.enter(ANONYMOUS, tokens, 100)
    assert queue.queued() == [(7.0, 30), (7.0, 10)]
    assert gauges(cluster, "pdserve_prefill_backlog_seconds") == {first.id: 10, second.id: 10, decode.id: 0}
    occupancy = gauges(cluster, "pdserve_kv_occupancy")
    assert occupancy[decode.id] == pytest.approx(40 / decode.candidate.capacity_tokens) and occupancy[first.id] == 0
