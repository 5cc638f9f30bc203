"""A real cluster: how blocks lie in it, slots that move, nodes that die, hang and are replaced."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest
import redis
from redis.crc import key_slot

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.redis.cluster import RedisClusterConnector
from tests.waiting import wait_until

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
StartRedis = Callable[..., Any]
StartCluster = Callable[..., Any]

PARTIAL = ("--cluster-require-full-coverage", "no")


def slot_of(instance: Any, key: bytes) -> int:
    return key_slot(f"{instance.layout.namespace.hex()}:{key.hex()}".encode())


def node_of(cluster: Any, slot: int) -> Any:
    return cluster.nodes[next(i for i, share in enumerate(np.array_split(range(16384), 3)) if slot in share)]


def id_of(cluster: Any, node: Any) -> str:
    return str(cluster.cluster_command(node, "MYID").decode())


def names_on(node: Any) -> set[bytes]:
    with closing(redis.Redis.from_url(node.url)) as client:
        return set(cast(list[bytes], client.keys()))


def keys_on(cluster: Any, instance: Any, node: Any, count: int, new_keys: NewKeys) -> list[bytes]:
    """New keys whose slots are on this node."""
    return [key for key in new_keys(60 + 20 * count) if node_of(cluster, slot_of(instance, key)) is node][:count]


def test_blocks_are_distributed_evenly_and_each_is_in_one_slot(
    start_cluster: StartCluster, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    cluster = start_cluster()
    instance, keys = attach(f"{cluster.url}?value_bytes=1000", layout_of(4096), blocks=300), new_keys(300)
    assert instance.store(keys, range(300)).leading == 300
    names = [names_on(node) for node in cluster.nodes]
    assert sum(map(len, names)) == 300 * 6  # five pieces and a header per block
    assert all(60 * 6 < len(some) < 140 * 6 for some in names)
    slots = {name.split(b":")[2]: key_slot(name) for some in names for name in some}
    assert all(slots[name.split(b":")[2]] == key_slot(name) for some in names for name in some)
    assert instance.match(keys) == 300
    before = instance.rows.copy()
    assert instance.load(keys, range(299, -1, -1)).leading == 300
    np.testing.assert_array_equal(instance.rows[::-1], before)


def test_the_other_nodes_are_discovered_from_one(
    start_cluster: StartCluster, attach: Attach, new_keys: NewKeys
) -> None:
    cluster, keys = start_cluster(), new_keys(12)
    one = attach(f"redis+cluster://localhost:{cluster.nodes[2].port}/")
    one.store(keys, range(12))
    assert attach(cluster.url).match(keys) == 12


def test_a_node_that_dies_loses_only_its_own_blocks_and_restarts(
    start_cluster: StartCluster, attach: Attach, new_keys: NewKeys
) -> None:
    cluster = start_cluster(*PARTIAL)
    instance, keys = attach(f"{cluster.url}?timeout=20", blocks=64), new_keys(32)
    before = instance.rows.copy()
    assert instance.store(keys, range(32)).leading == 32
    dead = cluster.nodes[1]
    lost = [node_of(cluster, slot_of(instance, key)) is dead for key in keys]
    assert 0 < sum(lost) < 32

    dead.kill()
    expected = [Outcome.UNAVAILABLE if gone else Outcome.OK for gone in lost]
    assert instance.load(keys, range(32, 64)).outcomes == expected
    assert instance.store(keys, range(32)).outcomes == expected
    assert instance.match(keys) == lost.index(True)
    kept = [i for i, gone in enumerate(lost) if not gone]
    np.testing.assert_array_equal(instance.rows[[32 + i for i in kept]], before[kept])
    assert instance.connector.stats().failures == {
        ("load", Outcome.UNAVAILABLE): sum(lost),
        ("store", Outcome.UNAVAILABLE): sum(lost),
    }

    dead.start()
    give_up = time.monotonic() + 60
    while instance.store(keys, range(32)).leading < 32:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert instance.load(keys, range(32, 64)).leading == 32


def test_a_hanging_node_costs_its_own_blocks_and_no_more_than_the_timeout(
    start_cluster: StartCluster, attach_hasty: Attach, new_keys: NewKeys
) -> None:
    cluster = start_cluster(*PARTIAL)
    instance, keys = attach_hasty(f"{cluster.url}?timeout=1", blocks=64), new_keys(32)
    wait_until(lambda: instance.store(keys, range(32)).leading == 32, "each of the nodes answers in time")
    hung = cluster.nodes[0]
    expected = [Outcome.UNAVAILABLE if node_of(cluster, slot_of(instance, key)) is hung else Outcome.OK for key in keys]
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        give_up = time.monotonic() + 60
        while (
            instance.load(keys, range(32, 64)).outcomes != expected
        ):  # the other nodes may time out, too, on a busy machine
            assert time.monotonic() < give_up
        instance.rows[32:] = 7  # the caller reuses the rows
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert (instance.rows[32:] == 7).all()


def test_a_replica_that_takes_over_is_used(start_cluster: StartCluster, attach: Attach, new_keys: NewKeys) -> None:
    cluster = start_cluster(*PARTIAL, "--cluster-node-timeout", "1000")
    primary, replica = cluster.nodes[0], cluster.start()
    cluster.cluster_command(replica, "REPLICATE", id_of(cluster, primary))
    instance = attach(cluster.url, blocks=64)
    keys = keys_on(cluster, instance, primary, 8, new_keys)
    assert instance.store(keys, range(8)).leading == 8
    give_up = time.monotonic() + 60
    while names_on(replica) != names_on(primary):
        assert time.monotonic() < give_up
        time.sleep(0.05)

    primary.kill()
    while instance.load(keys, range(8, 16)).leading < 8:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    np.testing.assert_array_equal(instance.rows[8:16], instance.rows[:8])


def test_moved_slots_are_followed(start_cluster: StartCluster, attach: Attach, new_keys: NewKeys) -> None:
    cluster = start_cluster()
    source, target = cluster.nodes[:2]
    instance = attach(cluster.url)
    keys = keys_on(cluster, instance, source, 4, new_keys)
    instance.store(keys, range(4))
    with closing(redis.Redis.from_url(source.url)) as client:
        client.flushall()  # SETSLOT moves a slot without its values
    for key in keys:
        for node in cluster.nodes:
            cluster.cluster_command(node, "SETSLOT", slot_of(instance, key), "NODE", id_of(cluster, target))
    assert instance.load(keys, range(8, 12)).outcomes == [Outcome.MISSING] * 4
    assert instance.store(keys, range(4)).leading == 4
    assert instance.load(keys, range(8, 12)).leading == 4
    np.testing.assert_array_equal(instance.rows[8:12], instance.rows[:4])
    assert len(names_on(target)) == 8


def test_a_slot_being_migrated(start_cluster: StartCluster, attach: Attach, new_keys: NewKeys) -> None:
    """Each value of a block is found on the node it is on: the source, or the target of the migration."""
    cluster = start_cluster()
    source, target = cluster.nodes[:2]
    instance = attach(cluster.url)
    (key, *_) = keys_on(cluster, instance, source, 1, new_keys)
    slot = slot_of(instance, key)
    instance.store([key], [0])
    cluster.cluster_command(target, "SETSLOT", slot, "IMPORTING", id_of(cluster, source))
    cluster.cluster_command(source, "SETSLOT", slot, "MIGRATING", id_of(cluster, target))
    assert instance.load([key], [8]).leading == 1

    def move(*names: bytes) -> None:
        with closing(redis.Redis.from_url(source.url)) as client:
            client.migrate("127.0.0.1", target.port, list(names), 0, 5000)

    *pieces, header = sorted(names_on(source), reverse=True)
    move(header)
    instance.rows[8] = 0
    assert instance.load([key], [8]).leading == 1
    np.testing.assert_array_equal(instance.rows[8], instance.rows[0])
    assert instance.match([key]) == 0  # EXISTS is sent for all values at once
    move(*pieces)
    instance.rows[8] = 0
    assert instance.match([key]) == instance.load([key], [8]).leading == 1
    np.testing.assert_array_equal(instance.rows[8], instance.rows[0])
    instance.connector.delete_many([key])
    # A new block is stored on the target.
    assert instance.store([key], [1]).leading == instance.load([key], [9]).leading == 1
    np.testing.assert_array_equal(instance.rows[9], instance.rows[1])
    assert not names_on(source) and len(names_on(target)) == 2


def test_a_full_node_ends_full_and_keeps_no_partial_blocks(
    start_cluster: StartCluster, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    cluster = start_cluster("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    instance = attach(f"{cluster.url}?value_bytes=256KiB", layout_of(1 << 20), blocks=48)
    keys = new_keys(48)
    outcomes = Counter(instance.store(keys, range(48)).outcomes)
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    assert sum(len(names_on(node)) for node in cluster.nodes) == 5 * outcomes[Outcome.OK]


def test_a_server_without_cluster_mode_is_refused(start_redis: StartRedis, attach: Attach) -> None:
    server = start_redis()
    with pytest.raises(SetupError, match=r"No Redis Cluster answers at .*Cluster mode is not enabled"):
        attach(f"redis+cluster://127.0.0.1:{server.port}")
    server.kill()
    with pytest.raises(SetupError, match=r"redis\+cluster://me:\*\*\*@127.0.0.1:\d+,localhost:1: ") as caught:
        attach(f"redis+cluster://me:secret@127.0.0.1:{server.port},localhost:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://host/1", "redis+cluster://host:1,", "redis+cluster://h:x"]
)
def test_urls_without_an_address_are_refused(url: str) -> None:
    with pytest.raises(SetupError):
        RedisClusterConnector(url)


def test_several_hosts_need_the_cluster_scheme() -> None:
    from pdserve.kv_transfer.connectors.redis.connector import RedisConnector

    with pytest.raises(SetupError, match="not of the form redis://host:port/db"):
        RedisConnector("redis://one:1,two:2")
