"""Tests of `shm://` with blocks that are stored while they are being written, and loads that follow them."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from tests.kv_transfer.clock import Clock

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]

KiB = 1024
BLOCK_BYTES, COUNT = 256 * KiB, 4
SIZE = 16 << 20
IDS = range(COUNT)

# A process that has written the first half of its blocks, and waits.
WRITER = """
import sys, time
import numpy as np
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.rules.context import make_layout
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector

url, block_bytes, *keys = sys.argv[1:]
connector = ShmConnector(url)
connector.attach(PoolMemory(np.ones((len(keys), int(block_bytes)), np.uint8), make_layout(int(block_bytes))))
store = connector.store_growing([bytes.fromhex(key) for key in keys], range(len(keys)), lease_s=60.0)
store.advance(int(block_bytes) // 2)
while not store.is_growing:
    time.sleep(0.001)
print("half", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pair(name: str, attach: Attach, layout_of: LayoutOf) -> tuple[Any, Any]:
    """Two pools of different bytes on one store."""
    url, layout = f"shm://{name}?size={SIZE}", layout_of(BLOCK_BYTES)
    return attach(url, layout), attach(url, layout)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def equal(first: Any, second: Any) -> bool:
    return np.array_equal(first.rows[:COUNT], second.rows[:COUNT])


def test_blocks_appear_once_they_are_complete(pair: tuple[Any, Any], new_keys: NewKeys) -> None:
    (writer, reader), keys = pair, new_keys(COUNT)
    expected = writer.rows[:COUNT].copy()
    writer.rows[:COUNT] = 0
    store = writer.connector.store_growing(keys, IDS, lease_s=60.0)
    for stop in range(BLOCK_BYTES // 4, BLOCK_BYTES, BLOCK_BYTES // 4):
        writer.rows[:COUNT, :stop] = expected[:, :stop]
        store.advance(stop)
        until(lambda: store.is_growing)
        assert reader.match(keys) == 0
        assert reader.load(keys, IDS).outcomes == [Outcome.MISSING] * COUNT
    writer.rows[:COUNT] = expected
    store.advance(BLOCK_BYTES)
    assert store.result(timeout=60).outcomes == [Outcome.OK] * COUNT
    assert reader.match(keys) == COUNT
    assert reader.load(keys, IDS).outcomes == [Outcome.OK] * COUNT
    assert np.array_equal(reader.rows[:COUNT], expected)


def test_a_follower_has_read_what_is_written(pair: tuple[Any, Any], new_keys: NewKeys) -> None:
    (writer, reader), keys = pair, new_keys(COUNT)
    store = writer.connector.store_growing(keys, IDS, lease_s=60.0)
    follow = reader.connector.follow(keys, IDS, patience_s=60.0)
    half = BLOCK_BYTES // 2
    store.advance(half)
    until(lambda: np.array_equal(reader.rows[:COUNT, :half], writer.rows[:COUNT, :half]))
    assert not follow.done()
    store.advance(BLOCK_BYTES)
    result = follow.result(timeout=60)
    assert result.outcomes == [Outcome.OK] * COUNT
    assert equal(reader, writer)
    assert reader.connector.stats().bytes["load"] == COUNT * BLOCK_BYTES


def test_followers_of_what_does_not_come_hold_up_nothing(
    name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    url, keys = f"shm://{name}?size={SIZE}", new_keys(COUNT)
    writer, reader = attach(url, layout_of(BLOCK_BYTES)), attach(f"{url}&threads=1", layout_of(BLOCK_BYTES))
    follows = [reader.connector.follow(new_keys(1), [id], patience_s=60.0) for id in (4, 5)]
    writer.store(keys, IDS)
    assert reader.connector.follow(keys, IDS, patience_s=60.0).result(timeout=60).outcomes == [Outcome.OK] * COUNT
    assert reader.load(keys, IDS).outcomes == [Outcome.OK] * COUNT
    for follow in follows:
        follow.request_cancel()
        follow.result(timeout=60)


def test_a_front_of_another_writing_is_not_trusted(pair: tuple[Any, Any], new_keys: NewKeys) -> None:
    (writer, reader), keys = pair, new_keys(COUNT)
    store = writer.connector.store_growing(keys, IDS, lease_s=60.0)
    follow = reader.connector.follow(keys, IDS, patience_s=60.0)
    half = BLOCK_BYTES // 2
    store.advance(half)
    until(lambda: np.array_equal(reader.rows[:COUNT, :half], writer.rows[:COUNT, :half]))
    store.request_cancel()
    assert store.result(timeout=60).outcomes == [Outcome.CANCELLED] * COUNT
    writer.rows[:COUNT] ^= 255
    assert writer.store(keys, IDS).outcomes == [Outcome.OK] * COUNT
    assert follow.result(timeout=60).outcomes == [Outcome.OK] * COUNT
    assert equal(reader, writer)
    assert not reader.connector.stats().failures


def test_a_store_waits_for_blocks_longer_than_its_timeout(
    name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    writer, keys = attach(f"shm://{name}?size={SIZE}", layout_of(BLOCK_BYTES)), new_keys(COUNT)
    store = writer.connector.store_growing(keys, IDS, lease_s=60.0)
    store.advance(1)
    until(lambda: store.is_growing)
    clock.advance(10 * writer.connector.timeout, writer.connector)
    time.sleep(0.1)  # for the watchdog
    assert not store.done()
    store.advance(BLOCK_BYTES)
    result = store.result(timeout=60)
    assert result.outcomes == [Outcome.OK] * COUNT
    assert result.seconds == 0.0, "waiting is not moving"


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_store_that_ends_early_leaves_nothing(pair: tuple[Any, Any], new_keys: NewKeys, is_closed: bool) -> None:
    (writer, reader), keys = pair, new_keys(COUNT)
    store = writer.connector.store_growing(keys, IDS, lease_s=60.0)
    store.advance(BLOCK_BYTES // 2)
    until(lambda: store.is_growing)
    (writer.connector.close if is_closed else store.request_cancel)()
    assert store.result(timeout=60).outcomes == [Outcome.CANCELLED] * COUNT
    slab = reader.connector._slab
    assert all(slab.find_growing(reader.layout.namespace + key) is None for key in keys)
    assert reader.match(keys) == 0


def test_a_killed_writer_leaves_no_block(pair: tuple[Any, Any], name: str, new_keys: NewKeys) -> None:
    (_, reader), keys = pair, new_keys(COUNT)
    arguments = [f"shm://{name}", str(BLOCK_BYTES), *(key.hex() for key in keys)]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    follow = reader.connector.follow(keys, IDS, patience_s=0.5)
    until(lambda: (reader.rows[:COUNT, : BLOCK_BYTES // 2] == 1).all())
    process.kill()
    process.wait()
    assert follow.result(timeout=60).outcomes == [Outcome.MISSING] * COUNT
    assert reader.match(keys) == 0
    assert reader.store(keys, IDS).outcomes == [Outcome.OK] * COUNT, "its slots are taken over"
