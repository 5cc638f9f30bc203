"""What shared memory has to get through: sudden deaths, fullness, leases, many writers, segments of others."""

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.connectors import rangelock, shm_segment, shm_slab
from pdserve.kv_transfer.connectors.shm import ShmConnector, count_leases, unlink
from pdserve.kv_transfer.threaded import MAX_LEASE_S

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]

KiB, MiB = 1024, 1024 * 1024
WRITING, READY = 1, 2  # states of a slot
SLOTS = 32  # the smallest segment: two sets, so that a key may use every slot

# A process that stores blocks for ever. Block n of a seed has the key and the bytes that `block` below says.
WRITER = """
import sys
import numpy as np
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.rules.context import make_layout
from pdserve.kv_transfer.connectors.shm import ShmConnector

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


def size_for(slots: int, block_bytes: int) -> int:
    return shm_segment.Geometry(slots // 16, block_bytes).total_bytes + 4096


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    unlink(f"shm://{name}")


@pytest.fixture
def small(name: str) -> str:
    """The smallest segment of 4 KiB blocks."""
    return f"shm://{name}?size={size_for(SLOTS, 4096)}"


def test_writers_killed_in_the_middle_leave_right_bytes_and_free_slots(
    name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    block_bytes, count = 512 * KiB, 64  # more than there are slots: the writer copies and evicts all the time
    url = f"shm://{name}?size={size_for(48, block_bytes)}"
    ours = attach(url, layout_of(block_bytes), blocks=count)
    dice, loaded, torn = random.Random(4), 0, 0
    for seed in range(30):
        writer = start_writer(url, block_bytes, seed, count, 0.0)
        time.sleep(dice.uniform(0.005, 0.04) * (1 + seed / 4))  # until a busy machine has had enough of it
        writer.kill()
        writer.wait()
        torn += len(slots_in_state(ours, WRITING))
        loaded += load_and_compare(ours, seed, count)
        if seed >= 3 and torn and loaded:
            break
    assert torn and loaded  # otherwise nothing was tried
    fill_completely(ours, new_keys)  # the slots that the dead were writing into as well


def load_and_compare(instance: Any, seed: int, count: int) -> int:
    """Loads all blocks of a writer. How many were there; those have to be right."""
    expected = [block(seed, n, instance.layout.block_bytes) for n in range(count)]
    outcomes = instance.load([key for key, _ in expected], range(count)).outcomes
    for row, ((key, payload), outcome) in enumerate(zip(expected, outcomes, strict=True)):
        assert outcome in (Outcome.OK, Outcome.MISSING)
        assert (outcome is Outcome.OK) == (instance.match([key]) == 1)
        if outcome is Outcome.OK:
            np.testing.assert_array_equal(instance.rows[row], payload)
    return sum(outcome is Outcome.OK for outcome in outcomes)


def slots_in_state(instance: Any, state: int) -> list[int]:
    view = instance.connector._slab
    return [slot for slot in range(view.geometry.slots) if view._record(slot)[0] & 0xFF == state]


def fill_completely(instance: Any, new_keys: NewKeys) -> None:
    """Stores leased blocks until all slots are taken. Three sets are few enough for a few tries per slot."""
    stored = 0
    slots = instance.connector._slab.geometry.slots
    for _ in range(60 * slots):
        stored += instance.store(new_keys(1), [0]).leading
        if stored == slots:
            return
    raise AssertionError(f"{stored} of {slots} slots could be used")


def test_a_slot_left_by_a_dead_writer_is_claimed_again(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small)
    dead = shm_slab.attach(instance.connector._name, 4096, None)
    for key in new_keys(SLOTS):
        with dead.locked(60.0):
            assert dead.claim(instance.connector.namespace + key) is not None
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.FULL]  # its user is alive
    dead.close()
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.OK]
    assert instance.store(new_keys(SLOTS - 1), [1] * (SLOTS - 1)).leading == SLOTS - 1


def test_a_process_killed_inside_the_lock_leaves_nothing_locked(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small)
    code = (
        "import sys; from pdserve.kv_transfer.connectors import shm_slab\n"
        "view = shm_slab.attach(sys.argv[1], 4096, None)\n"
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
    other = shm_slab.attach(instance.connector._name, 4096, None)
    with other.locked(60.0):
        assert instance.store(new_keys(2), [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
    other.close()
    instance.connector.timeout = 60
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.OK]


def test_full_only_while_everything_is_leased(
    small: str, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = attach(small, blocks=SLOTS)
    keys = new_keys(SLOTS)
    assert instance.store(keys, range(SLOTS), lease_s=600).leading == SLOTS
    assert instance.store(new_keys(2), [0, 1]).outcomes == [Outcome.FULL] * 2
    assert instance.match(keys) == SLOTS  # a lease is respected
    monkeypatch.setattr(shm_slab, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 601))
    assert instance.store(new_keys(2), [0, 1]).leading == 2
    assert sum(instance.match([key]) for key in keys) == SLOTS - 2


def test_the_least_recently_used_block_goes_first(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small, blocks=SLOTS)
    keys = new_keys(SLOTS)
    for row, key in enumerate(keys):
        instance.store([key], [row], lease_s=0.0)
    instance.load(keys[:4], range(4))  # used again
    instance.store(new_keys(4), range(4))
    assert [instance.match([key]) for key in keys] == [1] * 4 + [0] * 4 + [1] * (SLOTS - 8)


def test_a_release_ends_the_lease_when_all_holders_have_released(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(small, blocks=SLOTS)
    keys = new_keys(SLOTS)
    instance.store(keys, range(SLOTS))
    assert count_leases(small) == SLOTS
    instance.store(keys[:1], [0])  # a second request shares this block
    instance.store(keys[:1], [0], lease_s=0.0)  # and somebody has it in passing, who will not release it
    instance.connector.release(keys[:2])
    assert instance.store(new_keys(1), [5]).leading == 1  # in the place of keys[1]
    assert (instance.match(keys[:1]), instance.match(keys[1:2])) == (1, 0)
    assert instance.store(new_keys(1), [5]).outcomes == [Outcome.FULL]
    instance.connector.release(keys[:1])
    assert instance.store(new_keys(1), [5]).leading == 1
    assert instance.match(keys[:1]) == 0
    instance.connector.release(keys[2:])
    instance.connector.close()
    assert count_leases(small) == 2


def test_most_of_a_segment_can_be_leased(name: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"shm://{name}?size={size_for(1024, 4096)}", blocks=1024)
    outcomes = instance.store(new_keys(1024), range(1024)).outcomes
    assert outcomes[:850] == [Outcome.OK] * 850


def test_several_processes_store_the_same_keys(name: str, attach: Attach, layout_of: LayoutOf) -> None:
    block_bytes, count = 64 * KiB, 12
    url = f"shm://{name}?size={size_for(48, block_bytes)}"
    ours = attach(url, layout_of(block_bytes), blocks=count)
    expected = [block(7, n, block_bytes) for n in range(count)]
    keys = [key for key, _ in expected]
    writers = [start_writer(url, block_bytes, 7, count, 0.0, passes=50) for _ in range(3)]
    running = True
    while running:
        running = any(writer.poll() is None for writer in writers)
        for row, outcome in enumerate(ours.load(keys, range(count)).outcomes):
            assert outcome in (Outcome.OK, Outcome.MISSING)
            if outcome is Outcome.OK:
                np.testing.assert_array_equal(ours.rows[row], expected[row][1])
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert ours.match(keys) == count
    view = ours.connector._slab
    names = [view.header(slot)[16:48] for slot in slots_in_state(ours, READY)]
    assert sorted(names) == sorted(ours.connector.namespace + key for key in keys)  # each once


def test_a_lease_cannot_be_for_ever(small: str, attach: Attach, new_keys: NewKeys) -> None:
    instance, (key,) = attach(small), new_keys(1)
    instance.store([key], [0], lease_s=float("inf"))
    slot = instance.connector._slab.find(instance.connector.namespace + key)
    assert instance.connector._slab._record(slot)[1] <= time.monotonic() + MAX_LEASE_S


def test_more_than_there_is_says_how_much(name: str, layout_of: LayoutOf) -> None:
    with pytest.raises(SetupError, match=r"needs \d+\.\d MiB of shared memory and /dev/shm has \d+\.\d MiB free"):
        attach_to(f"shm://{name}?size=900TiB", layout_of(MiB))
    assert not unlink(f"shm://{name}")  # nothing left behind


def test_too_small_for_a_few_blocks_says_what_is_needed(name: str, layout_of: LayoutOf) -> None:
    with pytest.raises(SetupError, match=rf"too small: 32 blocks need {size_for(32, MiB)} bytes"):
        attach_to(f"shm://{name}?size=16MiB", layout_of(MiB))
    attach_to(f"shm://{name}?size={size_for(32, MiB)}", layout_of(MiB)).close()


def test_a_small_dev_shm(
    small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, layout_of: LayoutOf
) -> None:
    """The default takes half of what is free; an error, and not a SIGBUS, comes when that is too little."""
    folder = small_disk("16m")
    monkeypatch.setattr(shm_segment, "DIRECTORY", str(folder))
    connector = attach_to("shm://one", layout_of(64 * KiB))
    assert 6 * MiB < (folder / f"pdserve-one@{64 * KiB}").stat().st_size <= 8 * MiB
    connector.close()
    # Half of what is left is too little for 32 blocks of this size, all of it is enough.
    attach_to("shm://half", layout_of(256 * KiB)).close()
    unlink("shm://half")
    with pytest.raises(SetupError, match=r"needs 32.* MiB of shared memory and .* has 9\.\d MiB free.*--shm-size"):
        attach_to("shm://two", layout_of(MiB))
    with pytest.raises(SetupError, match="needs 11"):
        attach_to("shm://two?size=12MiB", layout_of(64 * KiB))
    assert [entry.name for entry in folder.iterdir()] == [f"pdserve-one@{64 * KiB}"]


def test_other_blocks_under_the_same_name(name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys) -> None:
    url, keys = f"shm://{name}?size=8MiB", new_keys(2)
    others = f"shm://{name}.other?size=8MiB"
    beside = attach_to(others, layout_of(4096))
    small, large = attach(url, layout_of(4096)), attach(url, layout_of(8192))
    for one in (small, large):
        assert one.store(keys, [0, 1]).leading == one.load(keys, [4, 5]).leading == 2
        np.testing.assert_array_equal(one.rows[4:6], one.rows[:2])
    assert segments_of(name) == {4096, 8192}
    small.connector.close()
    attach_to(url, layout_of(16384)).close()
    assert segments_of(name) == {8192, 16384}, "nobody used the first any more"
    attach_to(url, layout_of(4096)).close()
    assert segments_of(name) == {4096, 8192}
    beside.close()
    assert unlink(url) and not segments_of(name) and unlink(others)


def test_a_segment_that_is_being_made_is_not_in_the_way(name: str, layout_of: LayoutOf) -> None:
    making = shm_segment._open(name, f"{shm_segment.DIRECTORY}/pdserve-{name}@8192")
    rangelock.lock(making, shm_segment.CREATION_LOCK_AT, 0)
    attach_to(f"shm://{name}?size=8MiB", layout_of(4096)).close()
    assert segments_of(name) == {4096, 8192}
    os.close(making)
    attach_to(f"shm://{name}?size=8MiB", layout_of(4096)).close()
    assert segments_of(name) == {4096}


def segments_of(name: str) -> set[int]:
    """The lengths of blocks for which there are some."""
    return {int(path.name.rpartition("@")[2]) for path in Path(shm_segment.DIRECTORY).glob(f"pdserve-{name}@*")}


def test_another_size_under_the_same_name(name: str, layout_of: LayoutOf) -> None:
    path = Path(shm_segment.DIRECTORY) / f"pdserve-{name}@4096"
    first = attach_to(f"shm://{name}?size=8MiB", layout_of(4096))
    second = attach_to(f"shm://{name}?size=16MiB", layout_of(4096))  # joins
    assert path.stat().st_size <= 8 * MiB
    first.close()
    second.close()
    third = attach_to(f"shm://{name}?size=16MiB", layout_of(4096))
    assert path.stat().st_size > 15 * MiB
    third.close()
    attach_to(f"shm://{name}", layout_of(4096)).close()  # takes what is there
    assert path.stat().st_size > 15 * MiB


@pytest.mark.parametrize("damage", ["emptied", "shortened", "superblock overwritten", "another version"])
def test_a_segment_whose_making_was_cut_short_is_made_again(
    small: str, name: str, attach: Attach, new_keys: NewKeys, damage: str
) -> None:
    attach(small).connector.close()
    path = Path(shm_segment.DIRECTORY) / f"pdserve-{name}@4096"
    with path.open("r+b") as file:
        if damage in ("emptied", "shortened"):
            file.truncate(0 if damage == "emptied" else 5000)
        else:
            file.seek(0 if damage == "superblock overwritten" else 8)
            file.write(b"\xff\xff")
    instance, keys = attach(small), new_keys(2)
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [2, 3]).leading == 2


def test_content_outlives_its_writers(small: str, attach: Attach, new_keys: NewKeys) -> None:
    first, keys = attach(small), new_keys(3)
    first.store(keys, [0, 1, 2])
    first.connector.close()
    second = attach(small)
    assert second.load(keys, [0, 1, 2]).leading == 3
    np.testing.assert_array_equal(second.rows[:3], first.rows[:3])


def test_unlinked_and_remade_while_attached_means_misses(small: str, attach: Attach, new_keys: NewKeys) -> None:
    old, keys = attach(small), new_keys(3)
    old.store(keys, [0, 1, 2])
    assert unlink(small)
    assert not unlink(small)
    new = attach(small)
    assert new.match(keys) == 0
    assert new.load(keys, [0, 1, 2]).outcomes == [Outcome.MISSING] * 3
    assert new.store(keys, [3, 4, 5]).leading == 3
    assert old.load(keys, [6, 7, 8]).leading == 3  # goes on with its own
    np.testing.assert_array_equal(old.rows[6:9], old.rows[0:3])


def test_a_segment_of_another_user_is_refused(name: str, layout_of: LayoutOf) -> None:
    path = Path(shm_segment.DIRECTORY) / f"pdserve-{name}@4096"
    path.touch()
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give files away")
    with pytest.raises(SetupError, match="belongs to another user"):
        attach_to(f"shm://{name}", layout_of(4096))


def test_a_symbolic_link_is_refused(name: str, layout_of: LayoutOf, tmp_path: Path) -> None:
    (Path(shm_segment.DIRECTORY) / f"pdserve-{name}@4096").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="cannot be opened"):
        attach_to(f"shm://{name}", layout_of(4096))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("url", ["shm://", "shm://a/b", "shm://../x", "shm://a%20b"])
def test_names_that_are_none(url: str) -> None:
    with pytest.raises(SetupError, match="must have a plain name"):
        ShmConnector(url)


def attach_to(url: str, layout: Layout) -> ShmConnector:
    connector = ShmConnector(url)
    connector.attach(PoolMemory(np.zeros((2, layout.block_bytes), np.uint8), layout))
    return connector
