"""Resets of the prefix cache: each begins a later epoch, of which every instance and every other router learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import MAX_EPOCH, InstanceHandle

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster


def told(cluster: Cluster, instance: InstanceHandle) -> list[int]:
    """Return the epochs that an instance was told."""
    return [content.epoch for kind, content in cluster.sent(instance) if kind == "reset_cache"]


def test_an_epoch_is_later_than_the_last_whatever_the_clock_says(make_cluster: type[Cluster]) -> None:
    cluster, begun = make_cluster("prefill", "decode"), list[int]()
    cluster.fleet.on_reset = lambda: begun.append(cluster.fleet.cache_epoch)
    for now_ms in (1000, 1000, 900):
        cluster.dispatcher.reset_prefix_cache(now_ms)
    assert begun == [1000, 1001, 1002]
    assert [told(cluster, instance) for instance in cluster.instances] == [begun, begun]


def test_who_attaches_is_told_the_epoch_if_there_was_a_reset(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster()
    first = cluster.join("first", "both")
    cluster.fleet.on_joined(first)
    assert told(cluster, first) == []
    cluster.dispatcher.reset_prefix_cache(1000)
    second = cluster.join("second", "both")
    cluster.fleet.on_joined(second)
    assert told(cluster, second) == [1000]


def test_instances_tell_of_resets_on_other_routers(make_cluster: type[Cluster]) -> None:
    cluster, begun = make_cluster("prefill", "decode"), list[int]()
    cluster.fleet.on_reset = lambda: begun.append(cluster.fleet.cache_epoch)
    for epoch in (1000, 1000, 999, MAX_EPOCH + 1):
        heartbeat = pb.Heartbeat(cache_epoch=epoch, counters={"engine_steps": 0})
        cluster.fleet.handle_frame(cluster.instances[0], pb.InstanceFrame(heartbeat=heartbeat))
    assert begun == [1000] == told(cluster, cluster.instances[1])
