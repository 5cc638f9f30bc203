"""Tests of `redis://` with a real server."""

import os
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import redis

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
StartRedis = Callable[..., Any]


def test_blocks_are_stored_in_pieces(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    server = start_redis()
    instance, keys = attach(f"{server.url}?value_bytes=10000&ttl=100", layout_of(32768), blocks=8), new_keys(2)
    instance.store(keys, [0, 1])
    assert instance.load(keys, [4, 5]).leading == 2
    np.testing.assert_array_equal(instance.rows[4:6], instance.rows[0:2])
    with closing(redis.Redis.from_url(server.url)) as client:
        names = sorted(client.keys(f"*{keys[0].hex()}*"))
        assert [client.strlen(name) for name in names] == [64, 10000, 10000, 10000, 2768]
        assert all(40_000 < client.pttl(name) <= 100_000 for name in names)
        client.expire(names[2], 20)
        instance.store(keys, [0, 1], lease_s=500)  # renews all of them, to the lease because that is longer
        assert all(440_000 < client.pttl(name) <= 500_000 for name in names)
        client.delete(names[2])  # evicted partly
    assert instance.match(keys) == 0
    assert instance.load(keys, [4, 5]).outcomes == [Outcome.MISSING, Outcome.OK]
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [4, 5]).leading == 2


@pytest.mark.parametrize("how", ["prolonged", "stored"])
def test_a_block_does_not_end_earlier_than_before(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, how: str
) -> None:
    """Another instance may have leased it for longer, or may keep blocks for longer, or for ever."""
    server = start_redis()
    instance, keys = attach(f"{server.url}?ttl=100&threads=1", layout_of(32768), blocks=8), new_keys(3)
    instance.store(keys[:2], [0, 1])
    with closing(redis.Redis.from_url(server.url)) as client:
        names = [sorted(client.keys(f"*{key.hex()}*")) for key in keys]
        for name in names[0]:
            client.expire(name, 1000)
        client.persist(names[1][0])
        client.expire(names[1][1], 50)
        if how == "stored":
            assert instance.store(keys[:2], [0, 1], lease_s=300).leading == 2
        else:
            instance.connector.prolong(keys, lease_s=300)
            instance.match(keys)  # behind it, by the only worker
        assert all(client.pttl(name) > 900_000 for name in names[0])
        assert client.pttl(names[1][0]) == -1 and 200_000 < client.pttl(names[1][1]) <= 300_000


def test_a_store_does_not_end_a_longer_lease(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    """An instance may have prolonged the block, while another one stores it with the shortest of leases."""
    server = start_redis()
    instance, keys = attach(f"{server.url}?ttl=60&threads=1", layout_of(32768), blocks=8), new_keys(2)
    instance.store(keys, [0, 1])
    instance.connector.prolong(keys, lease_s=300)
    assert instance.store(keys, [0, 1], lease_s=0.0).leading == 2
    with closing(redis.Redis.from_url(server.url)) as client:
        assert all(client.pttl(name) > 200_000 for name in client.keys("*"))
        client.delete(*client.keys(f"*{keys[0].hex()}*:0"))
        assert instance.store(keys, [0, 1]).leading == 2, "a part was evicted"
        assert instance.load(keys, [4, 5]).leading == 2


@pytest.mark.parametrize("length", [10, 65, 5000])
def test_any_value_in_place_of_a_header_is_corrupt(
    length: int, start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    server = start_redis()
    instance, keys = attach(server.url, layout_of(32768), blocks=8), new_keys(3)
    instance.store(keys, [0, 1, 2])
    with closing(redis.Redis.from_url(server.url)) as client:
        (name,) = [name for name in client.keys(f"*{keys[1].hex()}*") if client.strlen(name) == 64]
        client.set(name, bytes(length))
        assert instance.load(keys, [4, 5, 6]).outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
        assert not client.exists(name)
    assert instance.store(keys, [0, 1, 2]).leading == instance.load(keys, [4, 5, 6]).leading == 3


# In place of a value, number or status: none of these may end the future of an operation by an exception.
NO_REPLIES = [b"HTTP/1.1 400\r\n", b"$abc\r\n", b"$-5\r\n", b"$99999999999\r\n", b":x\r\n", b"*1\r\n" * 5000]


class NoRedis(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    block_on_close = False


@pytest.mark.parametrize("reply", NO_REPLIES, ids=lambda reply: str(reply[:8]))
def test_a_server_that_is_no_redis_is_unavailable(
    reply: bytes, start_redis: StartRedis, attach: Attach, new_keys: NewKeys
) -> None:
    server, keys = start_redis(), new_keys(2)
    instance = attach(f"{server.url}?timeout=2", blocks=8)
    server.kill()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(1 << 16):
                self.request.sendall(reply)

    with NoRedis(("127.0.0.1", server.port), Handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        try:
            assert instance.load(keys, [4, 5]).outcomes == [Outcome.UNAVAILABLE] * 2
            assert instance.store(keys, [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
            assert instance.match(keys) == 0
            with pytest.raises(SetupError, match="No Redis answers"):
                attach(server.url)
        finally:
            other.shutdown()


def test_instances_with_different_piece_sizes_do_not_share_blocks(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    server, keys = start_redis(), new_keys(2)
    one = attach(f"{server.url}?value_bytes=10000", layout_of(32768))
    other = attach(f"{server.url}?value_bytes=20000", layout_of(32768))
    one.store(keys, [0, 1])
    assert other.load(keys, [0, 1]).outcomes == [Outcome.MISSING] * 2
    assert one.match(keys) == 2


def test_a_unix_socket(start_redis: StartRedis, attach: Attach, new_keys: NewKeys) -> None:
    server, keys = start_redis(), new_keys(2)
    instance = attach(f"redis+unix://{server.socket}?ttl=60")
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [4, 5]).leading == 2


def test_an_unreachable_server_is_an_error_without_the_password(start_redis: StartRedis, attach: Attach) -> None:
    server = start_redis()
    server.kill()
    with pytest.raises(SetupError, match=r"No Redis answers at redis://me:\*\*\*@127.0.0.1:\d+/0: .*refused") as caught:
        attach(server.url.replace("//", "//me:secret@"))
    assert "secret" not in str(caught.value)


def test_a_wrong_password_is_an_error_that_does_not_show_it(
    start_redis: StartRedis, attach: Attach, new_keys: NewKeys
) -> None:
    server = start_redis()
    with closing(redis.Redis.from_url(server.url)) as client:
        client.acl_setuser("me", enabled=True, passwords=["+right"], categories=["+@all"], keys=["*"])
    with pytest.raises(SetupError, match="No Redis answers") as caught:
        attach(server.url.replace("//", "//me:secret@"))
    assert "secret" not in str(caught.value)
    instance, keys = attach(server.url.replace("//", "//me:right@")), new_keys(1)
    assert instance.store(keys, [0]).leading == instance.load(keys, [1]).leading == 1


@pytest.mark.parametrize("url", ["redis://", "redis:///0", "redis://host/x", "redis+unix://", "redis+unix:///"])
def test_urls_without_an_address_are_refused(url: str) -> None:
    with pytest.raises(SetupError):
        RedisConnector(url)


def test_a_server_that_dies_and_restarts(start_redis: StartRedis, attach: Attach, new_keys: NewKeys) -> None:
    server = start_redis()
    instance, keys = attach(f"{server.url}?timeout=20"), new_keys(2)
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [4, 5]).leading == 2

    server.kill()
    assert instance.store(keys, [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.load(keys, [4, 5]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.match(keys) == 0

    server.start()
    assert instance.load(keys, [4, 5]).outcomes == [Outcome.MISSING] * 2  # on the first attempt
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [4, 5]).leading == 2


def test_a_server_killed_during_transfers(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    server = start_redis()
    instance, keys = attach(f"{server.url}?timeout=5", layout_of(1 << 20), blocks=128), new_keys(64)
    before = instance.rows[:64].copy()
    store = instance.connector.store(keys, range(64), lease_s=60)
    load = instance.connector.load(keys, range(64, 128))
    time.sleep(0.02)
    server.kill()
    assert set(store.result(60).outcomes) <= {Outcome.OK, Outcome.UNAVAILABLE}
    for row, outcome in enumerate(load.result(60).outcomes):
        assert outcome in (Outcome.OK, Outcome.MISSING, Outcome.UNAVAILABLE)
        if outcome is Outcome.OK:
            np.testing.assert_array_equal(instance.rows[64 + row], before[row])


def test_a_hanging_server_costs_no_more_than_the_timeout(
    start_redis: StartRedis, attach_hasty: Attach, new_keys: NewKeys
) -> None:
    server = start_redis()
    instance, keys = attach_hasty(f"{server.url}?timeout=0.5"), new_keys(2)
    with closing(redis.Redis.from_url(server.url)) as client:
        client.client_pause(600_000)
    assert instance.load(keys, [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.match(keys) == 0


def test_a_full_server_ends_full_and_keeps_no_partial_blocks(
    start_redis: StartRedis, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    server = start_redis("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    instance, keys = attach(f"{server.url}?value_bytes=256KiB", layout_of(1 << 20), blocks=32), new_keys(16)
    outcomes = instance.store(keys, range(16)).outcomes
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    with closing(redis.Redis.from_url(server.url)) as client:
        assert client.dbsize() == 5 * sum(outcome is Outcome.OK for outcome in outcomes)
    for key, outcome, row in zip(keys, outcomes, range(16), strict=True):
        assert instance.match([key]) == (outcome is Outcome.OK)
        if outcome is Outcome.OK:
            assert instance.load([key], [16 + row]).outcomes == [Outcome.OK]
            np.testing.assert_array_equal(instance.rows[16 + row], instance.rows[row])


def test_blocks_expire(start_redis: StartRedis, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"{start_redis().url}?ttl=0.3"), new_keys(2)
    instance.store(keys[:1], [0], lease_s=0.1)
    instance.store(keys[1:], [1], lease_s=60)
    time.sleep(0.5)
    assert (instance.match(keys[:1]), instance.match(keys[1:])) == (0, 1)


def test_stores_to_a_read_only_server_are_unavailable(
    start_redis: StartRedis, attach: Attach, new_keys: NewKeys
) -> None:
    server = start_redis()
    instance, keys = attach(server.url), new_keys(1)
    instance.store(keys, [0])
    with closing(redis.Redis.from_url(server.url)) as client:
        client.replicaof("127.0.0.1", str(os.getpid() % 1000 + 1))  # a replica without a primary
    assert instance.store(keys, [0]).outcomes == [Outcome.UNAVAILABLE]
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.UNAVAILABLE]
