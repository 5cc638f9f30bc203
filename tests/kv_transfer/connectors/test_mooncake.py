"""Tests of `mooncake://` with a real master and a segment in another process. Needs `pdserve[mooncake]` and libibverbs1."""

import importlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.conformance import Verdict, check
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.mooncake import MooncakeConnector

Attach = Callable[..., Any]
NewKeys = Callable[[int], list[bytes]]


@pytest.mark.slow
def test_conformance(mooncake: Any) -> None:
    reports = {one.rule: one for one in check(mooncake.url, seconds=0.5)}
    exceptions = {rule: one.detail for rule, one in reports.items() if one.verdict is not Verdict.HOLDS}
    no_relay = {"attaching", "stalled-value", "silent-connections", "byte-by-byte"}
    assert no_relay <= set(exceptions) <= {"leases-under-pressure"} | no_relay, exceptions
    assert not any(reports[rule].detail for rule in ("foreign-namespace", "older-layout"))


def test_a_segment_of_this_instance_is_used(mooncake: Any, attach: Attach, new_keys: NewKeys) -> None:
    mooncake.holder.kill()
    mooncake.holder.wait()
    one, keys = attach(f"{mooncake.url}?segment=64MiB"), new_keys(3)
    give_up = time.monotonic() + 60
    while one.store(keys, range(3)).leading < 3:  # the master may still offer the memory of the dead process
        assert time.monotonic() < give_up
        time.sleep(0.2)
    other = attach(mooncake.url)
    assert other.load(keys, range(8, 11)).leading == 3
    np.testing.assert_array_equal(other.rows[8:11], one.rows[:3])


def test_a_block_another_client_has_begun_to_write_is_not_reported_as_stored(
    mooncake: Any, attach: Attach, new_keys: NewKeys
) -> None:
    """Mooncake accepts a second writer at once. If the first one dies, its claim to the name expires after a while."""
    instance, keys = attach(f"{mooncake.url}?timeout=2"), new_keys(2)
    name = f"{instance.layout.namespace.hex()}-{keys[0].hex()}"
    other = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    try:
        assert other.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", f"127.0.0.1:{mooncake.port}") == 0
        assert other.batch_put_session_start([name], [4160]) == [0]
        assert instance.store(keys, [0, 1]).outcomes == [Outcome.UNAVAILABLE, Outcome.OK]
        assert instance.match(keys) == 0
    finally:
        other.close()
    give_up = time.monotonic() + 60
    while instance.store(keys, [0, 1]).leading < 2:
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert instance.load(keys, [8, 9]).leading == 2


def test_blocks_are_lost_with_the_process_that_holds_them(mooncake: Any, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"{mooncake.url}?timeout=2"), new_keys(3)
    instance.connector.timeout = 60.0
    assert instance.store(keys, range(3)).leading == 3
    instance.connector.timeout = 2.0
    mooncake.holder.kill()
    seen = set(instance.load(keys, range(8, 11)).outcomes)
    assert seen <= {Outcome.MISSING, Outcome.UNAVAILABLE}
    assert set(instance.store(new_keys(3), range(3)).outcomes) <= {Outcome.FULL, Outcome.UNAVAILABLE}


@pytest.mark.parametrize(("num_late", "outcome"), [(1, Outcome.OK), (2, Outcome.MISSING)])
def test_a_read_that_outlasts_mooncakes_own_lease_is_repeated_once(
    mooncake: Any, attach: Attach, new_keys: NewKeys, monkeypatch: pytest.MonkeyPatch, num_late: int, outcome: Outcome
) -> None:
    """Mooncake may replace an object whose read lease has expired, so the bytes that a slow read got may be others'."""
    instance, keys = attach(mooncake.url), new_keys(2)
    assert instance.store(keys, [0, 1]).leading == 2
    real = instance.connector._store
    reads: list[list[str]] = []

    def read(names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        reads.append(names)
        lengths: list[int] = real.batch_get_into(names, addresses, sizes)
        return [lengths[0], -707] if len(reads) == 1 else lengths if len(reads) > num_late else [-707]

    store = SimpleNamespace(batch_get_into=read, register_buffer=real.register_buffer)
    monkeypatch.setattr(instance.connector, "_store", store)
    assert instance.load(keys, [8, 9]).outcomes == [Outcome.OK, outcome] and reads[1] == reads[0][1:]
    monkeypatch.undo()
    assert instance.load(keys, [8, 9]).leading == 2
    np.testing.assert_array_equal(instance.rows[8:10], instance.rows[:2])


def test_a_master_that_dies_and_restarts(mooncake: Any, attach: Attach, new_keys: NewKeys) -> None:
    instance, keys = attach(f"{mooncake.url}?timeout=2"), new_keys(2)
    instance.connector.timeout = 60.0
    assert instance.store(keys, [0, 1]).leading == 2
    instance.connector.timeout = 2.0
    mooncake.master.kill()
    mooncake.master.wait()
    assert instance.store(new_keys(2), [0, 1]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.load(keys, [8, 9]).outcomes == [Outcome.UNAVAILABLE] * 2
    assert instance.match(keys) == 0
    mooncake.start()
    give_up = time.monotonic() + 60
    while instance.store(keys, [0, 1]).leading < 2:
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert instance.load(keys, [8, 9]).leading == 2
    np.testing.assert_array_equal(instance.rows[8:10], instance.rows[:2])


def test_a_missing_library_is_an_error_with_instructions(monkeypatch: pytest.MonkeyPatch, attach: Attach) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    message = r"Mooncake cannot be imported: .* Install pdserve\[mooncake\]"
    with closing(socket.create_server(("127.0.0.1", 0))) as master, pytest.raises(SetupError, match=message):
        attach(f"mooncake://127.0.0.1:{master.getsockname()[1]}")
    for name in ("MC_LOG_LEVEL", "MC_RPC_TIMEOUT_MS", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_STORE_CLIENT_SETUP_RETRIES"):
        os.environ.pop(name, None)


def test_an_unreachable_master_is_refused(attach: Attach) -> None:
    with pytest.raises(SetupError, match=r"No Mooncake master answers at 127.0.0.1:1: .*refused"):
        attach("mooncake://127.0.0.1:1")


@pytest.mark.parametrize("url", ["mooncake://", "mooncake://host/path", "mooncake://host?protocol=ib"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(SetupError):
        MooncakeConnector(url)
