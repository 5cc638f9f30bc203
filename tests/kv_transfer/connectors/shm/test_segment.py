"""Tests of shared-memory segments: sizes, foreign and damaged files, several block lengths, locks on bytes of a file."""

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.shm import segment, slab
from pdserve.kv_transfer.connectors.shm.connector import unlink

Attach = Callable[..., Any]
AttachShm = Callable[[str, Layout], Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
SegmentBytes = Callable[[int, int], int]

KiB, MiB = 1024, 1024 * 1024


def test_a_segment_larger_than_dev_shm_is_refused_with_both_sizes(
    name: str, layout_of: LayoutOf, attach_shm: AttachShm
) -> None:
    with pytest.raises(SetupError, match=r"needs \d+\.\d MiB of shared memory and /dev/shm has \d+\.\d MiB free"):
        attach_shm(f"shm://{name}?size=900TiB", layout_of(MiB))
    assert not unlink(f"shm://{name}")  # no segment is left behind


def test_a_segment_too_small_for_32_blocks_is_refused_with_the_minimum(
    name: str, layout_of: LayoutOf, segment_bytes: SegmentBytes, attach_shm: AttachShm
) -> None:
    with pytest.raises(SetupError, match=rf"too small: 32 blocks need {segment_bytes(32, MiB)} bytes"):
        attach_shm(f"shm://{name}?size=16MiB", layout_of(MiB))
    attach_shm(f"shm://{name}?size={segment_bytes(32, MiB)}", layout_of(MiB)).close()


def test_a_small_dev_shm(
    small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, layout_of: LayoutOf, attach_shm: AttachShm
) -> None:
    """The default size is half of the free space. Too little space is an error at attach, not a SIGBUS later."""
    folder = small_disk("16m")
    monkeypatch.setattr(segment, "DIRECTORY", str(folder))
    connector = attach_shm("shm://one", layout_of(64 * KiB))
    assert 6 * MiB < (folder / f"pdserve-one@{64 * KiB}").stat().st_size <= 8 * MiB
    connector.close()
    # Half of the free space is too little for 32 blocks of this size, all of it is enough.
    attach_shm("shm://half", layout_of(256 * KiB)).close()
    unlink("shm://half")
    with pytest.raises(SetupError, match=r"needs 32.* MiB of shared memory and .* has 9\.\d MiB free.*--shm-size"):
        attach_shm("shm://two", layout_of(MiB))
    with pytest.raises(SetupError, match="needs 11"):
        attach_shm("shm://two?size=12MiB", layout_of(64 * KiB))
    assert [entry.name for entry in folder.iterdir()] == [f"pdserve-one@{64 * KiB}"]


def test_each_block_length_has_its_own_segment_under_one_name(
    name: str, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, attach_shm: AttachShm
) -> None:
    url, keys = f"shm://{name}?size=8MiB", new_keys(2)
    other_url = f"shm://{name}.other?size=8MiB"
    other = attach_shm(other_url, layout_of(4096))
    small, large = attach(url, layout_of(4096)), attach(url, layout_of(8192))
    for instance in (small, large):
        assert instance.store(keys, [0, 1]).leading == instance.load(keys, [4, 5]).leading == 2
        np.testing.assert_array_equal(instance.rows[4:6], instance.rows[:2])
    assert segments_of(name) == {4096, 8192}
    small.connector.close()
    attach_shm(url, layout_of(16384)).close()
    assert segments_of(name) == {8192, 16384}, "the first was unused"
    attach_shm(url, layout_of(4096)).close()
    assert segments_of(name) == {4096, 8192}
    other.close()
    assert unlink(url) and not segments_of(name) and unlink(other_url)


def test_a_segment_of_a_killed_deployment_goes_with_its_last_user_or_at_the_next_start(
    name: str, layout_of: LayoutOf, attach_shm: AttachShm
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        names = [f"up-{owner.pid}", f"up-{owner.pid}-1"]
        first, second, other = (
            attach_shm(f"shm://{one}?size=8MiB", layout_of(4096)) for one in (*names[:1] * 2, names[1])
        )
        other.close()
        attach_shm(f"shm://{name}?size=8MiB", layout_of(4096)).close()
        assert segments_of(names[0]) and segments_of(names[1]), "its owner runs, and may restart instances"
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
        attach_shm(f"shm://{name}?size=8MiB", layout_of(4096)).close()
        assert segments_of(names[0]) and not segments_of(names[1]), "only the first is in use"
        first.close()
        assert segments_of(names[0])
        second.close()
        assert not segments_of(names[0])


def test_a_segment_being_created_is_not_removed(name: str, layout_of: LayoutOf, attach_shm: AttachShm) -> None:
    lock_holder = segment._open(name, f"{segment.DIRECTORY}/pdserve-{name}@8192")
    slab.lock(lock_holder, slab.CREATION_LOCK_AT, 0)
    attach_shm(f"shm://{name}?size=8MiB", layout_of(4096)).close()
    assert segments_of(name) == {4096, 8192}
    os.close(lock_holder)
    attach_shm(f"shm://{name}?size=8MiB", layout_of(4096)).close()
    assert segments_of(name) == {4096}


def segments_of(name: str) -> set[int]:
    """Returns the block lengths for which there is a segment."""
    return {int(path.name.rpartition("@")[2]) for path in Path(segment.DIRECTORY).glob(f"pdserve-{name}@*")}


def test_a_segment_in_use_keeps_its_size_and_an_unused_one_is_recreated(
    name: str, layout_of: LayoutOf, attach_shm: AttachShm
) -> None:
    path = Path(segment.DIRECTORY) / f"pdserve-{name}@4096"
    first = attach_shm(f"shm://{name}?size=8MiB", layout_of(4096))
    second = attach_shm(f"shm://{name}?size=16MiB", layout_of(4096))  # attaches to the existing one
    assert path.stat().st_size <= 8 * MiB
    first.close()
    second.close()
    third = attach_shm(f"shm://{name}?size=16MiB", layout_of(4096))
    assert path.stat().st_size > 15 * MiB
    third.close()
    attach_shm(f"shm://{name}", layout_of(4096)).close()  # keeps the existing size
    assert path.stat().st_size > 15 * MiB


@pytest.mark.parametrize("damage", ["emptied", "shortened", "superblock overwritten", "another version"])
def test_a_damaged_segment_is_created_again(
    small: str, name: str, attach: Attach, new_keys: NewKeys, damage: str
) -> None:
    attach(small).connector.close()
    path = Path(segment.DIRECTORY) / f"pdserve-{name}@4096"
    with path.open("r+b") as file:
        if damage in ("emptied", "shortened"):
            file.truncate(0 if damage == "emptied" else 5000)
        else:
            file.seek(0 if damage == "superblock overwritten" else 8)
            file.write(b"\xff\xff")
    instance, keys = attach(small), new_keys(2)
    assert instance.store(keys, [0, 1]).leading == instance.load(keys, [2, 3]).leading == 2


@pytest.mark.parametrize("length", [0, 4096, 8192])
def test_a_segment_truncated_in_use_is_unavailable(
    small: str, name: str, attach: Attach, new_keys: NewKeys, length: int
) -> None:
    """Without the check, the process ends with SIGBUS."""
    instance, keys = attach(small), new_keys(2)
    instance.store(keys, [0, 1])
    os.truncate(Path(segment.DIRECTORY) / f"pdserve-{name}@4096", length)
    assert instance.match(keys) == 0
    assert instance.load(keys, [2, 3]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.store(new_keys(1), [0]).outcomes == [Outcome.UNAVAILABLE]
    instance.connector.release(keys)
    instance.connector.close()
    restarted = attach(small)
    assert restarted.store(keys, [0, 1]).leading == restarted.load(keys, [2, 3]).leading == 2


def test_a_segment_of_another_user_is_refused(name: str, layout_of: LayoutOf, attach_shm: AttachShm) -> None:
    path = Path(segment.DIRECTORY) / f"pdserve-{name}@4096"
    path.touch()
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can change the owner of a file")
    with pytest.raises(SetupError, match="belongs to another user"):
        attach_shm(f"shm://{name}", layout_of(4096))


def test_a_symbolic_link_is_refused(name: str, layout_of: LayoutOf, tmp_path: Path, attach_shm: AttachShm) -> None:
    (Path(segment.DIRECTORY) / f"pdserve-{name}@4096").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="cannot be opened"):
        attach_shm(f"shm://{name}", layout_of(4096))
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two file descriptors of one file, opened separately."""
    opened = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield opened[0], opened[1]
    for fd in opened:
        os.close(fd)


def test_a_byte_is_locked_by_one_descriptor_at_a_time(fds: tuple[int, int]) -> None:
    one, other = fds
    assert slab.try_lock(one, 7)
    assert slab.try_lock(one, 7), "a descriptor may lock its own byte again"
    assert not slab.try_lock(other, 7) and slab.try_lock(other, 8)
    slab.set_lock(one, 7, fcntl.F_UNLCK)
    assert slab.try_lock(other, 7)


def test_lock_gives_up_at_the_deadline(fds: tuple[int, int]) -> None:
    one, other = fds
    slab.lock(one, 7, time.monotonic())
    with pytest.raises(TimeoutError):
        slab.lock(other, 7, time.monotonic() + 0.02)


def test_locks_of_others_are_seen_in_a_range(fds: tuple[int, int]) -> None:
    one, other = fds
    slab.lock(one, 7, time.monotonic())
    assert slab.is_locked_by_others(other, 7) and slab.is_locked_by_others(other, 0, 0)
    assert not slab.is_locked_by_others(one, 7), "its own lock does not count"
    assert not slab.is_locked_by_others(other, 8, 0)


def test_closing_the_descriptor_releases_its_locks(fds: tuple[int, int], tmp_path: Path) -> None:
    third = os.open(tmp_path / "file", os.O_RDWR)
    assert slab.try_lock(third, 7) and not slab.try_lock(fds[0], 7)
    os.close(third)
    assert slab.try_lock(fds[0], 7)
