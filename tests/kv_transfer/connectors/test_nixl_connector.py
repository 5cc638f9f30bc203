"""nixl:// between real processes: owners that lease their rows, and this one, which reads them."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome, PoolMemory, Result
from pdserve.kv_transfer.connectors import nixl_leases
from pdserve.kv_transfer.connectors.nixl_connector import NixlConnector
from pdserve.kv_transfer.connectors.nixl_tickets import ENTRY, PeerPool, pack_ticket, unpack_ticket
from pdserve.kv_transfer.header import HEADER_BYTES, Row
from pdserve.kv_transfer.rules.context import make_layout

BLOCK_BYTES = 16384
OK, MISSING, CORRUPT, UNAVAILABLE = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE

# NIXL imports torch to see for which CUDA it is, if for any: seconds for each process.
NO_TORCH = "" if torch.version.cuda else "import sys; sys.modules['torch'] = None"

OWNER = """
import json, sys, time
import numpy as np
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.connectors.nixl_connector import NixlConnector
from pdserve.kv_transfer.rules.context import make_layout

url, block_bytes, blocks, seed = sys.argv[1], *map(int, sys.argv[2:5])
rows = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
connector = NixlConnector(url)
connector.attach(PoolMemory(rows, make_layout(block_bytes)))
held = []

def store(keys, ids, lease_s):
    result = connector.store([bytes.fromhex(key) for key in keys], ids, lease_s=lease_s).result(60)
    held.append(result.held)
    return {"outcomes": result.outcomes, "ticket": result.ticket.hex(), "store": len(held) - 1}

def released(store, wait):
    give_up = time.monotonic() + wait
    while not held[store].done() and time.monotonic() < give_up:
        time.sleep(0.001)
    return held[store].done()

def fill(row, value):
    rows[row] = value

def close():
    connector.close()
    return all(each.done() for each in held)

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps(globals()[name](**arguments)), flush=True)
"""


@dataclass(frozen=True)
class Stored:
    ticket: bytes
    number: int


class Owner:
    """A process with a pool of known random bytes."""

    def __init__(self, seed: int = 1, *, block_bytes: int = BLOCK_BYTES, blocks: int = 64, tls: str = "") -> None:
        self.rows: Row = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
        command = [sys.executable, "-c", NO_TORCH + OWNER, "nixl://", *map(str, (block_bytes, blocks, seed))]
        environment = os.environ | ({"UCX_TLS": tls} if tls else {})
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def wait_ready(self) -> None:
        assert self._answer() == "ready"

    def store(self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 60.0) -> Stored:
        answer = self.call("store", keys=[key.hex() for key in keys], ids=list(ids), lease_s=lease_s)
        assert answer["outcomes"] == ["ok"] * len(keys)
        return Stored(bytes.fromhex(answer["ticket"]), answer["store"])

    def has_released(self, stored: Stored, wait: float = 60.0) -> bool:
        return bool(self.call("released", store=stored.number, wait=wait))

    def call(self, name: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Reader:
    """The pool of this process. Its rows are all 7 at first."""

    def __init__(self, url: str = "nixl://", layout: Layout | None = None, blocks: int = 64) -> None:
        self.layout = layout or make_layout(BLOCK_BYTES)
        self.rows: Row = np.full((blocks, self.layout.block_bytes), 7, np.uint8)
        self.connector = NixlConnector(url)
        self.connector.attach(PoolMemory(self.rows, self.layout))

    def load(self, keys: Sequence[bytes], ids: Sequence[int], *stored: Stored) -> Result:
        return self.start(keys, ids, *stored).result(60)

    def start(self, keys: Sequence[bytes], ids: Sequence[int], *stored: Stored) -> Future[Result]:
        return self.connector.load(keys, ids, tickets=[each.ticket for each in stored])


StartOwners = Callable[..., list[Owner]]
StartReader = Callable[..., Reader]


@pytest.fixture(scope="module")
def installed() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")


@pytest.fixture
def owners(installed: None) -> Iterator[StartOwners]:
    """owners(2, blocks=8) → processes that were started at once, and answer."""
    started: list[Owner] = []

    def start(count: int = 1, **settings: Any) -> list[Owner]:
        new = [Owner(len(started) + seed, **settings) for seed in range(1, count + 1)]
        started.extend(new)
        for owner in new:
            owner.wait_ready()
        return new

    yield start
    for owner in started:
        owner.kill()


@pytest.fixture(scope="module")
def owner(installed: None) -> Iterator[Owner]:
    """One that all tests share which do it no harm."""
    owner = Owner()
    owner.wait_ready()
    yield owner
    owner.kill()


@pytest.fixture
def reader(installed: None) -> Iterator[StartReader]:
    readers: list[Reader] = []

    def start(*arguments: Any, **settings: Any) -> Reader:
        readers.append(Reader(*arguments, **settings))
        return readers[-1]

    yield start
    for each in readers:
        each.connector.close()


@pytest.fixture
def only_tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """Without shared memory the owner has to take part in a read, as in RDMA's absence between hosts."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    return "tcp,self"


def meanwhile(reader: Reader, monkeypatch: pytest.MonkeyPatch, *, at: int, do: Callable[[], None]) -> None:
    """Does something when the reader has begun `at` reads, of a bounce buffer's piece each or straight into rows."""
    reader.connector._opening.join()
    begun = itertools.count(1)

    def then(agent: Any, name: str) -> None:
        begin = getattr(agent, name)

        def begin_and_do(*arguments: Any) -> bool:
            over: bool = begin(*arguments)
            if next(begun) == at:
                do()
            return over

        monkeypatch.setattr(agent, name, begin_and_do)

    for each in reader.connector._readers:
        then(each._agent, "start_read")
        then(each._agent, "read")


@pytest.mark.parametrize("piece", ["1", "48KiB", "4MiB"], ids=["single blocks", "three at a time", "all at once"])
def test_scattered_rows_arrive_bit_by_bit_and_are_released(
    piece: str, owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]
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


def test_chunks_come_with_all_tickets_so_far(
    owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    mine, keys = reader(), new_keys(6)
    first = owner.store(keys[:3], [0, 1, 2])
    assert mine.load(keys[:2], [0, 1], first).leading == 2
    assert not owner.has_released(first, wait=0.1), "its third block was not read yet"
    second = owner.store(keys[3:], [3, 4, 5])
    assert mine.load(keys[2:], [2, 3, 4, 5], first, second).leading == 4
    np.testing.assert_array_equal(mine.rows[:6], owner.rows[:6])
    assert owner.has_released(first) and owner.has_released(second)


def test_release_ends_leases_of_blocks_that_nobody_wants(
    owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]
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


def test_there_is_nothing_to_match(owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    stored = owner.store(keys, [0, 1])
    assert mine.connector.match(keys).result(60) == 0
    assert mine.load(new_keys(1) + keys[:1], [0, 1], stored).outcomes == [MISSING, OK]
    assert mine.load(keys, [2, 3]).outcomes == [MISSING] * 2
    assert (mine.rows[[0, 2, 3]] == 7).all()


def test_tickets_that_make_no_sense(owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    good = owner.store(keys, [0, 1])
    broken = [b"", b"?", b"{}" * 50, good.ticket[:-1], good.ticket + b"\0", b"x" + good.ticket[1:]]
    assert mine.load(keys, [0, 1], *(Stored(ticket, 0) for ticket in broken)).outcomes == [MISSING] * 2
    strange_address = bytearray(good.ticket)
    strange_address[24:32] = (1 << 40).to_bytes(8, "little")
    assert mine.load(keys, [0, 1], Stored(bytes(strange_address), 0)).outcomes == [UNAVAILABLE] * 2
    assert (mine.rows == 7).all()
    assert mine.load(keys, [0, 1], good).outcomes == [OK] * 2


def test_another_model_is_never_read(owner: Owner, reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
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
    assert owner.has_released(stored), "the lease is over"
    owner.call("fill", row=6, value=1)
    assert mine.load(keys, [0, 1, 2, 3], stored).outcomes == [OK, OK, CORRUPT, OK]
    np.testing.assert_array_equal(mine.rows[[0, 1, 3]], owner.rows[[4, 5, 7]])


def test_leases_end(owner: Owner, new_keys: Callable[[int], list[bytes]]) -> None:
    started = time.monotonic()
    long, short = owner.store(new_keys(1), [0], lease_s=600), owner.store(new_keys(1), [0], lease_s=0.5)
    assert owner.has_released(short) and time.monotonic() - started >= 0.5
    assert not owner.has_released(long, wait=0)


def test_an_instance_reads_its_own_ticket(reader: StartReader, new_keys: Callable[[int], list[bytes]]) -> None:
    mine, keys = reader(), new_keys(2)
    mine.rows[:2] = np.random.default_rng(0).integers(0, 256, (2, BLOCK_BYTES))
    result = mine.connector.store(keys, [0, 1], lease_s=60).result(60)
    assert result.held is not None and not result.held.done()
    assert mine.load(keys, [4, 5], Stored(result.ticket, 0)).leading == 2
    np.testing.assert_array_equal(mine.rows[4:6], mine.rows[:2])
    result.held.result(60)
    assert mine.connector.stats().bytes == {"store": 0, "load": 2 * BLOCK_BYTES}


def test_a_killed_peer_is_unavailable_and_its_successor_works_at_once(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    never_met, met, successor = owners(3)
    mine, keys = reader("nixl://?timeout=300"), new_keys(8)
    lost = never_met.store(keys[:2], [0, 1])
    first, second = met.store(keys[2:4], [0, 1]), met.store(keys[4:6], [2, 3])
    assert mine.load(keys[2:4], [0, 1], first).leading == 2
    never_met.kill()
    met.kill()
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
def test_a_peer_killed_while_it_is_read(
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
    meanwhile(mine, monkeypatch, at=9, do=owner.kill)
    outcomes = mine.load(keys, range(15, -1, -1), stored).outcomes
    arrived = outcomes.index(UNAVAILABLE)
    assert 7 <= arrived <= 9 and outcomes == [OK] * arrived + [UNAVAILABLE] * (16 - arrived)
    np.testing.assert_array_equal(mine.rows[::-1][:arrived], owner.rows[:arrived])


def test_a_lease_that_ends_while_its_rows_are_read(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    [owner] = owners(blocks=8)
    mine, keys = reader("nixl://?piece=1&timeout=20"), new_keys(8)
    stored = owner.store(keys, range(8), lease_s=1.0)

    def reuse() -> None:
        assert owner.has_released(stored), "its end does not wait for the reader"
        for row in (5, 6):
            owner.call("fill", row=row, value=1)

    meanwhile(mine, monkeypatch, at=4, do=reuse)
    assert mine.load(keys, range(8), stored).outcomes == [OK] * 5 + [CORRUPT] * 2 + [OK]
    np.testing.assert_array_equal(mine.rows[[0, 1, 2, 3, 4, 7]], owner.rows[[0, 1, 2, 3, 4, 7]])


def test_a_stopped_peer_costs_the_time_out_and_writes_nothing_later(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]], only_tcp: str
) -> None:
    stopped, other = owners(2, block_bytes=1 << 20, blocks=16)
    mine, keys = reader("nixl://?timeout=2&piece=2MiB", layout=make_layout(1 << 20), blocks=16), new_keys(17)
    assert mine.load(keys[:1], [0], stopped.store(keys[:1], [0])).leading == 1
    stored, instead = stopped.store(keys[1:], range(16)), other.store(keys[1:], range(16))
    stopped.signal(signal.SIGSTOP)
    mine.rows[:] = 7
    started = time.monotonic()
    assert mine.load(keys[1:], range(16), stored).outcomes == [UNAVAILABLE] * 16
    assert time.monotonic() - started > 1.7
    mine.connector.timeout = 300
    outcomes = mine.load(keys[1:], range(16), stored).outcomes
    assert outcomes == [UNAVAILABLE] * 16, "at once: its earlier read is not over"

    # Somebody else's bytes are in the rows now, and stay there whatever the peer still sends.
    assert mine.load(keys[1:], range(16), stored, instead).leading == 16
    stopped.signal(signal.SIGCONT)
    give_up = time.monotonic() + 60
    while mine.load(keys[1:2], [0], stored).outcomes != [OK]:
        np.testing.assert_array_equal(mine.rows[1:], other.rows[1:])
        assert time.monotonic() < give_up, "the peer is back, but is not read"
        time.sleep(0.05)
    np.testing.assert_array_equal(mine.rows[1:], other.rows[1:])
    np.testing.assert_array_equal(mine.rows[0], stopped.rows[0])


def test_a_peer_that_was_never_there_in_time(
    owners: StartOwners, reader: StartReader, new_keys: Callable[[int], list[bytes]]
) -> None:
    [owner] = owners(blocks=4)
    mine, keys = reader("nixl://?timeout=0.5"), new_keys(1)
    stored = owner.store(keys, [0])
    owner.signal(signal.SIGSTOP)
    assert mine.load(keys, [0], stored).outcomes in ([UNAVAILABLE], [OK])  # shared memory does without the peer
    mine.connector.close()  # with a read that is not over
    owner.signal(signal.SIGCONT)


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
    monkeypatch.setattr(nixl_leases, "_LINGER_S", 0.05)
    mine = reader()
    assert mine.connector._agent is not None
    calls: list[float] = []
    poll = mine.connector._agent.poll

    def counted() -> list[bytes]:
        calls.append(time.monotonic())
        return poll()

    monkeypatch.setattr(mine.connector._agent, "poll", counted)
    time.sleep(0.1)
    assert not calls
    mine.connector.store(new_keys(1), [0], lease_s=0.2).result(60)
    time.sleep(0.6)
    give_up, count = time.monotonic() + 60, -1
    while count != len(calls):  # until it rests
        count = len(calls)
        assert time.monotonic() < give_up, "it polls for ever"
        time.sleep(0.2)
    assert count > 2


def test_devices_that_are_not_there(installed: None) -> None:
    with pytest.raises(SetupError, match="NIXL cannot start with the network devices 'nosuch'"):
        Reader("nixl://?devices=nosuch")


def test_devices_come_from_the_url_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert NixlConnector("nixl://")._devices == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert NixlConnector("nixl://")._devices == "eth7"
    assert NixlConnector("nixl://?devices=mlx5_0:1")._devices == "mlx5_0:1"


def test_without_nixl_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(SetupError, match=r"pip install 'pdserve\[nixl\]'"):
        Reader()


@pytest.mark.parametrize("url", ["nixl://host", "nixl://host:1/", "nixl:///path", "nixl://?device=lo"])
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(SetupError):
        NixlConnector(url)


def test_tickets_survive_packing_and_nothing_else_does() -> None:
    owner = PeerPool(b"name", bytes(range(40)), 4096, BLOCK_BYTES, 9)
    entries = [(os.urandom(16), row, os.urandom(HEADER_BYTES)) for row in (8, 0)]
    raw = pack_ticket(owner, 3, 60.0, [ENTRY.pack(*entry) for entry in entries])
    ticket = unpack_ticket(raw)
    assert (ticket.owner, ticket.lease_id, ticket.entries, ticket.unread) == (owner, 3, entries, 0b11)
    for end in range(len(raw)):
        with pytest.raises(ValueError):
            unpack_ticket(raw[:end])
    outside = pack_ticket(owner, 3, 60.0, [ENTRY.pack(entries[0][0], 9, entries[0][2])])
    with pytest.raises(ValueError, match="row"):
        unpack_ticket(outside)
