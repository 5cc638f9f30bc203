"""Tests of the owner's leases and of the thread that polls while there are any."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.kv_transfer.connectors.nixl import leases
from tests.waiting import wait_until

StartOwners = Callable[..., list[Any]]  # the classes are in conftest.py
StartReader = Callable[..., Any]


def test_leases_expire(owner: Any, new_keys: Callable[[int], list[bytes]]) -> None:
    started = time.monotonic()
    long, short = owner.store(new_keys(1), [0], lease_s=600), owner.store(new_keys(1), [0], lease_s=0.5)
    assert owner.has_released(short) and time.monotonic() - started >= 0.5
    assert not owner.has_released(long, wait=0)


def test_close_ends_all_leases_and_leaves_no_thread(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    before, keys = set(threading.enumerate()), new_keys(1)
    mine = reader()
    held = mine.connector.store(new_keys(1), [0], lease_s=60).result(60).held
    [owner] = owners(blocks=4)
    assert mine.load(keys, [1], owner.store(keys, [0])).leading == 1
    mine.connector.close()
    assert held is not None and held.done()
    assert set(threading.enumerate()) <= before
    owner.store(new_keys(1), [0])
    assert owner.call("close") is True


def test_an_idle_instance_does_not_poll(
    reader: StartReader, new_keys: Callable[[int], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_LINGER_S", 0.05)
    mine = reader()
    assert mine.connector._agent is not None
    calls: list[float] = []
    poll: Callable[[], list[bytes]] = mine.connector._agent.poll

    def counted() -> list[bytes]:
        calls.append(time.monotonic())
        return poll()

    monkeypatch.setattr(mine.connector._agent, "poll", counted)
    time.sleep(0.1)
    assert not calls
    keys = new_keys(1)
    held = mine.connector.store(keys, [0], lease_s=600)
    wait_until(lambda: len(calls) > 2, "it polls while there is a lease")
    mine.connector.release(keys, tickets=[held.result(60).ticket])
    held.result(60).held.result(60)
    give_up_at, count = time.monotonic() + 60, -1
    while count != len(calls):  # until polling stops
        count = len(calls)
        assert time.monotonic() < give_up_at, "polling does not stop"
        time.sleep(0.2)
