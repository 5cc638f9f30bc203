"""Tests of `shm://` with several processes: killed writers, concurrent stores, segments removed while in use."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector, unlink

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
SegmentBytes = Callable[[int, int], int]

KiB, MiB = 1024, 1024 * 1024
WRITING, READY = 1, 2  # states of a slot
SLOTS = 32  # the smallest segment: two sets, so that a key may use every slot

# A process that stores blocks repeatedly. Key and bytes of block n of a seed are those of `block` below.
WRITER = """
import sys
import numpy as np
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.rules.context import make_layout
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector

url, block_bytes, seed, count, lease_s, passes = sys.argv[1], *map(int, sys.argv[2:5]), *map(float, sys.argv[5:])
rows = np.zeros((count, block_bytes), np.uint8)
keys = []
for n in range(count):
    keys.append(seed.to_bytes(8, "little") + n.to_bytes(8, "little"))
    rows[n] = np.random.default_rng([seed, n]).integers(0, 256, block_bytes, dtype=np.uint8)
connector = ShmConnector(url)
connector.attach(PoolMemory(rows, make_layout(block_bytes)))
print("ready", flush=True)
while passes > 0:
    passes -= 1
    connector.store(keys, range(count), lease_s=lease_s).result()
connector.close()
"""


def block(seed: int, n: int, block_bytes: int) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    key = seed.to_bytes(8, "little") + n.to_bytes(8, "little")
    return key, np.random.default_rng([seed, n]).integers(0, 256, block_bytes, dtype=np.uint8)


def start_writer(
    url: str, block_bytes: int, seed: int, count: int, lease_s: float, passes: float = 1e18
) -> "subprocess.Popen[str]":
    arguments = [url, *map(str, (block_bytes, seed, count, lease_s, passes))]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_killed_writers_leave_correct_blocks_and_usable_slots(
    name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, segment_bytes: SegmentBytes
) -> None:
    block_bytes, count = 512 * KiB, 64  # more blocks than slots, so that the writer always copies and evicts
    url = f"shm://{name}?size={segment_bytes(48, block_bytes)}"
    reader = attach(url, layout_of(block_bytes), blocks=count)
    rng, loaded, interrupted = random.Random(4), 0, 0
    for seed in range(30):
        writer = start_writer(url, block_bytes, seed, count, 0.0)
        time.sleep(rng.uniform(0.005, 0.04) * (1 + seed / 4))  # longer each time, for a busy machine
        writer.kill()
        writer.wait()
        interrupted += len(slots_in_state(reader, WRITING))
        loaded += load_and_compare(reader, seed, count)
        if seed >= 3 and interrupted and loaded:
            break
    assert interrupted and loaded  # otherwise the test is void
    fill_completely(reader, new_keys)  # including the slots that killed writers had claimed


def load_and_compare(instance: Any, seed: int, count: int) -> int:
    """Loads all blocks of a writer, and checks those that are found. Returns their number."""
    expected = [block(seed, n, instance.layout.block_bytes) for n in range(count)]
    outcomes = instance.load([key for key, _ in expected], range(count)).outcomes
    for row, ((key, payload), outcome) in enumerate(zip(expected, outcomes, strict=True)):
        assert outcome in (Outcome.OK, Outcome.MISSING)
        assert (outcome is Outcome.OK) == (instance.match([key]) == 1)
        if outcome is Outcome.OK:
            np.testing.assert_array_equal(instance.rows[row], payload)
    return sum(outcome is Outcome.OK for outcome in outcomes)


def slots_in_state(instance: Any, state: int) -> list[int]:
    slab = instance.connector._slab
    return [slot for slot in range(slab.geometry.slots) if slab._record(slot)[0] & 0xFF == state]


def fill_completely(instance: Any, new_keys: NewKeys) -> None:
    """Stores leased blocks until all slots are used. With three sets, a few tries per slot are enough."""
    stored = 0
    slots = instance.connector._slab.geometry.slots
    for _ in range(60 * slots):
        stored += instance.store(new_keys(1), [0]).leading
        if stored == slots:
            return
    raise AssertionError(f"{stored} of {slots} slots could be used")


def test_several_processes_store_the_same_keys(
    name: str, attach: Attach, layout_of: LayoutOf, segment_bytes: SegmentBytes
) -> None:
    block_bytes, count = 64 * KiB, 12
    url = f"shm://{name}?size={segment_bytes(48, block_bytes)}"
    reader = attach(url, layout_of(block_bytes), blocks=count)
    expected = [block(7, n, block_bytes) for n in range(count)]
    keys = [key for key, _ in expected]
    writers = [start_writer(url, block_bytes, 7, count, 0.0, passes=50) for _ in range(3)]
    running = True
    while running:
        running = any(writer.poll() is None for writer in writers)
        for row, outcome in enumerate(reader.load(keys, range(count)).outcomes):
            assert outcome in (Outcome.OK, Outcome.MISSING)
            if outcome is Outcome.OK:
                np.testing.assert_array_equal(reader.rows[row], expected[row][1])
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert reader.match(keys) == count
    slab = reader.connector._slab
    names = [slab.header(slot)[16:48] for slot in slots_in_state(reader, READY)]
    assert sorted(names) == sorted(reader.connector.namespace + key for key in keys)  # each key once


def test_blocks_stay_when_the_writer_closes(small: str, attach: Attach, new_keys: NewKeys) -> None:
    first, keys = attach(small), new_keys(3)
    first.store(keys, [0, 1, 2])
    first.connector.close()
    second = attach(small)
    assert second.load(keys, [0, 1, 2]).leading == 3
    np.testing.assert_array_equal(second.rows[:3], first.rows[:3])


def test_a_segment_unlinked_while_attached_is_no_longer_shared(small: str, attach: Attach, new_keys: NewKeys) -> None:
    old, keys = attach(small), new_keys(3)
    old.store(keys, [0, 1, 2])
    assert unlink(small)
    assert not unlink(small)
    new = attach(small)
    assert new.match(keys) == 0
    assert new.load(keys, [0, 1, 2]).outcomes == [Outcome.MISSING] * 3
    assert new.store(keys, [3, 4, 5]).leading == 3
    assert old.load(keys, [6, 7, 8]).leading == 3  # still uses its own segment
    np.testing.assert_array_equal(old.rows[6:9], old.rows[0:3])


@pytest.mark.parametrize("url", ["shm://", "shm://a/b", "shm://../x", "shm://a%20b"])
def test_invalid_names_are_refused(url: str) -> None:
    with pytest.raises(SetupError, match="must have a plain name"):
        ShmConnector(url)


def test_a_slot_that_is_reused_before_it_is_read_is_no_corrupt_block(
    name: str, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot gets another key's block, and the first key another slot, after the reader has looked the slot up."""
    writer, reader, (key, other) = attach(f"shm://{name}?size=512KiB"), attach(f"shm://{name}"), new_keys(2)
    reader.rows[:] = writer.rows
    writer.store([key], [0])
    slab, find = reader.connector._slab, reader.connector._slab.find

    def find_then_pause(name: bytes) -> int | None:
        slot: int | None = find(name)
        monkeypatch.setattr(slab, "find", find)
        with writer.connector._slab.locked(1.0):
            row = writer.rows[1]
            writer.connector._slab.payload(slot)[: len(row)] = row
            writer.connector._slab.publish(slot, writer.connector.header_format.pack(other, row), 0.0)
        writer.store([key], [0])
        return slot

    monkeypatch.setattr(slab, "find", find_then_pause)
    assert reader.load([key], [8]).outcomes == [Outcome.MISSING]
    assert reader.load([key], [8]).leading == 1
