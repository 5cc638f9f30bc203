"""Tests of locks on bytes of a file."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.kv_transfer.connectors.shm import rangelock


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two file descriptors of one file, opened separately."""
    opened = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield opened[0], opened[1]
    for fd in opened:
        os.close(fd)


def test_a_byte_is_locked_by_one_descriptor_at_a_time(fds: tuple[int, int]) -> None:
    one, other = fds
    assert rangelock.try_lock(one, 7)
    assert rangelock.try_lock(one, 7), "a descriptor may lock its own byte again"
    assert not rangelock.try_lock(other, 7) and rangelock.try_lock(other, 8)
    rangelock.unlock(one, 7)
    assert rangelock.try_lock(other, 7)


def test_lock_gives_up_at_the_deadline(fds: tuple[int, int]) -> None:
    one, other = fds
    rangelock.lock(one, 7, time.monotonic())
    with pytest.raises(TimeoutError):
        rangelock.lock(other, 7, time.monotonic() + 0.02)


def test_locks_of_others_are_seen_in_a_range(fds: tuple[int, int]) -> None:
    one, other = fds
    rangelock.lock(one, 7, time.monotonic())
    assert rangelock.is_locked_by_others(other, 7) and rangelock.is_locked_by_others(other, 0, 0)
    assert not rangelock.is_locked_by_others(one, 7), "its own lock does not count"
    assert not rangelock.is_locked_by_others(other, 8, 0)


def test_closing_the_descriptor_releases_its_locks(fds: tuple[int, int], tmp_path: Path) -> None:
    third = os.open(tmp_path / "file", os.O_RDWR)
    assert rangelock.try_lock(third, 7) and not rangelock.try_lock(fds[0], 7)
    os.close(third)
    assert rangelock.try_lock(fds[0], 7)
