"""`nixl://?devices=lo&timeout=5&threads=2&bounce=4MiB`: decode reads prefill's pool itself, with no store in between.

    prefill                                              decode
    store: hash the rows, lease them, answer with a
    ticket (how to reach this pool, and per block its
    key, row and header)                       ─────►    load: find the keys in the tickets
    poll NIXL while leases are out             ◄─────    read the rows, a few MiB at a time, into a bounce buffer
                                                         check each against its header, copy it to its row
    `Result.held` is done: the rows are free   ◄─────    notify: these blocks of this lease have been read

NIXL (`pip install 'pdserve[nixl]'`) moves the bytes over UCX: RDMA, or shared memory and TCP without it. What holds:

- **The fence is the checksum.** A lease that ends while its rows are read, or a peer that was restarted, may have put other
  bytes there. The ticket says what the bytes must be, and a load checks what arrived, in memory that nobody else writes
  to. A row that was reused meanwhile does not fit, and is reported as corrupt.
- **An abandoned read still writes.** When a peer is stopped, neither releasing the transfer nor removing the peer keeps NIXL
  from writing the bytes once the peer goes on (tried over TCP: all of them came). So reads never go to the pool. They go
  to a bounce buffer, and a buffer with a read that is not over is put aside until it is. It has two halves: while one is
  read into, the other is checked and copied by a second thread.
- **A name is an epoch.** Each attach makes an agent with a name of its own. A restarted peer is another peer, and
  nothing of the old one is mistaken for it.
- **Nobody spins.** NIXL's progress thread would take a core per process. Instead a thread polls while leases are out, often
  at first and then less; an instance without leases does nothing.
- **A peer that does not answer** costs a load its time-out, and while a read from it is not over, further loads from it
  fail at once. A peer that has died is noticed within milliseconds.

There is no store to ask, so `match` finds nothing, and a block lives as long as its lease. `release` on the reading side
ends the leases of blocks that it knows of and does not want any more.

UCX listens on a TCP port of its own choice, on the address of each device that it may use; whoever can reach it and knows
a ticket can read and write the pool. Default is the loopback device, which serves instances on one machine. For several hosts
name the devices, as `UCX_NET_DEVICES` or here, which comes first: `devices=eth0`, `devices=mlx5_0:1`, `devices=all`.
"""

import importlib
import itertools
import os
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.threaded import MAX_LEASE_S, BatchedConnector, Expired, Incoming, Outgoing, _Operation
from pdserve.kv_transfer.url import Query, split, without_password

_BOUNCE_BYTES: Final = 4 << 20  # per read; each worker has two under way
_MAX_PEERS: Final = 256  # the one unused for longest makes room
_LINGER_S: Final = 5.0  # polling goes on for this long after the last lease, for reads that began before its end

# How often to poll, by seconds since the last lease or message: readers come soon, or late, or never.
_POLL_EVERY: Final = ((0.05, 0.0005), (1.0, 0.002), (float("inf"), 0.01))


class NixlFault(OSError):
    """NIXL could not do it."""


class NixlConnector(BatchedConnector):
    scheme: ClassVar[str] = "nixl"
    in_place: ClassVar[bool] = True

    def configure(self, query: Query) -> None:
        self._devices = query.text("devices", os.environ.get("UCX_NET_DEVICES", "lo"))
        self._bounce_bytes = query.size("bounce", _BOUNCE_BYTES)
        parts = split(self.url)
        if parts.netloc or parts.path.strip("/"):
            raise SetupError(
                f"{without_password(self.url)!r} names an address, but peers find each other through the router; "
                "write nixl:// and, after a question mark, parameters."
            )
        self._agent: _Agent | None = None
        self._leases = _Leases()

    def open(self) -> None:
        rows, block_bytes = self.memory.rows, self.memory.layout.block_bytes
        agent = _Agent(self._devices)
        try:
            agent.register(rows)
            self._introduction = _Introduction(
                agent.name.encode(), agent.metadata(), rows.ctypes.data, block_bytes, len(rows)
            )
        except NixlFault as fault:
            agent.close()
            raise SetupError(f"NIXL cannot register the pool's {rows.nbytes >> 20} MiB: {fault}.") from None
        self._agent = agent
        self._reader = _Reader(agent, block_bytes, self._bounce_bytes, self.timeout)
        self._tickets = _Tickets()
        self._leases.start(agent)

    def shut(self) -> None:
        self._leases.stop()
        self._reader.close()
        if self._agent is not None:
            self._agent.close()

    def close(self) -> None:
        super().close()
        self._leases.stop()  # also where a worker hangs and `shut` was not called

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self._check(keys, block_ids)
        operation = _Operation("store", len(keys), self.timeout, lambda done: self._grant(done, blocks, ids, lease_s))
        ids = list(block_ids)
        blocks = self._blocks(_Sealed, operation, list(zip(keys, ids, strict=True)))
        return self._submit(operation, lambda: self.put_many(blocks, lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self._check(keys, block_ids)
        operation = _Operation("load", len(keys), self.timeout, self._finish_transfer)
        blocks = self._blocks(_Wanted, operation, list(zip(keys, block_ids, strict=True)))
        given = list(tickets)
        return self._submit(operation, lambda: self._find_and_get(blocks, given))

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            assert isinstance(block, _Sealed)
            block.seal()

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        """Reads the blocks whose place is known, peer by peer."""
        by_peer: dict[bytes, list[_Wanted]] = {}
        for block in blocks:
            assert isinstance(block, _Wanted)
            if block.place is None:
                block.missing()
            elif not block.is_ours:
                block.corrupt()
            else:
                by_peer.setdefault(block.place.ticket.owner.name, []).append(block)
        try:
            for wanted in by_peer.values():
                self._get_from(wanted[0].owner, wanted)
        finally:
            self._tell_owners(self._tickets.mark_read(blocks))

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return ()

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Nothing to put right: the owner leases what it has, and its next store has a new ticket."""

    def release_many(self, keys: Sequence[bytes]) -> None:
        self._tell_owners(self._tickets.give_up(keys))

    def _grant(
        self, done: _Operation[Result], blocks: "Sequence[_Sealed]", ids: Sequence[int], lease_s: float
    ) -> Result:
        """Called once, when the rows are hashed or the time is over: leases what went well."""
        result = self._finish_transfer(done)
        entries = [
            _ENTRY.pack(block.key, row, block.header)
            for block, row, outcome in zip(blocks, ids, result.outcomes, strict=True)
            if outcome is Outcome.OK
        ]
        if not entries:
            return result
        lease_s = min(lease_s, MAX_LEASE_S)
        lease, held = self._leases.grant(len(entries), lease_s)
        return replace(result, ticket=_pack_ticket(self._introduction, lease, lease_s, entries), held=held)

    def _find_and_get(self, blocks: "Sequence[_Wanted]", tickets: Sequence[bytes]) -> None:
        places, strange = self._tickets.places(tickets)
        if strange:
            self._complaints.add(f"{strange} tickets cannot be read", kind="tickets")
        for block in blocks:
            block.place = places.get(block.key)
        self.get_many(blocks)

    def _get_from(self, owner: "_Introduction", wanted: "Sequence[_Wanted]") -> None:
        if owner.name == self._introduction.name:
            for block in wanted:
                block.take(self.memory.rows[block.row])
            return
        try:
            self._reader.read(owner, wanted)
        except NixlFault as fault:
            self._complaints.add(f"a peer cannot be read: {fault}", kind=type(fault).__name__)

    def _tell_owners(self, news: "Iterable[tuple[_Ticket, int]]") -> None:
        """Best effort: where it fails, the lease ends in its own time."""
        for ticket, bits in news:
            message = _pack_message(ticket.lease, bits)
            if ticket.owner.name == self._introduction.name:
                self._leases.note(message)
                continue
            with suppress(NixlFault):
                self._reader.tell(ticket.owner, message)
        with suppress(NixlFault):
            self._leases.listen()  # which also sends what is still to be sent


class _Sealed(Outgoing):
    """A row whose header goes into a ticket."""

    __slots__ = ("header",)

    header: bytes

    def seal(self) -> None:
        self.header, _ = self.read()
        self.present()  # no bytes were moved


class _Wanted(Incoming):
    """A block to be read from a peer."""

    __slots__ = ("place",)

    place: "_Place | None"

    @property
    def is_ours(self) -> bool:
        """Whether what lies there is said to be this block, of our layout. Else it is not read at all."""
        assert self.place is not None
        owner = self.place.ticket.owner
        return self._seal.fits(self.place.header, self.key) and owner.block_bytes == self._seal.block_bytes

    @property
    def owner(self) -> "_Introduction":
        assert self.place is not None
        return self.place.ticket.owner

    @property
    def row(self) -> int:
        assert self.place is not None
        return self.place.row

    @property
    def deadline(self) -> float:
        return self._operation.deadline

    def take(self, arrived: Row) -> None:
        assert self.place is not None
        self.accept(self.place.header, arrived)


# Tickets.

# Magic, lease, its seconds, base, block bytes, rows, entries, lengths of name and metadata; these two; the entries.
_TICKET: Final = struct.Struct("<8sQdQQIIHH")
_TICKET_MAGIC: Final = b"pdserveT"
_ENTRY: Final = struct.Struct("<16sI64s")  # key, row, header
_MESSAGE: Final = struct.Struct("<8sQ")  # magic, lease; then one bit per entry of the ticket
_MESSAGE_MAGIC: Final = b"pdserveR"


@dataclass(frozen=True)
class _Introduction:
    """All that a peer must know of a pool to read it."""

    name: bytes
    metadata: bytes
    base: int
    block_bytes: int
    rows: int


@dataclass(eq=False)
class _Ticket:
    """One lease, as the reading side sees it. `unread` has one bit per entry that the owner still holds for us."""

    owner: _Introduction
    lease: int
    ends: float
    entries: list[tuple[bytes, int, bytes]]
    unread: int


@dataclass(frozen=True)
class _Place:
    """Where a block is: an entry of a ticket."""

    ticket: _Ticket
    index: int

    @property
    def row(self) -> int:
        return self.ticket.entries[self.index][1]

    @property
    def header(self) -> bytes:
        return self.ticket.entries[self.index][2]


def _pack_ticket(owner: _Introduction, lease: int, lease_s: float, entries: Sequence[bytes]) -> bytes:
    sizes = (owner.rows, len(entries), len(owner.name), len(owner.metadata))
    front = _TICKET.pack(_TICKET_MAGIC, lease, lease_s, owner.base, owner.block_bytes, *sizes)
    return b"".join((front, owner.name, owner.metadata, *entries))


def _unpack_ticket(raw: bytes) -> _Ticket:
    """Raises ValueError for what is no ticket of ours."""
    if len(raw) < _TICKET.size:
        raise ValueError("too short")
    magic, lease, lease_s, base, block_bytes, rows, count, name, metadata = _TICKET.unpack_from(raw)
    start = _TICKET.size + name + metadata
    if magic != _TICKET_MAGIC or len(raw) != start + count * _ENTRY.size:
        raise ValueError("not a ticket")
    owner = _Introduction(
        raw[_TICKET.size : _TICKET.size + name], raw[start - metadata : start], base, block_bytes, rows
    )
    entries = list(_ENTRY.iter_unpack(memoryview(raw)[start:]))
    if any(row >= rows for _, row, _ in entries):
        raise ValueError("a row outside of the pool")
    return _Ticket(owner, lease, time.monotonic() + min(lease_s, MAX_LEASE_S), entries, (1 << count) - 1)


def _pack_message(lease: int, bits: int) -> bytes:
    return _MESSAGE.pack(_MESSAGE_MAGIC, lease) + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


class _Tickets:
    """The tickets that this instance has been given, until they are released or their leases are over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[bytes, _Ticket] = {}

    def places(self, given: Sequence[bytes]) -> tuple[dict[bytes, _Place], int]:
        """Where the blocks are, by key, the newest ticket first; and how many tickets cannot be read."""
        places: dict[bytes, _Place] = {}
        strange = 0
        with self._lock:
            self._forget_ended()
            for raw in reversed(given):
                try:
                    ticket = self._known.get(raw) or _unpack_ticket(raw)
                except ValueError:
                    strange += 1
                    continue
                self._known[raw] = ticket
                for index, (key, _, _) in enumerate(ticket.entries):
                    places.setdefault(key, _Place(ticket, index))
        return places, strange

    def mark_read(self, blocks: Sequence[Incoming]) -> list[tuple[_Ticket, int]]:
        """What to tell the owners after a load, whatever its outcome: nobody will ask for these blocks again."""
        bits: dict[_Ticket, int] = {}
        for block in blocks:
            assert isinstance(block, _Wanted)
            if block.place is not None:
                bits[block.place.ticket] = bits.get(block.place.ticket, 0) | 1 << block.place.index
        with self._lock:
            for ticket, read in bits.items():
                ticket.unread &= ~read
        return list(bits.items())

    def give_up(self, keys: Sequence[bytes]) -> list[tuple[_Ticket, int]]:
        """Forgets the tickets with any of these keys, and returns what they still hold."""
        unwanted = set(keys)
        with self._lock:
            self._forget_ended()
            over = {raw: t for raw, t in self._known.items() if any(key in unwanted for key, _, _ in t.entries)}
            for raw in over:
                del self._known[raw]
        return [(ticket, ticket.unread) for ticket in over.values() if ticket.unread]

    def _forget_ended(self) -> None:
        now = time.monotonic()
        for raw in [raw for raw, ticket in self._known.items() if ticket.ends <= now]:
            del self._known[raw]


# The owner's side.


@dataclass
class _Lease:
    unread: int
    ends: float
    held: Future[None] = field(default_factory=Future)


class _Leases:
    """What peers may read here, and the thread that listens for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._active = 0.0  # when the last lease was granted, or the last message came
        self._linger_until = 0.0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, agent: "_Agent") -> None:
        self._agent = agent
        self._thread = threading.Thread(target=self._poll, name="kv-nixl-leases", daemon=True)
        self._thread.start()

    def grant(self, blocks: int, lease_s: float) -> tuple[int, Future[None]]:
        now = time.monotonic()
        lease = _Lease((1 << blocks) - 1, now + lease_s)
        lease.held.set_running_or_notify_cancel()
        with self._changed:
            number = next(self._numbers)
            self._active = now
            stopped = self._stopped
            if not stopped:
                self._leases[number] = lease
                self._changed.notify()
        if stopped:
            lease.held.set_result(None)
        return number, lease.held

    def note(self, message: bytes) -> None:
        """A reader has read blocks, or does not want them any more."""
        if len(message) < _MESSAGE.size:
            return
        magic, number = _MESSAGE.unpack_from(message)
        read = int.from_bytes(message[_MESSAGE.size :], "little")
        with self._changed:
            lease = self._leases.get(number) if magic == _MESSAGE_MAGIC else None
            if lease is None:
                return
            self._active = time.monotonic()
            lease.unread &= ~read
            if lease.unread:
                return
            self._end(number)
        lease.held.set_result(None)

    def stop(self) -> None:
        """Ends all leases."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)  # not for ever, should NIXL hang
        self._expire(float("inf"))

    def listen(self) -> None:
        """Lets NIXL work for peers, and takes note of what they say."""
        for message in self._agent.progress():
            self.note(message)

    def _poll(self) -> None:
        while (pause := self._next_pause()) is not None:
            with suppress(NixlFault):  # a reader died while it was connected
                self.listen()
            self._expire(time.monotonic())
            time.sleep(pause)

    def _next_pause(self) -> float | None:
        """Waits until there is something to listen for. None: stop."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if self._leases or now < self._linger_until:
                    return next(pause for age, pause in _POLL_EVERY if now - self._active <= age)
                self._changed.wait()
        return None

    def _expire(self, now: float) -> None:
        with self._changed:
            over = [number for number, lease in self._leases.items() if lease.ends <= now]
            ended = [self._leases[number] for number in over]
            for number in over:
                self._end(number)
        for lease in ended:
            lease.held.set_result(None)

    def _end(self, number: int) -> None:
        del self._leases[number]
        self._linger_until = time.monotonic() + _LINGER_S


# The reader's side.


class _Bounce:
    """Registered memory for two reads of up to `piece` blocks each."""

    def __init__(self, agent: "_Agent", block_bytes: int, piece_bytes: int) -> None:
        self.piece = max(1, piece_bytes // block_bytes)
        self.rows: Row = np.empty((2 * self.piece, block_bytes), np.uint8)
        self.registration = agent.register(self.rows)
        self.targets = agent.prepare("", self.rows.ctypes.data, block_bytes, len(self.rows))
        self.checker = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl-check")


@dataclass
class _Peer:
    sources: Any  # prepared descriptors of all its rows
    users: int = 0  # reads that need them
    failed: bool = False  # to be forgotten when nobody needs it


@dataclass
class _Piece:
    """One read under way."""

    blocks: Sequence[_Wanted]
    first: int  # row of the bounce buffer
    transfer: Any
    over: bool = False
    check: Future[None] | None = None  # on another thread


@dataclass
class _Aside:
    """A bounce buffer that NIXL may still write to."""

    peer: bytes
    bounce: _Bounce
    transfers: list[Any]
    not_before: float


class _Reader:
    """Reads rows of other pools. Used by several workers at a time."""

    def __init__(self, agent: "_Agent", block_bytes: int, bounce_bytes: int, timeout: float) -> None:
        self._agent = agent
        self._block_bytes = block_bytes
        self._bounce_bytes = bounce_bytes
        self._settle_s = timeout
        self._margin_s = timeout / 10  # for putting a buffer aside before the load is answered
        self._lock = threading.RLock()
        self._peers: dict[bytes, _Peer] = {}  # the most recently used last
        self._free: list[_Bounce] = []
        self._aside: list[_Aside] = []

    def read(self, owner: _Introduction, blocks: Sequence[_Wanted]) -> None:
        """Reads blocks of one peer, two pieces at a time, so that one travels while the other is checked.

        Raises:
            NixlFault: the peer is dead, or did not answer in time.
        """
        if owner.name in self._collect():
            raise _TooLate("it did not answer an earlier read, which is still not over")
        bounce, peer = self._borrow(), None
        flying: deque[_Piece] = deque()
        failed = True
        try:
            peer = self._meet(owner)
            self._read(peer, bounce, blocks, flying)
            failed = False
        except (_TooLate, Expired):
            failed = False
            raise
        finally:
            self._give_back(owner.name, bounce, flying, failed)
            if peer is not None:
                self._part(owner.name, peer, failed)

    def tell(self, owner: _Introduction, message: bytes) -> None:
        """Sends a message to a peer that was read from and did not die."""
        if owner.name in self._peers:
            self._agent.send(owner.name.decode(), message)

    def close(self) -> None:
        """No other method is running."""
        for aside in self._aside:
            for transfer in aside.transfers:
                self._agent.release(transfer)  # the buffer outlives the agent, and with it the read
            aside.transfers.clear()
        for bounce in self._free + [aside.bounce for aside in self._aside]:
            self._forget(bounce)
        for name, peer in self._peers.items():
            self._agent.remove(name.decode(), peer.sources)
        self._peers.clear()

    def _meet(self, owner: _Introduction) -> _Peer:
        with self._lock:
            peer = self._peers.pop(owner.name, None) or self._add(owner)
            self._peers[owner.name] = peer
            if peer.failed:
                raise NixlFault("it has failed just now")
            peer.users += 1
            return peer

    def _add(self, owner: _Introduction) -> _Peer:
        unused = [name for name, peer in self._peers.items() if not peer.users]
        for name in unused[: max(0, len(self._peers) - _MAX_PEERS + 1)]:
            self._agent.remove(name.decode(), self._peers.pop(name).sources)
        self._agent.add(owner.metadata)
        try:
            return _Peer(self._agent.prepare(owner.name.decode(), owner.base, owner.block_bytes, owner.rows))
        except NixlFault:
            self._agent.remove(owner.name.decode(), None)
            raise

    def _part(self, name: bytes, peer: _Peer, failed: bool) -> None:
        """A peer that failed is forgotten; the next ticket brings it back, if it lives."""
        with self._lock:
            peer.users -= 1
            peer.failed = peer.failed or failed
            if peer.failed and not peer.users:
                del self._peers[name]
                self._agent.remove(name.decode(), peer.sources)

    def _read(self, peer: _Peer, bounce: _Bounce, blocks: Sequence[_Wanted], flying: deque[_Piece]) -> None:
        for start in range(0, len(blocks), bounce.piece):
            if len(flying) == 2:
                self._land(bounce, flying)
            first = bounce.piece * (start // bounce.piece % 2)
            self._depart(peer, bounce, blocks[start : start + bounce.piece], first, flying)
            piece = flying[-1]
            if piece.over and start + bounce.piece < len(blocks):
                piece.check = bounce.checker.submit(self._check, bounce, piece)
        while flying:
            self._land(bounce, flying)

    def _depart(
        self, peer: _Peer, bounce: _Bounce, blocks: Sequence[_Wanted], first: int, flying: deque[_Piece]
    ) -> None:
        targets = np.arange(first, first + len(blocks), dtype=np.int32)
        sources = np.array([block.row for block in blocks], dtype=np.int32)
        transfer = self._agent.make_read(bounce.targets, targets, peer.sources, sources)
        flying.append(_Piece(blocks, first, transfer))
        flying[-1].over = self._agent.begin(transfer)

    def _land(self, bounce: _Bounce, flying: deque[_Piece]) -> None:
        """Waits for the oldest piece to arrive and to be checked."""
        piece = flying[0]
        pause = 0.0
        while not piece.over:
            if time.monotonic() >= piece.blocks[0].deadline - self._margin_s:
                raise _TooLate("it did not answer in time")
            time.sleep(pause)
            pause = min(pause + 20e-6, 500e-6)
            piece.over = self._agent.is_over(piece.transfer)
        if piece.check is not None:
            piece.check.result()
        else:
            self._check(bounce, piece)
        flying.popleft()
        self._agent.release(piece.transfer)

    def _check(self, bounce: _Bounce, piece: _Piece) -> None:
        """Copies what arrived to where it belongs, if it is what it should be."""
        for i, block in enumerate(piece.blocks):
            block.take(bounce.rows[piece.first + i])

    def _borrow(self) -> _Bounce:
        with self._lock:
            if self._free:
                return self._free.pop()
        return _Bounce(self._agent, self._block_bytes, self._bounce_bytes)

    def _give_back(self, peer: bytes, bounce: _Bounce, flying: Iterable[_Piece], failed: bool) -> None:
        """For others to use if nothing can write to it any more. Else it is put aside."""
        under_way = []
        for piece in flying:
            if piece.check is not None:
                piece.check.exception()  # waits: it reads the buffer
            if piece.over or self._agent.is_settled(piece.transfer):
                self._agent.release(piece.transfer)
            else:
                under_way.append(piece.transfer)
        with self._lock:
            if under_way or (failed and flying):
                self._aside.append(_Aside(peer, bounce, under_way, time.monotonic() + self._settle_s))
            else:
                self._free.append(bounce)

    def _forget(self, bounce: _Bounce) -> None:
        bounce.checker.shutdown()
        self._agent.forget(bounce.registration, bounce.targets)

    def _collect(self) -> set[bytes]:
        """Asks after the reads that were abandoned, and lets go of buffers whose last one is over.

        A read that ended with an error has been given up by NIXL, perhaps not by the network: hence the wait.

        Returns:
            The peers with reads that are not over.
        """
        with self._lock:
            for aside in list(self._aside):
                for transfer in list(aside.transfers):
                    if self._agent.is_settled(transfer):
                        aside.transfers.remove(transfer)
                        self._agent.release(transfer)
                if not aside.transfers and time.monotonic() >= aside.not_before:
                    self._aside.remove(aside)
                    self._forget(aside.bounce)
            return {aside.peer for aside in self._aside if aside.transfers}


# NIXL.


class _TooLate(NixlFault):
    """A read was not over in time. It may still go on."""


class _Failed(NixlFault):
    """A read ended with an error, mostly because the peer died."""


class _Agent:
    """A NIXL agent. NIXL's is not thread-safe; here one call runs at a time, without the interpreter's lock.

    A read through shared memory is one long copy inside of `begin`. Pieces are small, so others wait for little.
    """

    def __init__(self, devices: str) -> None:
        api, bindings = _import("nixl._api"), _import("nixl._bindings")
        self.name = f"pdserve-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._died = bindings.nixlRemoteDisconnectError
        raised = (v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))
        self._errors: tuple[type[Exception], ...] = (*raised, RuntimeError)
        self._nixl: Any = None
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            with self._calls(), _environment("UCX_NET_DEVICES", devices):
                self._nixl = api.nixl_agent(self.name, config)
        except NixlFault as fault:
            raise SetupError(f"NIXL cannot start with the network devices {devices!r}: {fault}.") from None
        if "UCX" not in self._nixl.backends:
            raise SetupError("The installed NIXL has no UCX, which nixl:// needs.")
        self._registrations: list[Any] = []

    def register(self, rows: Row) -> Any:
        with self._calls() as nixl:
            registration = nixl.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM")
            self._registrations.append(registration)
            return registration

    def forget(self, registration: Any, prepared: Any) -> None:
        with suppress(NixlFault), self._calls() as nixl:
            self._registrations.remove(registration)
            prepared.release()
            nixl.deregister_memory(registration)

    def metadata(self) -> bytes:
        with self._calls() as nixl:
            return bytes(nixl.get_agent_metadata())

    def add(self, metadata: bytes) -> None:
        with self._calls() as nixl:
            nixl.add_remote_agent(metadata)

    def remove(self, peer: str, prepared: Any) -> None:
        """Also of a peer that is dead already."""
        with suppress(NixlFault), self._calls():
            if prepared is not None:
                prepared.release()
        with suppress(NixlFault), self._calls() as nixl:
            nixl.remove_remote_agent(peer)

    def prepare(self, peer: str, base: int, block_bytes: int, count: int) -> Any:
        """Descriptors of all rows of a pool; of our own with an empty peer."""
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        rows[:, 1] = block_bytes
        with self._calls() as nixl:
            return nixl.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, "DRAM")

    def make_read(self, targets: Any, to: npt.NDArray[np.int32], sources: Any, of: npt.NDArray[np.int32]) -> Any:
        with self._calls() as nixl:
            return nixl.make_prepped_xfer("READ", targets, to, sources, of)

    def begin(self, transfer: Any) -> bool:
        """Whether it is over already."""
        with self._calls() as nixl:
            return self._is_done(nixl.transfer(transfer))

    def is_over(self, transfer: Any) -> bool:
        with self._calls() as nixl:
            return self._is_done(nixl.check_xfer_state(transfer))

    def is_settled(self, transfer: Any) -> bool:
        """Whether it is over, well or not. A transfer that NIXL does not say anything about may go on."""
        try:
            return self.is_over(transfer)
        except _Failed:
            return True
        except NixlFault:
            return False

    def release(self, transfer: Any) -> None:
        """Only of what is over, or NIXL forgets what it still writes."""
        with suppress(NixlFault), self._calls():
            transfer.release()

    def send(self, peer: str, message: bytes) -> None:
        with self._calls() as nixl:
            nixl.send_notif(peer, message)

    def progress(self) -> list[bytes]:
        """Lets NIXL work for peers, and returns their messages."""
        with self._calls() as nixl:
            messages: dict[Any, list[bytes]] = nixl.get_new_notifs()
            return [message for each in messages.values() for message in each]

    def close(self) -> None:
        for registration in self._registrations:
            with suppress(NixlFault), self._calls() as nixl:
                nixl.deregister_memory(registration)
        self._registrations.clear()
        self._nixl = None

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise _Failed("the read failed")
        return state == "DONE"

    @contextmanager
    def _calls(self) -> Iterator[Any]:
        with self._lock:
            try:
                yield self._nixl
            except self._died as error:
                raise _Failed(f"it is gone ({error})") from None
            except self._errors as error:
                raise NixlFault(f"{type(error).__name__}: {error}") from None


def _import(module: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it writes to stdout what it does
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "nixl":
            raise SetupError("nixl:// needs the package NIXL: pip install 'pdserve[nixl]'.") from None
        raise SetupError(f"The installed NIXL cannot be imported: {error}.") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """UCX reads its settings from the environment, when an agent is made."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
