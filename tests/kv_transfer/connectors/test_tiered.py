"""Tests of `tiered://`: which tier has which blocks, and the effect of tiers that fail."""

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import PROBE_KEY, Outcome, Stats
from pdserve.kv_transfer.connectors import memory, tiered
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector
from pdserve.kv_transfer.connectors.tiered import TieredConnector
from tests.waiting import wait_until

Attach = Callable[..., Any]
LayoutOf = Callable[..., Layout]
NewKeys = Callable[[int], list[bytes]]
StartRedis = Callable[..., Any]


@pytest.fixture
def fast() -> Iterator[str]:
    """A first tier with space for eight blocks of 4 KiB."""
    name = f"memory://test-tier-{os.urandom(6).hex()}"
    yield f"{name}?size=33KiB"
    memory.unlink(name)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks stores of `file://` until it is set. Fails the test if that never happens."""
    opened, put_many, timed_out = threading.Event(), FileConnector.put_many, threading.Event()

    def wait(self: FileConnector, *arguments: Any) -> None:
        if not opened.wait(120):
            timed_out.set()
        put_many(self, *arguments)

    monkeypatch.setattr(FileConnector, "put_many", wait)
    yield opened
    opened.set()
    assert not timed_out.is_set()


def failures(instance: Any, tier: str) -> dict[tuple[str, Outcome], int]:
    found: dict[tuple[str, Outcome], int] = instance.connector.stats().parts[tier].failures
    return found


def test_a_store_writes_to_the_first_tier_and_later_to_the_others(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys
) -> None:
    instance, keys = attach(f"tiered://{fast},{slow}/a,{slow}/b"), new_keys(4)
    stored = instance.rows[:4].copy()
    assert instance.store(keys, range(4)).leading == 4
    instance.rows[:4] = 7  # the caller reuses the rows
    instance.connector.settle()
    for url in (fast, f"{slow}/a", f"{slow}/b"):
        alone = attach(url)
        assert alone.load(keys, range(4)).leading == 4
        np.testing.assert_array_equal(alone.rows[:4], stored)
    parts = instance.connector.stats().parts
    assert {name: part.blocks["store"] for name, part in parts.items()} == {
        "tiered/1/memory": 4,
        "tiered/2/file": 4,
        "tiered/3/file": 4,
    }


def test_blocks_evicted_from_the_first_tier_are_loaded_from_the_second_and_promoted(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys
) -> None:
    instance, keys = attach(f"tiered://{fast},{slow}", blocks=32), new_keys(12)
    for at in (0, 6):
        assert instance.store(keys[at : at + 6], range(at, at + 6), lease_s=0.0).leading == 6
        instance.connector.settle()
    first = attach(fast)
    assert first.match(keys) == 0
    assert instance.match(keys) == 12
    assert instance.load(keys[:4], range(16, 20)).leading == 4
    np.testing.assert_array_equal(instance.rows[16:20], instance.rows[:4])
    assert first.match(keys) == 4
    assert first.load(keys[:4], range(4)).leading == 4
    np.testing.assert_array_equal(first.rows[:4], instance.rows[:4])
    assert instance.connector.stats().parts["tiered/2/file"].blocks["load"] == 4
    assert instance.load(keys[:4], range(16, 20)).leading == 4
    assert instance.connector.stats().parts["tiered/2/file"].blocks["load"] == 4  # the second tier is not used again


@pytest.mark.parametrize(("seconds", "is_promoted"), [(5.0, True), (12.0, False)])
def test_blocks_are_promoted_only_if_the_load_then_ends_by_its_timeout(
    tmp_path: Path,
    attach: Attach,
    new_keys: NewKeys,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    is_promoted: bool,
) -> None:
    """Both tiers take some seconds by the clock of the loads, of 20 each, and a store in the first may take 20 more."""
    first, second = (f"file://{tmp_path}/{tier}?timeout=20" for tier in ("first", "second"))
    keys, get_many, later = new_keys(1), FileConnector.get_many, 0.0
    attach(second).store(keys, [0])
    instance = attach(f"tiered://{first},{second}")

    def slow(self: FileConnector, *arguments: Any) -> None:
        nonlocal later
        later += seconds
        get_many(self, *arguments)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later, perf_counter=time.perf_counter)
    monkeypatch.setattr(FileConnector, "get_many", slow)
    monkeypatch.setattr(tiered, "time", clock)
    assert instance.load(keys, [1]).leading == 1
    assert attach(first).match(keys) == is_promoted
    skipped = {} if is_promoted else {("store", Outcome.UNAVAILABLE): 1}
    assert failures(instance, "tiered/1/file") == {("load", Outcome.MISSING): 1, **skipped}


def test_a_block_corrupt_in_the_first_tier_is_loaded_from_the_second(
    tmp_path: Path, attach: Attach, new_keys: NewKeys
) -> None:
    one, two = f"file://{tmp_path}/one", f"file://{tmp_path}/two"
    instance, keys = attach(f"tiered://{one},{two}"), new_keys(3)
    instance.store(keys, range(3))
    instance.connector.settle()
    (broken,) = (tmp_path / "one").rglob(keys[1].hex())
    value = bytearray(broken.read_bytes())
    value[100] ^= 1
    broken.write_bytes(value)
    assert instance.load(keys, [8, 9, 10]).leading == 3
    np.testing.assert_array_equal(instance.rows[8:11], instance.rows[:3])
    assert failures(instance, "tiered/1/file") == {("load", Outcome.CORRUPT): 1}
    assert not instance.connector.stats().failures
    assert attach(one).load(keys, range(3)).leading == 3  # repaired


def test_a_block_that_no_tier_has_intact_is_reported(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"tiered://file://{tmp_path}/one,file://{tmp_path}/two"), new_keys(3)
    instance.store(keys[:2], range(2))
    instance.connector.settle()
    (broken,), (missing,) = ((tmp_path / name).rglob(keys[1].hex()) for name in ("one", "two"))
    broken.write_bytes(b"x" * 4160)
    missing.unlink()
    outcomes = [Outcome.OK, Outcome.CORRUPT, Outcome.MISSING]
    assert instance.load(keys, [8, 9, 10]).outcomes == outcomes
    assert instance.connector.stats().failures == {("load", Outcome.CORRUPT): 1, ("load", Outcome.MISSING): 1}


@pytest.mark.parametrize(("one", "other"), [("none", "zstd"), ("lz4", "none"), ("int8", "int8")])
def test_tiers_may_use_codecs(
    tmp_path: Path, attach: Attach, layout_of: LayoutOf, new_keys: NewKeys, one: str, other: str
) -> None:
    first, second = f"file://{tmp_path}/first?codec={one}", f"file://{tmp_path}/second?codec={other}"
    layout = replace(layout_of(4096), dtype="float32", itemsize=4, head_dim=512)
    assert layout.block_bytes == 4096
    instance, keys = attach(f"tiered://{first},{second}", layout), new_keys(2)
    instance.rows.view(np.float32)[:] = np.random.default_rng().normal(size=(16, 1024))
    instance.store(keys, range(2))
    instance.connector.settle()
    assert attach(first, layout).match(keys) == attach(second, layout).match(keys) == 2
    shutil.rmtree(tmp_path / "first")
    assert instance.load(keys, [8, 9]).leading == 2
    assert (instance.rows[8:10] == instance.rows[:2]).all() == (other != "int8")
    assert attach(first, layout).match(keys) == 2  # promoted


@pytest.mark.parametrize(("one", "other"), [("none", "int8"), ("fp8", "zstd"), ("fp8", "int8")])
def test_a_lossy_codec_in_one_tier_only_is_refused(one: str, other: str) -> None:
    """Prefill also stores blocks that it loaded, so blocks of a lossy tier would be stored in an exact one."""
    with pytest.raises(SetupError, match="needs the same codec on all tiers"):
        TieredConnector(f"tiered://memory://a?codec={one},memory://b?codec={other}")


def test_a_match_continues_from_tier_to_tier(tmp_path: Path, attach: Attach, new_keys: NewKeys) -> None:
    urls, keys = [f"file://{tmp_path}/{name}" for name in "abc"], new_keys(10)
    for url, numbers in zip(urls, ([0, 1, 5, 8], [2, 4], [3, 6, 7]), strict=True):
        attach(url).store([keys[i] for i in numbers], numbers)
    instance = attach(f"tiered://{','.join(urls)}")
    assert instance.match(keys) == 9
    assert instance.match(keys[9:]) == instance.match([]) == 0
    assert instance.load(keys, range(10)).leading == 9


def test_a_slow_tier_delays_no_store_and_its_queue_is_bounded(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered, "MAX_QUEUED_COPIES", 3)
    instance = attach(f"tiered://?buffer=16KiB,{fast.partition('?')[0]},{slow}?timeout=600")
    keys = new_keys(12)
    for key in keys:
        assert instance.store([key], [0]).leading == 1
    dropped = failures(instance, "tiered/2/file")[("store", Outcome.UNAVAILABLE)]
    assert 12 - dropped in range(3, 6)  # three are queued, and up to two are in progress
    gate.set()
    instance.connector.settle()
    assert sum(attach(slow).match([key]) for key in keys) == 12 - dropped


def test_close_copies_all_blocks_to_the_slower_tiers(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, keys = attach(f"tiered://{fast},{slow}?timeout=600"), new_keys(8)
    monkeypatch.setattr(tiered, "_DRAIN_TIMEOUT_S", 60.0)
    assert all(instance.store([key], [row]).leading == 1 for row, key in enumerate(keys))
    assert attach(slow).match(keys) == 0
    threading.Timer(0.3, gate.set).start()
    instance.connector.close()
    assert attach(slow).match(keys) == 8


def test_close_does_not_wait_forever(
    fast: str,
    slow: str,
    attach: Attach,
    new_keys: NewKeys,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiered, "_DRAIN_TIMEOUT_S", 0.2)
    instance = attach(f"tiered://{fast},{slow}?timeout=600")
    for key in new_keys(4):
        instance.store([key], [0])
    instance.connector._tiers[1].back.timeout = 0.1  # which its own close waits
    instance.connector.close()
    assert not gate.is_set()
    assert "not copied to the slower tiers" in caplog.text


def test_blocks_that_do_not_fit_into_the_first_tier_are_stored_in_the_second(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys
) -> None:
    instance, keys = attach(f"tiered://{fast},{slow}", blocks=32), new_keys(12)
    assert instance.store(keys, range(12), lease_s=600).leading == 12
    assert attach(fast).match(keys) == 8  # all of them leased
    assert attach(slow).match(keys[8:]) == 4
    assert instance.load(keys, range(16, 28)).leading == 12
    np.testing.assert_array_equal(instance.rows[16:28], instance.rows[:12])
    assert failures(instance, "tiered/1/memory")[("store", Outcome.FULL)] >= 4


def counted(stats: Stats) -> list[dict[Any, int]]:
    """Return the failures of the whole and of each tier."""
    return [stats.failures, *(part.failures for part in stats.parts.values())]


def out(instance: Any) -> list[str]:
    return [name for name, part in instance.connector.stats().parts.items() if part.is_out]


def test_a_tier_that_dies_and_restarts(
    fast: str, start_redis: StartRedis, attach: Attach, new_keys: NewKeys, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis()
    instance = attach(f"tiered://{fast.partition('?')[0]},{server.url}?timeout=60", blocks=32)
    old, new, newest = new_keys(3), new_keys(3), new_keys(3)
    instance.store(old, range(3))
    instance.connector.settle()
    server.kill()
    assert instance.store(new, range(3)).leading == 3
    assert instance.load(old + new, range(8, 14)).leading == 6
    assert instance.match(new_keys(1)) == 0
    assert instance.load(new_keys(1), [20]).outcomes == [Outcome.UNAVAILABLE]
    instance.connector.settle()
    before = instance.connector.stats()
    assert instance.load([PROBE_KEY], [20]).outcomes == [Outcome.UNAVAILABLE]
    assert counted(instance.connector.stats()) == counted(before), "to ask whether a store is back is no failure"
    assert failures(instance, "tiered/2/redis")[("store", Outcome.UNAVAILABLE)] == 3
    assert "redis: " in caplog.text
    assert out(instance) == ["tiered/2/redis"]
    server.start()
    instance.store(newest, range(3))
    instance.connector.settle()
    assert out(instance) == []
    assert attach(server.url).match(newest) == 3


def test_a_hanging_tier_is_skipped_for_a_while(
    fast: str, start_redis: StartRedis, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis()
    instance, keys = attach(f"tiered://{fast},{server.url}?timeout=1"), new_keys(2)
    tier = instance.connector._tiers[1]
    matched: list[list[bytes]] = []
    match = tier.front.match

    def count_and_match(keys: list[bytes]) -> Future[int]:
        matched.append(keys)
        found: Future[int] = match(keys)
        return found

    monkeypatch.setattr(tier.front, "match", count_and_match)
    instance.store(keys, range(2))
    instance.connector.settle()
    wait_until_used(instance, new_keys(1))  # it may have timed out on a busy machine
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert instance.match([*keys, *new_keys(1)]) == 2
        assert len(matched) == 1 and tier._breaker.is_open
        assert out(instance) == ["tiered/2/redis"]
        tier._breaker._next_probe_at += 600  # so that a busy machine does not resume it during the next lines
        for _ in range(20):
            assert instance.match([*keys, *new_keys(1)]) == 2
            assert instance.load([*keys, *new_keys(1)], [8, 9, 10]).leading == 2
        assert len(matched) == 1
        before = instance.connector.stats()
        instance.load([PROBE_KEY], [8])  # which skips the tier
        assert counted(instance.connector.stats()) == counted(before)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    tier._breaker._next_probe_at -= 600
    wait_until_used(instance, new_keys(1))
    assert out(instance) == []


def wait_until_used(instance: Any, missing: list[bytes]) -> None:
    """Wait until the last tier tells that it does not have a block."""
    wait_until(lambda: instance.load(missing, [8]).outcomes == [Outcome.MISSING], "the tier is used")


def test_a_tier_unreachable_at_start_is_used_once_it_is_reachable(
    fast: str,
    start_redis: StartRedis,
    attach: Attach,
    new_keys: NewKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiered, "_ATTACH_RETRY_S", 0.2)
    server = start_redis()
    server.kill()
    instance, keys = attach(f"tiered://{server.url},{fast}"), new_keys(2)
    assert out(instance) == ["tiered/1/redis"]
    assert "No Redis answers" in caplog.text and "using the other tiers until then" in caplog.text
    assert instance.store(keys, range(2)).leading == instance.load(keys, [8, 9]).leading == 2
    assert failures(instance, "tiered/1/redis") == {
        ("store", Outcome.UNAVAILABLE): 4,  # two of the store, two promotions after the load
        ("load", Outcome.UNAVAILABLE): 2,
    }
    server.start()
    wait_until(lambda: "tiered/1/redis is attached now" in caplog.text)
    assert instance.load(keys, [8, 9]).leading == 2
    assert attach(server.url).match(keys) == 2


def test_a_tier_whose_attach_raises_is_tried_again(
    fast: str,
    start_redis: StartRedis,
    attach: Attach,
    new_keys: NewKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiered, "_ATTACH_RETRY_S", 0.1)
    server = start_redis()
    server.kill()
    attach(f"tiered://{server.url},{fast}")
    failed = threading.Event()

    def fail(self: RedisConnector, name: str, error: Exception) -> None:
        failed.set()
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(RedisConnector, "_fail_to_open", fail)
        assert failed.wait(60)
    server.start()
    wait_until(lambda: "tiered/1/redis is attached now" in caplog.text)
    assert "ValueError: a defect" in caplog.text


def test_attach_fails_if_no_tier_is_reachable(start_redis: StartRedis, attach: Attach) -> None:
    server = start_redis()
    server.kill()
    with pytest.raises(SetupError, match=r"None of the tiers can be used\. No Redis .* file:///proc/x is not"):
        attach(f"tiered://{server.url},file:///proc/x")


@pytest.mark.parametrize("failing", [(FileConnector, "open"), (asyncio, "run")], ids=["a tier", "the event loop"])
def test_an_attach_that_fails_for_lack_of_descriptors_leaves_nothing_open(
    fast: str, slow: str, attach: Attach, monkeypatch: pytest.MonkeyPatch, failing: tuple[Any, str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(*failing, fail)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Too many open files"):
        attach(f"tiered://{fast},{slow}")
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread of the event loop ends by itself")


def test_an_exception_in_one_tier_does_not_affect_the_others(
    fast: str, slow: str, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def raise_error(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    instance, keys = attach(f"tiered://{slow},{fast}"), new_keys(2)
    for hook in ("put_many", "get_many", "contains_many"):
        monkeypatch.setattr(FileConnector, hook, raise_error)
    assert instance.store(keys, range(2)).leading == instance.load(keys, [8, 9]).leading == instance.match(keys) == 2
    assert "tiered/1/file: connector error: ZeroDivisionError: oops" in caplog.text


def test_close_leaves_no_thread(fast: str, start_redis: StartRedis, attach: Attach, new_keys: NewKeys) -> None:
    server = start_redis()
    server.kill()
    before = set(threading.enumerate())
    instance = attach(f"tiered://{fast},{server.url}")  # attaching one tier is still retried
    instance.store(new_keys(2), range(2))
    instance.connector.close()
    instance.connector.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        instance.connector.match(new_keys(1))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tiered://", "at least two tiers"),
        ("tiered://shm://a", "at least two tiers"),
        ("tiered://?bufer=1MiB,shm://a,shm://b", "no parameter 'bufer'; valid parameters are buffer"),
        ("tiered://shm://a,file:///b?max_bites=1", "no parameter 'max_bites'"),
        ("tiered://shm://a,nothing://b", "There is no connector for nothing://"),
        ("tiered://shm://a,nixl://", "reads pools in place"),
    ],
)
def test_invalid_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TieredConnector(url)


def test_commas_within_a_tier_url_do_not_split_it() -> None:
    connector = TieredConnector("tiered://?buffer=1MiB,shm://a,redis+cluster://one:1,two:2?ttl=5,file:///b,c?timeout=2")
    assert [tier.url for tier in connector._tiers] == [
        "shm://a",
        "redis+cluster://one:1,two:2?ttl=5",
        "file:///b,c?timeout=2",
    ]
    assert connector.capabilities.timeout_s == 122, "twice the default of these tests, and 2 s"
    assert not connector.capabilities.keeps_leases


def test_invalid_arguments_raise_at_once(fast: str, slow: str, attach: Attach, new_keys: NewKeys) -> None:
    instance = attach(f"tiered://{fast},{slow}", blocks=4)
    with pytest.raises(ValueError, match="between 0 and 3"):
        instance.connector.load(new_keys(2), [0, 4])


def test_close_does_not_wait_for_a_tier_that_cannot_be_attached(
    tmp_path: Path, attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resume = threading.Event()
    for name in ("_ATTACH_RETRY_S", "_DRAIN_TIMEOUT_S"):
        monkeypatch.setattr(tiered, name, 0.01)
    url = f"tiered://memory://test-{uuid.uuid4().hex}?timeout=0.1,file://{tmp_path}/no/folder?timeout=0.1"
    (tmp_path / "no").write_text("a file")
    instance = attach(url, blocks=1)
    hangs = threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        resume.wait(60)

    monkeypatch.setattr(instance.connector._tiers[1], "attach", hang)
    assert hangs.wait(60)
    instance.connector.close()
    assert instance.connector._thread.is_alive() and "background work still waits for a tier" in caplog.text
    resume.set()
    instance.connector._thread.join(60)
