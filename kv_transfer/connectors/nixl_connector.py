"""`nixl://?devices=lo&timeout=5&threads=2&piece=4MiB`: decode reads prefill's pool itself, with no store in between.

    prefill                                              decode
    store: hash the rows, lease them, answer with a
    ticket (how to reach this pool, and per block its
    key, row and header)                       ─────►    load: find the keys in the tickets
    poll NIXL while leases are out             ◄─────    read the rows, a few MiB at a time
                                                         check each against its header
    `Result.held` is done: the rows are free   ◄─────    notify: these blocks of this lease have been read

NIXL (`pip install 'pdserve[nixl]'`) moves the bytes over UCX: RDMA, or shared memory and TCP without it. What holds:

- **The fence is the checksum.** A lease that ends while its rows are read, or a peer that was restarted, may have put other
  bytes there. The ticket says what the bytes must be, and a load checks what arrived, where nobody else writes. A row that
  was reused meanwhile does not fit, and is reported as corrupt.
- **An abandoned read still writes.** When a peer is stopped, neither releasing the transfer nor removing the peer keeps NIXL
  from writing the bytes once the peer goes on (tried over TCP: all of them came). So reads over a network do not go to the
  pool. They go to a bounce buffer, and a buffer with a read that is not over is put aside until it is. It has two
  halves: while one is read into, the other is checked and copied by a second thread.
- **Through shared memory the reader copies.** It does so within NIXL's call, in the calling thread, so nothing can be late,
  and rows are read into directly. A peer's first two blocks go through the bounce buffer and show which kind it is.
- **An agent does one thing at a time**, so each worker has one to read with. All but the first are made while the
  instance starts, and workers share until they are there.
- **A name is an epoch.** Each attach makes an agent with a name of its own. A restarted peer is another peer, and
  nothing of the old one is mistaken for it.
- **Nobody spins.** NIXL's progress thread would take a core per process. Instead a thread polls while leases are out, often
  at first and then less; an instance without leases does nothing.
- **A peer that does not answer** costs a load its time-out, and while a read from it is not over, further loads from it
  fail at once. A peer that has died is noticed within milliseconds.

There is no store to ask, so `match` finds nothing, and a block lives as long as its lease. `release` on the reading side
ends the leases of tickets, whether they were read or not.

UCX listens on a TCP port of its own choice, on the address of each device that it may use; whoever can reach it and knows
a ticket can read and write the pool. Default is the loopback device, which serves instances on one machine. For several hosts
name the devices, as `UCX_NET_DEVICES` or here, which comes first: `devices=eth0`, `devices=mlx5_0:1`, `devices=all`.
"""

import os
import threading
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import ClassVar, Final

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.connectors.nixl_agent import Agent, NixlFault, TooLate
from pdserve.kv_transfer.connectors.nixl_leases import Leases
from pdserve.kv_transfer.connectors.nixl_reader import Reader, Wanted
from pdserve.kv_transfer.connectors.nixl_tickets import (
    ENTRY,
    Introduction,
    Place,
    Ticket,
    Tickets,
    pack_message,
    pack_ticket,
)
from pdserve.kv_transfer.operation import Operation
from pdserve.kv_transfer.threaded import MAX_LEASE_S, BatchedConnector
from pdserve.kv_transfer.url import Query, split, without_password

_PIECE_BYTES: Final = 4 << 20  # of one read


class NixlConnector(BatchedConnector):
    scheme: ClassVar[str] = "nixl"
    in_place: ClassVar[bool] = True

    def configure(self, query: Query) -> None:
        self._devices = query.text("devices", os.environ.get("UCX_NET_DEVICES", "lo"))
        self._piece_bytes = query.size("piece", _PIECE_BYTES)
        parts = split(self.url)
        if parts.netloc or parts.path.strip("/"):
            raise SetupError(
                f"{without_password(self.url)!r} names an address, but peers find each other through the router; "
                "write nixl:// and, after a question mark, parameters."
            )
        self._agent: Agent | None = None
        self._leases = Leases()

    def open(self) -> None:
        rows, block_bytes = self.memory.rows, self.memory.layout.block_bytes
        agent = Agent(self._devices)
        try:
            agent.register(rows)
            self._introduction = Introduction(
                agent.name.encode(), agent.metadata(), rows.ctypes.data, block_bytes, len(rows)
            )
        except NixlFault as fault:
            agent.close()
            raise SetupError(f"NIXL cannot register the pool's {rows.nbytes >> 20} MiB: {fault}.") from None
        self._agent = agent
        self._readers = [Reader(agent, rows, self._piece_bytes, self.timeout)]
        self._numbers = threading.local()  # of workers: `reader`
        self._next_number = count()
        self._opening = threading.Thread(target=self._open_more_readers, name="kv-nixl-open", daemon=True)
        self._opening.start()  # an agent takes half a second
        self._tickets = Tickets()
        self._leases.start(agent)

    def shut(self) -> None:
        self._leases.stop()
        self._opening.join()
        while self._readers:
            self._readers.pop().close()  # an agent ends with the last thing that knows it

    def close(self) -> None:
        super().close()
        self._leases.stop()  # also where a worker hangs and `shut` was not called

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.memory.check(keys, block_ids)
        deadline = self._deadline(len(keys))
        operation = Operation("store", len(keys), deadline, lambda done: self._grant(done, blocks, ids, lease_s))
        ids = list(block_ids)
        blocks = self._blocks(_Sealed, operation, list(zip(keys, ids, strict=True)))
        return self._submit(operation, lambda: self.put_many(blocks, lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self.memory.check(keys, block_ids)
        operation = Operation("load", len(keys), self._deadline(len(keys)), self._finish_transfer)
        blocks = self._blocks(Wanted, operation, list(zip(keys, block_ids, strict=True)))
        for block, row in zip(blocks, block_ids, strict=True):
            block.to = row
        given = list(tickets)
        return self._submit(operation, lambda: self._find_and_get(blocks, given))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[None] = Operation("release", 0, self._deadline(0), lambda _: None)
        given = list(tickets)
        self._submit(operation, lambda: self._tell_owners(self._tickets.give_up(given)))

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            assert isinstance(block, _Sealed)
            block.seal()

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        """Reads the blocks whose place is known, peer by peer."""
        by_peer: dict[bytes, list[Wanted]] = {}
        places: list[Place] = []
        for block in blocks:
            assert isinstance(block, Wanted)
            if block.place is None:
                block.missing()
                continue
            places.append(block.place)
            if not block.is_ours:
                block.corrupt()
            else:
                by_peer.setdefault(block.owner.name, []).append(block)
        try:
            late = {peer for reader in self._readers for peer in reader.collect()}
            for wanted in by_peer.values():
                self._get_from(wanted[0].owner, wanted, late)
        finally:
            self._tell_owners(self._tickets.mark_read(places))

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return ()

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Nothing to put right: the owner leases what it has, and its next store has a new ticket."""

    def _open_more_readers(self) -> None:
        """One for each worker: an agent does one thing at a time, and copies through shared memory with its caller."""
        for _ in range(self.threads - 1):
            try:
                agent = Agent(self._devices)
                agent.register(self.memory.rows)
            except (SetupError, NixlFault) as error:
                self._complaints.add(f"workers share agents: {error}")
                return
            self._readers.append(Reader(agent, self.memory.rows, self._piece_bytes, self.timeout))

    def _reader(self) -> Reader:
        try:
            number: int = self._numbers.mine
        except AttributeError:  # this worker's first read
            number = self._numbers.mine = next(self._next_number)
        return self._readers[number % len(self._readers)]

    def _grant(
        self, done: Operation[Result], blocks: "Sequence[_Sealed]", ids: Sequence[int], lease_s: float
    ) -> Result:
        """Called once, when the rows are hashed or the time is over: leases what went well."""
        result = self._finish_transfer(done)
        entries = [
            ENTRY.pack(block.key, row, block.header)
            for block, row, outcome in zip(blocks, ids, result.outcomes, strict=True)
            if outcome is Outcome.OK
        ]
        if not entries:
            return result
        lease_s = min(lease_s, MAX_LEASE_S)
        lease, held = self._leases.grant(len(entries), lease_s)
        return replace(result, ticket=pack_ticket(self._introduction, lease, lease_s, entries), held=held)

    def _find_and_get(self, blocks: Sequence[Wanted], tickets: Sequence[bytes]) -> None:
        places, strange = self._tickets.places(tickets)
        if strange:
            self._complaints.add(f"{strange} tickets cannot be read", kind="tickets")
        for block in blocks:
            block.place = places.get(block.key)
        self.get_many(blocks)

    def _get_from(self, owner: Introduction, wanted: Sequence[Wanted], late: Container[bytes]) -> None:
        if owner.name == self._introduction.name:
            for block in wanted:
                block.take(self.memory.rows[block.row])
            return
        try:
            if owner.name in late:
                raise TooLate("it did not answer an earlier read, which is still not over")
            self._reader().read(owner, wanted)
        except NixlFault as fault:
            self._complaints.add(f"a peer cannot be read: {fault}", kind=type(fault).__name__)

    def _tell_owners(self, news: Iterable[tuple[Ticket, int]]) -> None:
        """Best effort: where it fails, the lease ends in its own time."""
        for ticket, bits in news:
            message = pack_message(ticket.lease, bits)
            if ticket.owner.name == self._introduction.name:
                self._leases.note(message)
                continue
            with suppress(NixlFault):
                if self._readers[0].tell(ticket.owner, message):
                    self._leases.linger()
        with suppress(NixlFault):
            self._leases.listen()  # which also sends what is still to be sent


class _Sealed(Outgoing):
    """A row whose header goes into a ticket."""

    __slots__ = ("header",)

    header: bytes

    def seal(self) -> None:
        self.header, _ = self.read()
        self.present()  # no bytes were moved
