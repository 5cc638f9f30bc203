"""`nixl://?devices=lo&timeout=5&threads=2&piece=4MiB`: decode reads prefill's pool directly, without a store in between.

    prefill                                              decode
    store: hash the rows, lease them, and return a
    ticket (how to reach this pool, and for each
    block its key, row and header)             ─────►    load: find the keys in the tickets
    poll NIXL while leases are outstanding     ◄─────    read the rows, `piece` bytes at a time
                                                         verify each block against its header
    `Result.held` is done: rows are free       ◄─────    notify: these blocks of this lease were read

NIXL (the extra `nixl`) transfers the bytes over UCX: RDMA, or shared memory and TCP where there is none.
Guarantees and design:

- **The checksum is the fence.** If a lease ends while its rows are being read, or the peer was restarted, the rows may hold
  other data. The ticket contains each block's checksum, and a load verifies the bytes after they arrived, in memory that no
  peer writes to. A row that was reused meanwhile does not match and is reported as corrupt.
- **An abandoned read still writes.** If a peer is stopped, neither releasing the transfer nor removing the peer prevents NIXL
  from writing the bytes once the peer resumes (tested over TCP: all of them arrived). So reads over a network go to a bounce
  buffer, not to the pool, and a buffer with an unfinished read is quarantined until the read ends. A buffer has two halves:
  while one is being filled, a second thread verifies and copies the other.
- **Through shared memory the reader copies.** The copy runs inside the NIXL call in the calling thread, so nothing can arrive
  late, and blocks are read directly into the pool. The first two blocks of a peer go through a bounce buffer and show which
  kind of transport it is.
- **One agent per worker.** An agent does one thing at a time, so each worker thread has its own. All but the first are
  created in the background after start; until then, workers share.
- **The agent name is the epoch.** Each attach creates an agent with a new name. A restarted peer is a different peer, and
  nothing of the old one is attributed to it.
- **No busy polling.** NIXL's progress thread would use one core per process. Instead, a thread polls while leases are
  outstanding, often at first and less often later; an instance without leases does not poll.
- **Unresponsive peers.** A stopped peer costs a load its timeout, and while a read from it is unfinished, further loads from
  it fail at once. A dead peer is detected within milliseconds.

Without a shared store, `match` always returns 0, and a block lives as long as its lease. `release` on the reading side ends
the leases of the given tickets, read or not; `prolong` asks the owners to prolong them.

A pool in a GPU's memory is registered as such, and its checksums are computed on the GPU. Peers with memory of the other
kind are not read.

Peers are read, and never write. Of a read, this side has a handle that says when the last byte has come; of a write by a peer
that stops half-way, nothing does, so that its memory could never be used again. UCX is told to read over cuda_ipc without
NVLink, too.

UCX listens on a TCP port of its own choice, on the address of each device it may use; any host that can reach the port and
has a ticket can read and write the pool. The default is the loopback device, which serves instances on one machine. For
several hosts name the devices, by `UCX_NET_DEVICES` or by the URL, which takes precedence: `devices=eth0`,
`devices=mlx5_0:1`, `devices=all`.
"""

import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, Final, cast

from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import MAX_LEASE_S, BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Operation, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome, Result
from pdserve.kv_transfer.connectors.nixl.agent import Agent, NixlError, ReadTimeout
from pdserve.kv_transfer.connectors.nixl.leases import Leases
from pdserve.kv_transfer.connectors.nixl.memory import HostMemory, Memory, groups
from pdserve.kv_transfer.connectors.nixl.reader import PeerBlock, Reader, accept_copies
from pdserve.kv_transfer.connectors.nixl.tickets import (
    ENTRY,
    PeerPool,
    ReceivedTickets,
    RemoteBlock,
    Ticket,
    pack_notification,
    pack_prolongation,
    pack_ticket,
)
from pdserve.kv_transfer.url import Query, split, without_password

_READ_BYTES: Final = 4 << 20  # per read


class NixlConnector(BatchedConnector):
    """Leases pool rows to peers on `store`, and reads peers' rows on `load`."""

    scheme: ClassVar[str] = "nixl"
    libraries: ClassVar[tuple[str, ...]] = ("nixl._api", "nixl._bindings")  # which import torch, for seconds

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, in_place=True, prolongs=True, gpu_memory=True)

    def configure(self, query: Query) -> None:
        self._devices = query.text("devices", os.environ.get("UCX_NET_DEVICES", "lo"))
        self._read_bytes = query.size("piece", _READ_BYTES)
        parts = split(self.url)
        if parts.netloc or parts.path.strip("/"):
            raise SetupError(
                f"{without_password(self.url)!r} must not contain an address: peers find each other through the router; "
                "use nixl:// followed by parameters only."
            )
        self._agent: Agent | None = None
        self._leases = Leases()

    def open(self) -> None:
        pool: Memory = self.memory.gpu or HostMemory(self.memory.rows)
        agent = Agent(self._devices, pool.kind)
        try:
            agent.register(pool)
            place = (pool.address, self.memory.layout.block_bytes, len(pool), pool.kind, pool.device)
            self._own_pool = PeerPool(agent.name.encode(), agent.metadata(), *place)
        except NixlError as error:
            agent.close()
            where = f"GPU {pool.device}" if pool.kind == "VRAM" else "host memory"
            raise SetupError(f"NIXL cannot register the pool's {pool.nbytes >> 20} MiB of {where}: {error}.") from None
        self._agent = agent
        self._pool = pool
        self._readers = [Reader(agent, pool, self._read_bytes, self.timeout)]
        self._thread_local = threading.local()  # the index of each worker's reader
        self._next_reader = count()
        self._opening = threading.Thread(target=self._open_more_readers, name="kv-nixl-open", daemon=True)
        self._opening.start()  # creating an agent takes half a second
        self._tickets = ReceivedTickets()
        self._leases.start(agent)

    def shut(self) -> None:
        self._leases.stop()
        self._opening.join()
        while self._readers:
            self._readers.pop().close()  # drop the reference: an agent is freed with its last one

    def close(self) -> None:
        super().close()
        self._leases.stop()  # also if a worker hangs and `shut` was not called

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.memory.check(keys, block_ids)
        deadline = self._deadline(len(keys))
        operation = Operation("store", keys, block_ids, deadline, lambda done: self._grant(done, blocks, lease_s))
        blocks = self._blocks(_LeasedBlock, operation)
        for block, row in zip(blocks, block_ids, strict=True):
            block.memory, block.local_row = self._pool, row
        return self._submit_after_steps(operation, lambda: self.put_many(blocks, lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self.memory.check(keys, block_ids)
        operation = Operation("load", keys, block_ids, self._deadline(len(keys)), self._finish_transfer)
        blocks = self._blocks(PeerBlock, operation)
        for block, row in zip(blocks, block_ids, strict=True):
            block.memory, block.local_row = self._pool, row
        copied = list(tickets)
        return self._submit_after_steps(operation, lambda: self._locate_and_get(blocks, copied))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[int] = Operation("release", keys, [], self._deadline(0))
        copied = list(tickets)
        self._submit(operation, lambda: self._notify_owners(self._tickets.release(copied)))

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        operation: Operation[int] = Operation("prolong", keys, [], self._deadline(0))
        copied, seconds = list(tickets), min(lease_s, MAX_LEASE_S)

        def tell_owners() -> None:
            for ticket in self._tickets.prolong(copied, seconds):
                self._tell_owner(ticket, pack_prolongation(ticket.lease_id, seconds))
            with suppress(NixlError):
                self._leases.poll()

        self._submit(operation, tell_owners)

    def _submit_after_steps(self, operation: Operation[Result], work: Callable[[], None]) -> Future[Result]:
        """Submit work on rows of the pool that steps of the model before this call may still write."""
        mark = self._pool.mark()

        def wait_and_work() -> None:
            self._pool.wait(mark)
            work()

        return self._submit(operation, wait_and_work)

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for group in groups(cast(Sequence[_LeasedBlock], blocks), self._pool):
            make_headers(group)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        """Read the blocks that were located in tickets, peer by peer."""
        by_peer: dict[bytes, list[PeerBlock]] = {}
        located: list[RemoteBlock] = []
        for block in blocks:
            assert isinstance(block, PeerBlock)
            if block.source is None:
                block.missing()
                continue
            located.append(block.source)
            if not block.is_compatible:
                block.corrupt()
            else:
                by_peer.setdefault(block.owner.name, []).append(block)
        try:
            unresponsive = {peer for reader in self._readers for peer in reader.free_quarantined()}
            for peer_blocks in by_peer.values():
                self._get_from(peer_blocks[0].owner, peer_blocks, unresponsive)
        finally:
            self._notify_owners(self._tickets.mark_read(located))

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return ()

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Does nothing: corrupt blocks cannot be replaced under their ticket; the owner's next store returns a new one."""

    def _open_more_readers(self) -> None:
        """Create a reader for each further worker, as an agent does one thing at a time, copies included."""
        for _ in range(self.threads - 1):
            try:
                agent = Agent(self._devices, self._pool.kind)
                agent.register(self._pool)
            except (SetupError, NixlError) as error:
                self._limited_log.warning(f"worker threads share NIXL agents: {error}")
                return
            self._readers.append(Reader(agent, self._pool, self._read_bytes, self.timeout))

    def _reader(self) -> Reader:
        """Return this worker's reader."""
        try:
            index: int = self._thread_local.reader_index
        except AttributeError:  # first read of this worker
            index = self._thread_local.reader_index = next(self._next_reader)
        return self._readers[index % len(self._readers)]

    def _grant(self, done: Operation[Result], blocks: "Sequence[_LeasedBlock]", lease_s: float) -> Result:
        """Lease the blocks whose outcome is OK. Called once, when all rows are hashed or the deadline has passed."""
        result = self._finish_transfer(done)
        entries = [
            ENTRY.pack(block.key, block.local_row, block.header)
            for block, outcome in zip(blocks, result.outcomes, strict=True)
            if outcome is Outcome.OK
        ]
        if not entries:
            return result
        lease_s = min(lease_s, MAX_LEASE_S)
        lease_id, held = self._leases.grant(len(entries), lease_s)
        return replace(result, ticket=pack_ticket(self._own_pool, lease_id, lease_s, entries), held=held)

    def _locate_and_get(self, blocks: Sequence[PeerBlock], tickets: Sequence[bytes]) -> None:
        located, invalid = self._tickets.locate(tickets)
        if invalid:
            self._limited_log.warning(f"{invalid} tickets are invalid", kind="tickets")
        for block in blocks:
            block.source = located.get(block.key)
        self.get_many(blocks)

    def _get_from(self, owner: PeerPool, blocks: Sequence[PeerBlock], unresponsive: Container[bytes]) -> None:
        if owner.name == self._own_pool.name:
            for group in groups(blocks, self._pool):
                accept_copies(group, self._pool, [block.remote_row for block in group])
            return
        try:
            if owner.name in unresponsive:
                raise ReadTimeout("an earlier read from the peer is still unfinished")
            self._reader().read(owner, blocks)
        except NixlError as error:
            self._limited_log.warning(f"a peer cannot be read: {error}", kind=type(error).__name__)

    def _notify_owners(self, read_bits: Iterable[tuple[Ticket, int]]) -> None:
        """Notify owners of blocks read, best effort: if that fails, the lease ends at its expiry."""
        for ticket, bits in read_bits:
            self._tell_owner(ticket, pack_notification(ticket.lease_id, bits))
        with suppress(NixlError):
            self._leases.poll()  # also flushes unsent messages

    def _tell_owner(self, ticket: Ticket, message: bytes) -> None:
        if ticket.owner.name == self._own_pool.name:
            self._leases.acknowledge(message)
            return
        with suppress(NixlError):
            if self._readers[0].notify(ticket.owner, message):
                self._leases.keep_polling()


class _LeasedBlock(Outgoing):
    """A row that stays in place; its header goes into a ticket."""

    __slots__ = ("header", "local_row", "memory")

    header: bytes
    memory: Memory
    local_row: int

    @property
    def operation(self) -> Operation[Any]:
        return self._operation

    def take_digest(self, digest: bytes) -> None:
        self.header = self._header_format.pack_checksum(self.key, self._header_format.block_bytes, digest)
        self.present()  # no bytes were moved


def make_headers(blocks: Sequence[_LeasedBlock]) -> None:
    """Make the headers of blocks of one operation."""
    with blocks[0].operation.fence:
        digests = blocks[0].memory.digests([block.local_row for block in blocks])
    for block, digest in zip(blocks, digests, strict=True):
        block.take_digest(digest)
