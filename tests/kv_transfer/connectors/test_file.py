"""Tests of `file://`."""

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.batched import MAX_LEASE_S
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors import file
from pdserve.kv_transfer.connectors.file import Evictor, FileConnector

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]

BLOCK = 4096
FILE = BLOCK + 64


def blocks_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.parent.name != "tmp"]


def test_one_file_per_block_named_by_namespace_and_key(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, (key,) = attach(f"file://{tmp_path}/kv?fsync=1"), new_keys(1)
    instance.store([key], [0])
    path = tmp_path / "kv" / instance.layout.namespace.hex() / key.hex()[:2] / key.hex()
    assert blocks_in(tmp_path / "kv") == [path]
    assert path.read_bytes()[64:] == instance.rows[0].tobytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # a prompt can be reconstructed from its KV
    assert list((tmp_path / "kv" / "tmp").iterdir()) == []


@pytest.mark.parametrize("removed", ["", "a", "a/kv"])
def test_new_folders_are_for_this_user_only(tmp_path: Path, attach: Attach, new_keys: NewKeys, removed: str) -> None:
    """Also those that a store makes because they were removed while in use."""
    tmp_path.chmod(0o755)
    instance = attach(f"file://{tmp_path}/a/kv")
    if removed:
        shutil.rmtree(tmp_path / removed)
    assert instance.store(new_keys(2), [0, 1]).leading == 2
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) >= 5  # a, kv, tmp, the namespace, the first digits of a key
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_an_existing_folder_keeps_its_permissions(tmp_path: Path, attach: Attach) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o750)
    attach(f"file://{tmp_path}/kv")
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o750


def test_special_characters_in_the_path(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"file://{tmp_path}/a%20b%3F")
    instance.store(new_keys(1), [0])
    assert len(blocks_in(tmp_path / "a b?")) == 1


def test_a_full_disk_ends_full_and_leaves_no_partial_file(
    small_disk: Callable[[str], Path], attach: Attach, layout_of: LayoutOf, new_keys: NewKeys
) -> None:
    folder = small_disk("1m")
    instance, keys = attach(f"file://{folder}/kv", layout_of(128 * 1024), blocks=12), new_keys(12)
    outcomes = instance.store(keys, range(12)).outcomes
    stored = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    assert len(blocks_in(folder)) == len(stored) >= 5
    assert list((folder / "kv" / "tmp").iterdir()) == []

    before = instance.rows[stored].copy()
    assert instance.load([keys[i] for i in stored], stored).leading == len(stored)
    np.testing.assert_array_equal(instance.rows[stored], before)


@pytest.mark.parametrize("path", ["/proc/no/such", "{file}", "{file}/below"])
def test_an_unwritable_path_is_refused(path: str, tmp_path: Path, attach: Attach) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(SetupError, match=r"file:///.* is not writable"):
        attach(f"file://{path.format(file=tmp_path / 'a file')}")


@pytest.mark.parametrize("url", ["file://", "file:///", "file://host/path", "file://relative"])
def test_urls_without_an_absolute_path_are_refused(url: str) -> None:
    with pytest.raises(SetupError, match="absolute path"):
        FileConnector(url)


def test_stale_temporary_files_are_removed_at_attach_and_by_each_sweep(tmp_path: Path, attach: Attach) -> None:
    """Otherwise writers that die would fill a store beyond `max_bytes`, which does not count these files."""
    temporary = tmp_path / "kv" / "tmp"
    temporary.mkdir(parents=True)
    for clean in (lambda: attach(f"file://{tmp_path}/kv"), Evictor(f"{tmp_path}/kv", 1 << 30, None).sweep):
        for name, age in (("old", file.STALE_TEMP_AGE_S + 60), ("young", 60)):
            (temporary / name).touch()
            os.utime(temporary / name, (0, time.time() - age))
        clean()
        assert [path.name for path in temporary.iterdir()] == ["young"]


def test_a_store_removed_while_in_use_is_empty_and_usable(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"file://{tmp_path}/kv"), new_keys(2)
    instance.store(keys, [0, 1])
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    assert instance.match(keys) == 0
    assert instance.load(keys, [4, 5]).outcomes == [Outcome.MISSING] * 2
    assert instance.store(keys, [0, 1]).leading == 2
    assert instance.load(keys, [4, 5]).leading == 2


def test_a_disk_error_is_unavailable(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, (key,) = attach(f"file://{tmp_path}/kv"), new_keys(1)
    folder = tmp_path / "kv" / instance.layout.namespace.hex()
    (folder / key.hex()[:2]).write_bytes(b"a file where a folder should be")
    assert instance.store([key], [0]).outcomes == [Outcome.UNAVAILABLE]
    assert instance.load([key], [0]).outcomes == [Outcome.UNAVAILABLE]
    assert instance.match([key]) == 0


def test_a_store_extends_the_lease_and_never_shortens_it(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"file://{tmp_path}/kv"), new_keys(1)
    instance.store(keys, [0], lease_s=100)
    (path,) = blocks_in(tmp_path / "kv")
    for lease_s, ends_in in ((10, 100), (500, 500)):
        instance.store(keys, [0], lease_s=lease_s)
        assert path.stat().st_mtime == pytest.approx(time.time() + ends_in, abs=30)


def test_of_two_writers_of_a_block_at_once_the_longer_lease_stays(
    tmp_path: Path, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the shorter lease ends last."""
    short, long, (key,) = attach(f"file://{tmp_path}"), attach(f"file://{tmp_path}"), new_keys(1)
    write, is_first = os.writev, True

    def write_after_the_other(*arguments: Any) -> int:
        nonlocal is_first
        if is_first:
            is_first = False
            assert long.store([key], [0], lease_s=1000.0).leading == 1
        return write(*arguments)

    monkeypatch.setattr(os, "writev", write_after_the_other)
    assert short.store([key], [0], lease_s=10.0).leading == 1
    (path,) = blocks_in(tmp_path)
    assert path.stat().st_mtime == pytest.approx(time.time() + 1000, abs=100)
    assert list((tmp_path / "tmp").iterdir()) == [] and short.load([key], [1]).leading == 1


@pytest.fixture
def aged(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> tuple[Any, list[bytes]]:
    """Eight blocks: the first two leased, the others last used 10, 20, … 60 seconds ago."""
    instance, keys = attach(f"file://{tmp_path}/kv"), new_keys(8)
    instance.store(keys, range(8))
    for i, key in enumerate(keys[2:], 1):
        (path,) = (tmp_path / "kv").rglob(key.hex())
        os.utime(path, (0, time.time() - 10 * i))
    return instance, keys


def test_nothing_is_evicted_by_default(tmp_path: Path, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    Evictor(str(tmp_path / "kv"), None, None).sweep()
    assert instance.match(keys) == 8


def test_the_least_recently_used_blocks_are_evicted_to_the_size(tmp_path: Path, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    Evictor(str(tmp_path / "kv"), 5 * FILE, None).sweep()
    assert [instance.match([key]) for key in keys] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_blocks_older_than_the_limit_are_evicted(tmp_path: Path, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    Evictor(str(tmp_path / "kv"), None, 35.0).sweep()
    assert [instance.match([key]) for key in keys] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_leased_blocks_stay_whatever_the_size(tmp_path: Path, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    Evictor(str(tmp_path / "kv"), 1, 1.0).sweep()
    assert [instance.match([key]) for key in keys] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_a_load_counts_as_a_use_with_eviction(tmp_path: Path, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    instance.connector._evictor.is_enabled = True
    instance.load([keys[7]], [7])
    Evictor(str(tmp_path / "kv"), 3 * FILE, None).sweep()
    assert [instance.match([key]) for key in keys] == [1, 1, 0, 0, 0, 0, 0, 1]


def test_attaching_with_a_limit_evicts(tmp_path: Path, attach: Attach, aged: tuple[Any, list[bytes]]) -> None:
    instance, keys = aged
    attach(f"file://{tmp_path}/kv?max_bytes={4 * FILE}").connector.close()
    assert sum(instance.match([key]) for key in keys) == 4


@pytest.mark.parametrize("refusal", [errno.EAGAIN, errno.EOPNOTSUPP, 0])
def test_blocks_not_in_the_page_cache_are_loaded_by_blocking_reads(
    refusal: int, tmp_path: Path, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags != os.RWF_NOWAIT:
            return real(fd, buffers, offset)
        calls.append(offset)
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return real(fd, [buffers[0][: len(buffers[0]) // 2]], offset)  # only half of it was cached

    monkeypatch.setattr(file, "_is_in_memory", lambda _: False)
    monkeypatch.setattr(os, "preadv", preadv)
    instance, keys = attach(f"file://{tmp_path}"), new_keys(4)
    instance.store(keys, range(4))
    before = instance.rows[:4].copy()
    instance.rows[:4] = 0
    assert instance.load(keys, range(4)).leading == 4
    np.testing.assert_array_equal(instance.rows[:4], before)
    assert calls


def test_the_size_is_bounded_between_two_sweeps(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"file://{tmp_path}/kv?max_bytes={16 * FILE}", blocks=8)
    max_blocks = 0
    for _ in range(30):
        instance.store(new_keys(8), range(8), lease_s=0.001)
        instance.connector._evictor.join()
        time.sleep(0.005)
        max_blocks = max(max_blocks, len(blocks_in(tmp_path / "kv")))
    assert max_blocks <= 16 + 2 * 8


# What others leave in the store.


@pytest.mark.parametrize("thing", ["fifo", "link", "socket", "folder", "foreign"])
def test_what_is_no_file_of_this_user_is_no_block(
    tmp_path: Path, attach: Attach, new_keys: NewKeys, thing: str
) -> None:
    instance, (key, other) = attach(f"file://{tmp_path}/kv?max_bytes=1MiB"), new_keys(2)
    instance.store([key, other], [0, 1])
    path, kept = (blocks_of(instance, tmp_path / "kv", one) for one in (key, other))
    value = path.read_bytes()
    path.unlink()
    if thing == "fifo":
        os.mkfifo(path)
    elif thing == "link":
        (tmp_path / "elsewhere").write_bytes(value)
        path.symlink_to(tmp_path / "elsewhere")
    elif thing == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif thing == "folder":
        path.mkdir()
    else:
        path.write_bytes(value)
        instance.connector._owners = {os.getuid() + 1}  # as if it were of another user
    if thing != "foreign":
        assert instance.load([key, other], [8, 9]).outcomes == [Outcome.MISSING, Outcome.OK]
    else:
        assert instance.load([key], [8]).outcomes == [Outcome.MISSING]
    assert instance.match([key]) == 0
    stored = instance.store([key], [0]).outcomes
    assert stored == [Outcome.UNAVAILABLE if thing == "folder" else Outcome.OK]
    if thing not in ("folder", "foreign"):
        assert instance.load([key], [8]).leading == 1 and not path.is_symlink()
    assert kept.exists()


def blocks_of(instance: Any, root: Path, key: bytes) -> Path:
    namespace: str = instance.layout.namespace.hex()
    return root / namespace / key.hex()[:2] / key.hex()


@pytest.mark.parametrize(("mode", "warnings"), [(0o700, 0), (0o755, 0), (0o770, 1), (0o777, 1)])
def test_a_folder_that_others_may_write_is_named(
    tmp_path: Path, attach: Attach, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    attach(f"file://{tmp_path}/kv")
    named = [record for record in caplog.records if "others may write to" in record.getMessage()]
    assert len(named) == warnings


def test_a_corrupt_file_is_deleted_and_not_one_that_took_its_place(
    tmp_path: Path, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instance deletes the corrupt file and stores the block again, between the read and the deletion."""
    one, other, keys = attach(f"file://{tmp_path}/kv"), attach(f"file://{tmp_path}/kv"), new_keys(2)
    other.rows[:] = one.rows
    one.store(keys, [0, 1])
    for key in keys:
        with open(blocks_of(one, tmp_path / "kv", key), "r+b") as corrupted:
            corrupted.write(b"x")
    assert one.load(keys[:1], [8]).outcomes == [Outcome.CORRUPT] and one.match(keys[:1]) == 0

    real = one.connector._read

    def read_late(block: Any, fd: int) -> Outcome:
        outcome: Outcome = real(block, fd)
        other.connector.delete_many([block.key])
        assert other.store([block.key], [1]).leading == 1
        return outcome

    monkeypatch.setattr(one.connector, "_read", read_late)
    assert one.load(keys[1:], [8]).outcomes == [Outcome.CORRUPT]
    assert other.load(keys[1:], [8]).leading == 1


# Eviction.


def sparse_block(path: Path, mtime: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(1000))
    os.utime(path, (mtime, mtime))
    return path


@pytest.mark.parametrize("ahead_s", [MAX_LEASE_S + 120, 86_400, 1e9])
def test_times_of_a_wrong_clock_are_no_lease(tmp_path: Path, ahead_s: float) -> None:
    folder, now = tmp_path / ("a" * 32) / "00", time.time()
    ahead = [sparse_block(folder / f"ahead{i}", now + ahead_s) for i in range(20)]
    leased = [sparse_block(folder / f"leased{i}", now + 1000) for i in range(5)]
    used = [sparse_block(folder / f"used{i}", now - 1000) for i in range(10)]
    Evictor(str(tmp_path), 20_000, None).sweep()
    assert sum(path.exists() for path in ahead) == 5 and all(path.exists() for path in used + leased)
    Evictor(str(tmp_path), None, 5000.0).sweep()
    assert not any(path.exists() for path in ahead) and all(path.exists() for path in used + leased)


def test_the_longest_lease_of_a_host_whose_clock_is_ahead_is_one(
    tmp_path: Path, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, keys = attach(f"file://{tmp_path}/kv"), new_keys(2)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 30.0)
        instance.store(keys, [0, 1], lease_s=MAX_LEASE_S)
    Evictor(f"{tmp_path}/kv", 1, None).sweep()
    assert instance.match(keys) == 2


def test_a_use_mends_the_time_of_a_wrong_clock(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, (loaded, stored) = attach(f"file://{tmp_path}/kv?max_bytes=1MiB"), new_keys(2)
    instance.store([loaded, stored], [0, 1], lease_s=0.0)
    paths = [blocks_of(instance, tmp_path / "kv", key) for key in (loaded, stored)]
    for path in paths:
        os.utime(path, (0, time.time() + 86_400))
    instance.load([loaded], [8])
    instance.store([stored], [1], lease_s=60.0)
    assert all(path.stat().st_mtime < time.time() + 100 for path in paths)


def test_eviction_passes_over_what_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, now = tmp_path / ("a" * 32) / "00", time.time()
    blocks = [sparse_block(folder / f"block{i}", now - 100 + i) for i in range(10)]
    (folder / "a-folder").mkdir()
    os.utime(folder / "a-folder", (0, 0))
    real, errors = os.unlink, {"block0": errno.EBUSY, "block1": errno.EACCES}

    def unlink(path: str) -> None:
        if code := errors.get(os.path.basename(path)):
            raise OSError(code, os.strerror(code))
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    connector = FileConnector(f"file://{tmp_path}?max_bytes=5000")
    connector._evictor.sweep()
    assert [path.exists() for path in blocks].count(True) <= 5
    assert connector.stats().failures == {("evict", Outcome.UNAVAILABLE): 3}
    assert {error.split(": ")[-1] for error in caplog.messages} >= {"Device or resource busy", "Permission denied"}


def test_a_sweep_that_ends_by_an_exception_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evictor = Evictor(str(tmp_path), 5_000, None)
    monkeypatch.setattr(evictor, "sweep", lambda: 1 / 0)
    evictor.start_if_due()
    evictor.join()
    assert evictor.failures == 1 and "ended early" in caplog.text


def test_close_does_not_wait_for_a_sweep_that_hangs(
    tmp_path: Path,
    attach: Attach,
    new_keys: NewKeys,
    hurry_shut: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, resume = attach(f"file://{tmp_path}/kv?max_bytes=1KiB"), threading.Event()
    instance.connector._evictor.join()
    monkeypatch.setattr(file, "_scan", lambda path: resume.wait(60) and [])
    assert instance.store(new_keys(1), [0], lease_s=0.0).leading == 1
    hurry_shut(instance.connector)
    instance.connector.close()
    assert instance.connector._evictor._thread.is_alive() and "background work" in caplog.text
    resume.set()
    instance.connector._evictor.join()
