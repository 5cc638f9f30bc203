"""Tests of `nixl://` between processes: owners lease their rows, and this process reads them."""

import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.nixl.connector import NixlConnector
from pdserve.kv_transfer.rules.context import make_layout
from tests.waiting import wait_until

BLOCK_BYTES = 16384
OK, MISSING, CORRUPT, UNAVAILABLE = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE

StartOwners = Callable[..., list[Any]]  # the classes are in conftest.py
StartReader = Callable[..., Any]


@pytest.fixture
def only_tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """Restricts UCX to TCP, where the owner takes part in a read, as between hosts without RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    return "tcp,self"


def during_read(reader: Any, monkeypatch: pytest.MonkeyPatch, *, at: int, do: Callable[[], None]) -> None:
    """Calls `do` when the reader has started `at` reads, into a bounce buffer or directly into rows."""
    reader.connector._opening.join()
    started = itertools.count(1)

    def patch(agent: Any, name: str) -> None:
        start_read = getattr(agent, name)

        def start_and_do(*arguments: Any) -> bool:
            done: bool = start_read(*arguments)
            if next(started) == at:
                do()
            return done

        monkeypatch.setattr(agent, name, start_and_do)

    for started_reader in reader.connector._readers:
        patch(started_reader._agent, "start_read")


@pytest.mark.parametrize("piece", ["1", "48KiB", "4MiB"], ids=["single blocks", "three at a time", "all at once"])
def test_scattered_rows_are_read_bit_exact_and_released(
    piece: str, owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    mine, keys, shuffle = reader(f"nixl://?piece={piece}"), new_keys(40), np.random.default_rng(3).permutation
    sources, targets = shuffle(64)[:40].tolist(), shuffle(64)[:40].tolist()
    stored = owner.store(keys, sources)
    assert not owner.has_released(stored, wait=0)
    result = mine.load(keys, targets, stored)
    assert result.outcomes == [OK] * 40 and result.held is None and result.ticket == b""
    np.testing.assert_array_equal(mine.rows[targets], owner.rows[sources])
    untouched = sorted(set(range(64)) - set(targets))
    assert (mine.rows[untouched] == 7).all()
    assert owner.has_released(stored)
    stats = mine.connector.stats()
    assert stats.blocks["load"] == 40 and stats.bytes["load"] == 40 * BLOCK_BYTES and not stats.failures


def test_a_pool_of_large_blocks_over_tcp(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]], only_tcp: str
) -> None:
    [owner] = owners(block_bytes=3 << 20, blocks=8)
    mine, keys = reader("nixl://?piece=6MiB", layout=make_layout(3 << 20), blocks=8), new_keys(7)
    stored = owner.store(keys, [6, 0, 5, 1, 4, 2, 3])
    assert mine.load(keys, [1, 2, 3, 4, 5, 6, 7], stored).leading == 7
    np.testing.assert_array_equal(mine.rows[1:], owner.rows[[6, 0, 5, 1, 4, 2, 3]])
    assert owner.has_released(stored)


def test_a_load_may_use_several_tickets(
    owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    mine, keys = reader(), new_keys(6)
    first = owner.store(keys[:3], [0, 1, 2])
    assert mine.load(keys[:2], [0, 1], first).leading == 2
    assert not owner.has_released(first, wait=0.1), "its third block was not read yet"
    second = owner.store(keys[3:], [3, 4, 5])
    assert mine.load(keys[2:], [2, 3, 4, 5], first, second).leading == 4
    np.testing.assert_array_equal(mine.rows[:6], owner.rows[:6])
    assert owner.has_released(first) and owner.has_released(second)


def test_release_ends_leases_of_unread_blocks(
    owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    mine, keys = reader(), new_keys(4)
    never_read, read = owner.store(keys, [0, 1, 2, 3]), owner.store(keys[:3], [0, 1, 2])
    others = owner.store(keys, [0, 1, 2, 3])
    mine.connector.release(keys, tickets=[never_read.ticket, b"?"])
    assert owner.has_released(never_read)
    assert mine.load(keys[2:3], [0], read, others).leading == 1
    mine.connector.release(keys, tickets=[read.ticket])
    assert owner.has_released(read)
    assert not owner.has_released(others, wait=0.1), "other requests have the same blocks"
    assert mine.load(keys, [0, 1, 2, 3], others).leading == 4


def test_match_finds_nothing(owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    stored = owner.store(keys, [0, 1])
    assert mine.connector.match(keys).result(60) == 0
    assert mine.load(new_keys(1) + keys[:1], [0, 1], stored).outcomes == [MISSING, OK]
    assert mine.load(keys, [2, 3]).outcomes == [MISSING] * 2
    assert (mine.rows[[0, 2, 3]] == 7).all()


def test_invalid_tickets_are_ignored(owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    good = owner.store(keys, [0, 1])
    broken = [b"", b"?", b"{}" * 50, good.ticket[:-1], good.ticket + b"\0", b"x" + good.ticket[1:]]
    assert mine.load(keys, [0, 1], *broken).outcomes == [MISSING] * 2
    wrong_address = bytearray(good.ticket)
    wrong_address[24:32] = (1 << 40).to_bytes(8, "little")
    assert mine.load(keys, [0, 1], bytes(wrong_address)).outcomes == [UNAVAILABLE] * 2
    assert (mine.rows == 7).all()
    assert mine.load(keys, [0, 1], good).outcomes == [OK] * 2


def test_blocks_of_another_model_are_never_read(
    owner: Any, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    keys = new_keys(2)
    stored = owner.store(keys, [0, 1])
    for layout in (make_layout(BLOCK_BYTES, "another model"), make_layout(2 * BLOCK_BYTES)):
        mine = reader(layout=layout)
        assert mine.load(keys, [0, 1], stored).outcomes == [CORRUPT] * 2
        assert (mine.rows == 7).all()
        assert mine.connector.stats().failures == {("load", CORRUPT): 2}


def test_a_row_that_was_reused_is_corrupt(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    [owner] = owners(blocks=8)
    mine, keys = reader(), new_keys(4)
    stored = owner.store(keys, [4, 5, 6, 7], lease_s=0.2)
    assert owner.has_released(stored), "the lease has ended"
    owner.call("fill", row=6, value=1)
    assert mine.load(keys, [0, 1, 2, 3], stored).outcomes == [OK, OK, CORRUPT, OK]
    np.testing.assert_array_equal(mine.rows[[0, 1, 3]], owner.rows[[4, 5, 7]])


def test_an_instance_reads_its_own_ticket(reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    mine.rows[:2] = np.random.default_rng(0).integers(0, 256, (2, BLOCK_BYTES))
    result = mine.connector.store(keys, [0, 1], lease_s=60).result(60)
    assert result.held is not None and not result.held.done()
    assert mine.load(keys, [4, 5], result.ticket).leading == 2
    np.testing.assert_array_equal(mine.rows[4:6], mine.rows[:2])
    result.held.result(60)
    assert mine.connector.stats().bytes == {"store": 0, "load": 2 * BLOCK_BYTES}


def test_a_killed_peer_is_unavailable_and_its_successor_works_at_once(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    unconnected, connected, successor = owners(3)
    mine, keys = reader("nixl://?timeout=300"), new_keys(8)
    lost = unconnected.store(keys[:2], [0, 1])
    first, second = connected.store(keys[2:4], [0, 1]), connected.store(keys[4:6], [2, 3])
    assert mine.load(keys[2:4], [0, 1], first).leading == 2
    unconnected.kill()
    connected.kill()
    assert mine.load(keys[:2], [2, 3], lost).outcomes == [UNAVAILABLE] * 2
    assert mine.load(keys[4:6], [2, 3], second).outcomes == [UNAVAILABLE] * 2
    assert mine.load(keys[4:6], [2, 3], second).outcomes == [UNAVAILABLE] * 2, "noticed long before the time-out"
    assert (mine.rows[2:4] == 7).all()
    stored = successor.store(keys[4:], [2, 3, 4, 5])
    assert mine.load(keys[4:], [2, 3, 4, 5], lost, first, second, stored).leading == 4
    np.testing.assert_array_equal(mine.rows[2:6], successor.rows[2:6])
    mine.connector.release(keys, tickets=[lost.ticket, first.ticket, second.ticket, stored.ticket])
    assert mine.connector.stats().failures == {("load", UNAVAILABLE): 6}


@pytest.mark.parametrize("tls", ["", "tcp,self"], ids=["shared memory", "tcp"])
def test_a_peer_killed_during_a_read(
    tls: str,
    owners: StartOwners,
    reader: StartReader,
    new_keys: Callable[[int], list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    [owner] = owners(block_bytes=1 << 20, blocks=16)
    mine, keys = reader("nixl://?piece=1MiB", layout=make_layout(1 << 20), blocks=16), new_keys(16)
    stored = owner.store(keys, range(16))
    during_read(mine, monkeypatch, at=9, do=owner.kill)
    outcomes = mine.load(keys, range(15, -1, -1), stored).outcomes
    arrived = outcomes.index(UNAVAILABLE)
    assert 7 <= arrived <= 9 and outcomes == [OK] * arrived + [UNAVAILABLE] * (16 - arrived)
    np.testing.assert_array_equal(mine.rows[::-1][:arrived], owner.rows[:arrived])


def test_a_lease_that_ends_during_a_read(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    [owner] = owners(blocks=8)
    mine, keys = reader("nixl://?piece=1&timeout=20"), new_keys(8)
    stored = owner.store(keys, range(8), lease_s=1.0)

    def reuse() -> None:
        assert owner.has_released(stored), "the lease ends without waiting for the reader"
        for row in (5, 6):
            owner.call("fill", row=row, value=1)

    during_read(mine, monkeypatch, at=4, do=reuse)
    assert mine.load(keys, range(8), stored).outcomes == [OK] * 5 + [CORRUPT] * 2 + [OK]
    np.testing.assert_array_equal(mine.rows[[0, 1, 2, 3, 4, 7]], owner.rows[[0, 1, 2, 3, 4, 7]])


def test_a_stopped_peer_costs_the_timeout_and_writes_nothing_later(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]], only_tcp: str
) -> None:
    stopped, other = owners(2, block_bytes=1 << 20, blocks=16)
    mine, keys = reader("nixl://?timeout=2&piece=2MiB", layout=make_layout(1 << 20), blocks=16), new_keys(17)
    first = stopped.store(keys[:1], [0])
    wait_until(lambda: mine.load(keys[:1], [0], first).leading == 1, "it answers within its time-out")
    stored, instead = stopped.store(keys[1:], range(16)), other.store(keys[1:], range(16))
    stopped.signal(signal.SIGSTOP)
    mine.rows[:] = 7
    started = time.monotonic()
    assert mine.load(keys[1:], range(16), stored).outcomes == [UNAVAILABLE] * 16
    assert time.monotonic() - started > 1.7
    mine.connector.timeout = 300
    outcomes = mine.load(keys[1:], range(16), stored).outcomes
    assert outcomes == [UNAVAILABLE] * 16, "at once: its earlier read is not over"

    # The rows are loaded from another owner, and stay unchanged whatever the stopped peer still sends.
    assert mine.load(keys[1:], range(16), stored, instead).leading == 16
    stopped.signal(signal.SIGCONT)
    give_up_at = time.monotonic() + 60
    while mine.load(keys[1:2], [0], stored).outcomes != [OK]:
        np.testing.assert_array_equal(mine.rows[1:], other.rows[1:])
        assert time.monotonic() < give_up_at, "the peer resumed, but is not read"
        time.sleep(0.05)
    np.testing.assert_array_equal(mine.rows[1:], other.rows[1:])
    np.testing.assert_array_equal(mine.rows[0], stopped.rows[0])


def test_a_peer_stopped_before_the_first_read(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    [owner] = owners(blocks=4)
    mine, keys = reader("nixl://?timeout=0.5"), new_keys(1)
    stored = owner.store(keys, [0])
    owner.signal(signal.SIGSTOP)
    assert mine.load(keys, [0], stored).outcomes in ([UNAVAILABLE], [OK])  # shared memory does not need the peer
    mine.connector.close()  # with an unfinished read
    owner.signal(signal.SIGCONT)


def test_devices_in_the_url_take_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert NixlConnector("nixl://")._devices == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert NixlConnector("nixl://")._devices == "eth7"
    assert NixlConnector("nixl://?devices=mlx5_0:1")._devices == "mlx5_0:1"


@pytest.mark.parametrize("url", ["nixl://host", "nixl://host:1/", "nixl:///path", "nixl://?device=lo"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(SetupError):
        NixlConnector(url)
