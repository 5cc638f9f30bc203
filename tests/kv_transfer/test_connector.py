"""Tests of the connector contract, for every connector with a shared store."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, HeaderFormat

KiB = 1024
MiB = 1024 * KiB

# The types of fixtures; the classes themselves are in conftest.py.
Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
StoreAccessOf = Callable[[str, Layout], Any]

CHANGED_HEADER_BYTES = {
    "magic": 0,
    "header version": 8,
    "layout version": 12,
    "namespace": 16,
    "key": 32,
    "length": 48,
    "checksum": 56,
}


@pytest.mark.parametrize(
    ("block_bytes", "segment_size"), [(4 * KiB, "4MiB"), (32 * KiB, "4MiB"), (1_835_008, "64MiB"), (4 * MiB, "160MiB")]
)
def test_scattered_blocks_are_loaded_bit_exact(
    url: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, block_bytes: int
) -> None:
    layout = layout_of(block_bytes)
    source, target = attach(url, layout, blocks=12), attach(url, layout, blocks=12)
    before = target.rows.copy()
    keys, out, into = new_keys(7), [11, 0, 5, 2, 9, 1, 7], [3, 8, 0, 11, 6, 4, 10]

    assert source.store(keys, out).outcomes == [Outcome.OK] * 7
    assert target.load(keys, into).outcomes == [Outcome.OK] * 7

    np.testing.assert_array_equal(target.rows[into], source.rows[out])
    untouched = [row for row in range(12) if row not in into]
    np.testing.assert_array_equal(target.rows[untouched], before[untouched])


def test_match_counts_leading_keys_only(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(6)
    assert instance.match(keys) == 0
    instance.store(keys[:3] + keys[4:], [0, 1, 2, 4, 5])
    assert instance.match(keys) == 3
    assert instance.match(keys[4:]) == 2
    instance.store([keys[3]], [3])
    assert instance.match(keys) == 6
    assert instance.match([]) == 0


def test_missing_blocks_are_reported_one_by_one(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(4)
    instance.store([keys[0], keys[2]], [0, 2])
    result = instance.load(keys, [8, 9, 10, 11])
    assert result.outcomes == [Outcome.OK, Outcome.MISSING, Outcome.OK, Outcome.MISSING]
    assert result.leading == 1
    np.testing.assert_array_equal(instance.rows[[8, 10]], instance.rows[[0, 2]])


@pytest.mark.parametrize("where", [0, 2048, 4095])
def test_a_flipped_byte_is_corrupt_and_repaired_by_the_next_store(
    url: str, attach: Attach, store_access: StoreAccessOf, new_keys: NewKeys, where: int
) -> None:
    instance, keys = attach(url), new_keys(3)
    instance.store(keys, [0, 1, 2])
    store = store_access(url, instance.layout)
    value = bytearray(store.read(keys[1]))
    value[HEADER_BYTES + where] ^= 1
    store.write(keys[1], bytes(value))

    assert instance.load(keys, [8, 9, 10]).outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert instance.match(keys) == 1  # the corrupt block is no longer advertised

    instance.store(keys, [0, 1, 2])
    assert instance.load(keys, [8, 9, 10]).outcomes == [Outcome.OK] * 3
    np.testing.assert_array_equal(instance.rows[8:11], instance.rows[0:3])


@pytest.mark.parametrize("field", CHANGED_HEADER_BYTES)
def test_a_header_that_differs_in_any_field_is_rejected(
    url: str, attach: Attach, store_access: StoreAccessOf, new_keys: NewKeys, field: str
) -> None:
    instance, (key,) = attach(url), new_keys(1)
    instance.store([key], [0])
    store = store_access(url, instance.layout)
    value = bytearray(store.read(key))
    value[CHANGED_HEADER_BYTES[field]] ^= 1
    store.write(key, bytes(value))
    # In shared memory, lookup uses the header: with another key or namespace in it, the block is missing.
    assert instance.load([key], [8]).outcomes[0] in (Outcome.CORRUPT, Outcome.MISSING)


def test_a_foreign_namespace_neither_matches_nor_loads(
    url: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    own, foreign = attach(url, layout_of(4096, "own")), attach(url, layout_of(4096, "foreign"))
    keys = new_keys(2)
    assert foreign.store(keys, [0, 1]).leading == 2
    assert own.match(keys) == 0
    assert own.load(keys, [0, 1]).outcomes == [Outcome.MISSING] * 2
    # Both can store the same key with different bytes.
    own.store(keys, [0, 1])
    assert (own.load(keys, [4, 5]).leading, foreign.load(keys, [4, 5]).leading) == (2, 2)
    np.testing.assert_array_equal(own.rows[4:6], own.rows[0:2])
    np.testing.assert_array_equal(foreign.rows[4:6], foreign.rows[0:2])


def test_foreign_bytes_under_the_same_name_are_rejected(
    url: str, attach: Attach, store_access: StoreAccessOf, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    instance, (key,) = attach(url), new_keys(1)
    instance.store([key], [0])
    payload = bytes(4096)
    store_access(url, instance.layout).write(key, HeaderFormat(layout_of(4096, "foreign")).pack(key, payload) + payload)
    assert instance.load([key], [8]).outcomes[0] in (Outcome.CORRUPT, Outcome.MISSING)


@pytest.mark.parametrize("scheme", ["memory", "file", "redis", "redis+cluster"], indirect=True)
@pytest.mark.parametrize("length", [0, 10, 64, 1000, HEADER_BYTES + 4095, HEADER_BYTES + 4097])
def test_values_of_a_wrong_length_are_corrupt(
    url: str, attach: Attach, store_access: StoreAccessOf, new_keys: NewKeys, length: int
) -> None:
    instance, keys = attach(url), new_keys(2)
    instance.store(keys, [0, 1])
    store = store_access(url, instance.layout)
    store.write(keys[0], (store.read(keys[0]) + b"x")[:length])
    assert instance.load(keys, [8, 9]).outcomes == [Outcome.CORRUPT, Outcome.OK]


def test_storing_again_moves_no_bytes(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(4)
    instance.store(keys, [0, 1, 2, 3])
    once = instance.connector.stats().bytes["store"]
    assert instance.store(keys, [0, 1, 2, 3]).outcomes == [Outcome.OK] * 4
    assert once == 4 * 4096
    assert instance.connector.stats().bytes["store"] == once


def test_the_same_key_twice_in_one_call(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, (key,) = attach(url), new_keys(1)
    instance.rows[1] = instance.rows[0]
    assert instance.store([key, key], [0, 1]).outcomes == [Outcome.OK] * 2
    assert instance.load([key, key], [8, 9]).outcomes == [Outcome.OK] * 2
    np.testing.assert_array_equal(instance.rows[8:10], instance.rows[0:2])


def test_released_blocks_are_correct_or_missing(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(2)
    instance.store(keys, [0, 1])
    instance.connector.release(keys)
    instance.connector.release(new_keys(3))
    instance.connector.release(keys)
    result = instance.load(keys, [8, 9])
    for i, outcome in enumerate(result.outcomes):
        assert outcome in (Outcome.OK, Outcome.MISSING)
        if outcome is Outcome.OK:
            np.testing.assert_array_equal(instance.rows[8 + i], instance.rows[i])


def test_stats_count_blocks_bytes_and_failures(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(5)
    instance.store(keys[:3], [0, 1, 2])
    instance.load(keys, [4, 5, 6, 7, 8])
    stats = instance.connector.stats()
    assert stats.blocks == {"store": 3, "load": 3}
    assert stats.bytes == {"store": 3 * 4096, "load": 3 * 4096}
    assert stats.failures == {("load", Outcome.MISSING): 2}
    assert stats.seconds["store"] > 0 and stats.seconds["load"] > 0
    stats.blocks["store"] = 99  # a snapshot
    assert instance.connector.stats().blocks["store"] == 3


@pytest.mark.parametrize("segment_size", ["192MiB"])
def test_close_waits_for_operations_in_flight(url: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys) -> None:
    layout = layout_of(MiB)
    source, keys = attach(url, layout, blocks=32), new_keys(32)
    futures = [source.connector.store([key], [row], lease_s=60) for row, key in enumerate(keys)]
    source.connector.close()
    assert all(future.done() for future in futures)
    target = attach(url, layout, blocks=32)
    assert target.load(keys, range(32)).leading == 32
    np.testing.assert_array_equal(target.rows, source.rows)


def test_calls_return_before_the_work_is_done(
    url: str, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, keys, gate = attach(url), new_keys(4), threading.Event()
    put_many = instance.connector.put_many

    def wait_and_put(*arguments: Any) -> None:
        assert gate.wait(60)
        put_many(*arguments)

    monkeypatch.setattr(instance.connector, "put_many", wait_and_put)
    stored, matched = instance.connector.store(keys, range(4), lease_s=60), instance.connector.match(keys)
    assert not stored.done()
    assert not stored.cancel() and not matched.cancel()  # rows stay reserved until the end
    gate.set()
    assert stored.result(60).leading == 4 and matched.result(60) in range(5)


@pytest.mark.parametrize("segment_size", ["32MiB"])
def test_a_reader_never_loads_wrong_bytes_during_stores(
    url: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    layout, keys = layout_of(256 * KiB), new_keys(40)
    source, target = attach(url, layout, blocks=40), attach(url, layout, blocks=40)
    done = threading.Event()

    def store_all() -> None:
        for row, key in enumerate(keys):
            source.store([key], [row])
        done.set()

    writer = threading.Thread(target=store_all)
    writer.start()
    while True:
        last = done.is_set()
        for row, outcome in enumerate(target.load(keys, range(40)).outcomes):
            assert outcome in (Outcome.OK, Outcome.MISSING)
            if outcome is Outcome.OK:
                np.testing.assert_array_equal(target.rows[row], source.rows[row])
        if last:
            break
    writer.join()
    assert target.match(keys) == 40


def test_invalid_arguments_raise_at_once(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url, blocks=4), new_keys(2)
    with pytest.raises(ValueError, match="2 keys for 1 blocks"):
        instance.connector.store(keys, [0], lease_s=1)
    with pytest.raises(ValueError, match="between 0 and 3"):
        instance.connector.load(keys, [0, 4])
    with pytest.raises(ValueError, match="between 0 and 3"):
        instance.connector.load(keys, [0, -1])
    with pytest.raises(ValueError, match="16 bytes"):
        instance.connector.store([b"short"], [0], lease_s=1)


def test_an_infinite_lease_is_accepted(url: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(2)
    assert instance.store(keys, [0, 1], lease_s=float("inf")).leading == 2
    assert instance.store(keys, [0, 1], lease_s=float("inf")).leading == 2
    assert instance.load(keys, [4, 5]).leading == 2


def test_calls_without_blocks_are_accepted(url: str, attach: Attach) -> None:
    instance = attach(url)
    assert instance.store([], []).outcomes == []
    assert instance.load([], []).outcomes == []


def test_close_may_be_called_twice_and_other_calls_raise_afterwards(
    url: str, attach: Attach, new_keys: NewKeys
) -> None:
    instance = attach(url)
    instance.connector.close()
    instance.connector.close()
    with pytest.raises(RuntimeError, match="closed"):
        instance.connector.match(new_keys(1))


def test_a_verdict_does_not_delete_what_was_stored_since(
    url: str, attach: Attach, store_access: Callable[..., Any], new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a load that finds a block corrupt and the deletion, another instance deletes it and stores it again."""
    one, other, (key, corrupt) = attach(url), attach(url), new_keys(2)
    one.store([key, corrupt], [0, 1])
    access = store_access(url, one.layout)
    for damaged in (key, corrupt):
        value = bytearray(access.read(damaged))
        value[60] ^= 1  # in the checksum
        access.write(damaged, bytes(value))
    assert one.load([corrupt], [8]).outcomes == [Outcome.CORRUPT] and one.match([corrupt]) == 0
    delete_corrupt = one.connector.delete_corrupt

    def delete_late(blocks: Any) -> None:
        other.connector.delete_many([key])
        assert other.store([key], [2]).leading == 1
        delete_corrupt(blocks)

    monkeypatch.setattr(one.connector, "delete_corrupt", delete_late)
    assert one.load([key], [8]).outcomes == [Outcome.CORRUPT]
    assert other.load([key], [9]).leading == 1
    np.testing.assert_array_equal(other.rows[9], other.rows[2])
