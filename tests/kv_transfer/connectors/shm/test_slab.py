"""Tests of the slab's slots: claims of dead users, locks, leases and eviction."""

import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.kv_transfer.batched import MAX_LEASE_S
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.shm import segment, slab
from pdserve.kv_transfer.connectors.shm.connector import count_leases

Attach = Callable[..., Any]
NewKeys = Callable[[int], list[bytes]]
SegmentBytes = Callable[[int, int], int]

SLOTS = 32  # of the smallest segment: two sets, so that a key may use every slot


def test_a_slot_claimed_by_a_dead_user_is_reclaimed(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small)
    dead = segment.attach(instance.connector._name, 4096, None)
    for key in new_keys(SLOTS):
        with dead.locked(60.0):
            assert dead.claim(instance.connector.namespace + key) is not None
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.FULL]  # the user that claimed them is alive
    dead.close()
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.OK]
    assert instance.store(new_keys(SLOTS - 1), [1] * (SLOTS - 1)).leading == SLOTS - 1


def test_a_process_killed_while_holding_the_lock_releases_it(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small)
    code = (
        "import sys; from pdserve.kv_transfer.connectors.shm import segment\n"
        "view = segment.attach(sys.argv[1], 4096, None)\n"
        "with view.locked(60.0):\n"
        "    view.claim(b'n' * 32); print('locked', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, instance.connector._name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    future = instance.connector.store(new_keys(1), [0], lease_s=1)
    time.sleep(0.05)
    assert not future.done()
    process.kill()
    process.wait()
    assert future.result(60).outcomes == [Outcome.OK]


def test_a_stopped_lock_holder_costs_no_more_than_the_timeout(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"{small}&timeout=0.3")
    other = segment.attach(instance.connector._name, 4096, None)
    with other.locked(60.0):
        assert instance.store(new_keys(2), [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
    other.close()
    instance.connector.timeout = 60
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.OK]


def test_leased_blocks_are_not_evicted_and_expired_ones_are(
    small: str, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = attach(small, blocks=SLOTS)
    keys = new_keys(SLOTS)
    assert instance.store(keys, range(SLOTS), lease_s=600).leading == SLOTS
    assert instance.store(new_keys(2), [0, 1]).outcomes == [Outcome.FULL] * 2
    assert instance.match(keys) == SLOTS  # leased blocks stay
    monkeypatch.setattr(slab, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 601))
    assert instance.store(new_keys(2), [0, 1]).leading == 2
    assert sum(instance.match([key]) for key in keys) == SLOTS - 2


def test_the_least_recently_used_block_is_evicted_first(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small, blocks=SLOTS)
    keys = new_keys(SLOTS)
    for row, key in enumerate(keys):
        instance.store([key], [row], lease_s=0.0)
    instance.load(keys[:4], range(4))  # recently used
    instance.store(new_keys(4), range(4))
    assert [instance.match([key]) for key in keys] == [1] * 4 + [0] * 4 + [1] * (SLOTS - 8)


def test_a_lease_ends_when_all_holders_have_released_it(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"{small}&threads=1", blocks=SLOTS)  # so that a store comes behind the release before it
    keys = new_keys(SLOTS)
    instance.store(keys, range(SLOTS))
    assert count_leases(small) == SLOTS
    instance.store(keys[:1], [0])  # a second request shares this block
    instance.store(keys[:1], [0], lease_s=0.0)  # a store without a lease adds no holder
    instance.connector.release(keys[:2])
    assert instance.store(new_keys(1), [5]).leading == 1  # evicts keys[1]
    assert (instance.match(keys[:1]), instance.match(keys[1:2])) == (1, 0)
    assert instance.store(new_keys(1), [5]).outcomes == [Outcome.FULL]
    instance.connector.release(keys[:1])
    assert instance.store(new_keys(1), [5]).leading == 1
    assert instance.match(keys[:1]) == 0
    instance.connector.release(keys[2:])
    instance.connector.close()
    assert count_leases(small) == 2


def test_at_least_83_percent_of_the_slots_can_be_leased(
    name: str, attach: Attach, new_keys: NewKeys, segment_bytes: SegmentBytes
) -> None:
    instance = attach(f"shm://{name}?size={segment_bytes(1024, 4096)}", blocks=1024)
    outcomes = instance.store(new_keys(1024), range(1024)).outcomes
    assert outcomes[:850] == [Outcome.OK] * 850


def test_a_lease_is_limited_to_the_maximum(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, (key,) = attach(small), new_keys(1)
    instance.store([key], [0], lease_s=float("inf"))
    slot = instance.connector._slab.find(instance.connector.namespace + key)
    assert instance.connector._slab._record(slot)[1] <= time.monotonic() + MAX_LEASE_S
