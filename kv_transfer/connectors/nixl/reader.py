"""The reader's side of `nixl://`: reads rows of peers' pools into local rows directly, or through bounce buffers."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdserve.kv_transfer.blocks import Expired, Incoming, Operation
from pdserve.kv_transfer.connectors.nixl.agent import Agent, NixlError, ReadTimeout
from pdserve.kv_transfer.connectors.nixl.memory import Memory
from pdserve.kv_transfer.connectors.nixl.tickets import PeerPool, RemoteBlock

_MAX_PEERS: Final = 256  # beyond this, the least recently used idle peer is disconnected


class PeerBlock(Incoming):
    """A block to be read from a peer.

    Attributes:
        source: where the block is; None if no ticket has it.
        memory, local_row: the local pool, and its row to read into.
    """

    __slots__ = ("local_row", "memory", "source")

    source: RemoteBlock | None
    memory: Memory
    local_row: int

    @property
    def is_compatible(self) -> bool:
        """True if the ticket's header is that of this block in this layout. Otherwise the block is not read at all."""
        assert self.source is not None
        owner = self.source.ticket.owner
        matches = self._header_format.matches(self.source.header, self.key)
        same_memory = owner.block_bytes == self._header_format.block_bytes and owner.kind == self.memory.kind
        return matches and same_memory  # memory of another kind has other checksums

    @property
    def owner(self) -> PeerPool:
        assert self.source is not None
        return self.source.ticket.owner

    @property
    def remote_row(self) -> int:
        assert self.source is not None
        return self.source.row

    @property
    def operation(self) -> Operation[Any]:
        return self._operation

    def take_digest(self, digest: bytes) -> None:
        """Mark the block by the checksum of its row, with the fence held since before that was written."""
        assert self.source is not None
        self.accept_digest(self.source.header, digest)


def accept_copies(blocks: Sequence[PeerBlock], memory: Memory, rows: Sequence[int]) -> None:
    """Copy rows outside of the pool, or others in it, into the rows of blocks of one operation, and verify them there."""
    with blocks[0].operation.fence:
        digests = blocks[0].memory.copy([block.local_row for block in blocks], memory, rows)
        for block, digest in zip(blocks, digests, strict=True):
            block.take_digest(digest)


class _BounceBuffer:
    """Registered memory for two reads of up to `blocks_per_read` blocks each, with a thread that verifies what arrived."""

    def __init__(self, agent: Agent, pool: Memory, blocks_per_read: int) -> None:
        self.blocks_per_read = blocks_per_read
        self.memory = pool.like(2 * self.blocks_per_read)
        self.registration = agent.register(self.memory)
        self.descriptors = _describe(agent, self.memory)
        self.verifier = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl-verify")


@dataclass
class _Peer:
    """A connected peer.

    Attributes:
        descriptors: of all rows of its pool.
        is_synchronous: True if the last read was done when started, as through shared memory; None before the first.
        active_users: reads and notifications in progress.
        has_failed: disconnect once there are no active users.
    """

    descriptors: Any
    is_synchronous: bool | None = None
    active_users: int = 0
    has_failed: bool = False


@dataclass
class _BounceRead:
    """A read into a bounce buffer, in progress or waiting for verification.

    Attributes:
        first_row: of the bounce buffer.
        verification: the verification on another thread, if any.
    """

    blocks: Sequence[PeerBlock]
    first_row: int
    transfer: Any
    is_done: bool = False
    verification: Future[None] | None = None


@dataclass
class QuarantinedBuffer:
    """A bounce buffer that NIXL may still write to. It is freed after `not_before`, once its transfers have ended."""

    peer: bytes
    bounce: _BounceBuffer
    transfers: list[Any]
    not_before: float


class Reader:
    """Reads rows of peers' pools. Thread-safe: several workers may share a reader."""

    def __init__(self, agent: Agent, pool: Memory, read_bytes: int, timeout: float) -> None:
        self._agent = agent
        self._pool = pool
        self._local = _describe(agent, pool)
        self._blocks_per_read = max(1, read_bytes * len(pool) // pool.nbytes)
        self._quarantine_s = timeout
        self._margin_s = timeout / 10  # to quarantine a buffer before the load's deadline
        self._lock = threading.RLock()
        self._peers: dict[bytes, _Peer] = {}  # the most recently used last
        self._free_buffers: list[_BounceBuffer] = []
        self._quarantined: list[QuarantinedBuffer] = []

    def read(self, owner: PeerPool, blocks: Sequence[PeerBlock]) -> None:
        """Read and mark blocks of one peer.

        Through shared memory, this thread does the copy inside the NIXL call. The first blocks read from a peer show whether
        that is the case. If so, nothing can arrive late, and blocks are read directly into the pool; otherwise through a
        bounce buffer.

        Raises:
            NixlError: the peer is dead, or did not respond in time.
        """
        peer, failed = self._acquire_peer(owner), True
        try:
            if peer.is_synchronous is None:
                for block in blocks[:2]:  # the first one also connects
                    self._read_via_bounce(owner.name, peer, [block])
                blocks = blocks[2:]
            if peer.is_synchronous:
                self._read_directly(peer, blocks)
            elif blocks:
                self._read_via_bounce(owner.name, peer, blocks)
            failed = False
        except (ReadTimeout, Expired):
            failed = False
            raise
        finally:
            self._release_peer(owner.name, peer, failed)

    def notify(self, owner: PeerPool, message: bytes) -> bool:
        """Send a message to a peer. Returns True if the peer was not connected, so that the message is not sent yet.

        Raises:
            NixlError: the peer is dead.
        """
        is_new = owner.name not in self._peers
        peer = self._acquire_peer(owner)
        try:
            self._agent.notify(owner.name.decode(), message)
        finally:
            self._release_peer(owner.name, peer, failed=False)
        return is_new

    def free_quarantined(self) -> set[bytes]:
        """Free quarantined buffers whose last read has ended.

        A read that ended with an error was abandoned by NIXL, but perhaps not by the network: hence the quarantine time.

        Returns:
            The names of the peers with reads still in progress.
        """
        with self._lock:
            for quarantined in list(self._quarantined):
                for transfer in list(quarantined.transfers):
                    if self._agent.has_ended(transfer):
                        quarantined.transfers.remove(transfer)
                        self._agent.release(transfer)
                if not quarantined.transfers and time.monotonic() >= quarantined.not_before:
                    self._quarantined.remove(quarantined)
                    self._free(quarantined.bounce)
            return {quarantined.peer for quarantined in self._quarantined if quarantined.transfers}

    def close(self) -> None:
        """Free all resources and close the agent. No other method may be running."""
        for quarantined in self._quarantined:
            for transfer in quarantined.transfers:
                self._agent.release(transfer)  # the buffer outlives the agent, and with it the read
            quarantined.transfers.clear()
        for bounce in self._free_buffers + [quarantined.bounce for quarantined in self._quarantined]:
            self._free(bounce)
        self._agent.release(self._local)
        for name, peer in self._peers.items():
            self._agent.remove_peer(name.decode(), peer.descriptors)
        self._peers.clear()
        self._agent.close()

    def _acquire_peer(self, owner: PeerPool) -> _Peer:
        with self._lock:
            peer = self._peers.pop(owner.name, None) or self._connect(owner)
            self._peers[owner.name] = peer
            if peer.has_failed:
                raise NixlError("the peer has just failed")
            peer.active_users += 1
            return peer

    def _connect(self, owner: PeerPool) -> _Peer:
        idle = [name for name, peer in self._peers.items() if not peer.active_users]
        for name in idle[: max(0, len(self._peers) - _MAX_PEERS + 1)]:
            self._agent.remove_peer(name.decode(), self._peers.pop(name).descriptors)
        self._agent.add_peer(owner.metadata)
        try:
            place = (owner.base, owner.block_bytes, owner.rows, owner.kind, owner.device)
            return _Peer(self._agent.prepare(owner.name.decode(), *place))
        except NixlError:
            self._agent.remove_peer(owner.name.decode(), None)
            raise

    def _release_peer(self, name: bytes, peer: _Peer, failed: bool) -> None:
        """Disconnect a peer that failed, after its last user. The next ticket connects it again, if it lives."""
        with self._lock:
            peer.active_users -= 1
            peer.has_failed = peer.has_failed or failed
            if peer.has_failed and not peer.active_users:
                del self._peers[name]
                self._agent.remove_peer(name.decode(), peer.descriptors)

    def _read_directly(self, peer: _Peer, blocks: Sequence[PeerBlock]) -> None:
        for start in range(0, len(blocks), self._blocks_per_read):
            group = blocks[start : start + self._blocks_per_read]
            local_rows = np.array([block.local_row for block in group], dtype=np.int32)
            with group[0].operation.fence:
                peer.is_synchronous = self._agent.read(self._local, local_rows, peer.descriptors, _remote_rows(group))
                digests = self._pool.digests(local_rows.tolist())
                for block, digest in zip(group, digests, strict=True):
                    block.take_digest(digest)

    def _read_via_bounce(self, name: bytes, peer: _Peer, blocks: Sequence[PeerBlock]) -> None:
        bounce, failed = self._take_buffer(), True
        reads: deque[_BounceRead] = deque()
        try:
            self._run_reads(peer, bounce, blocks, reads)
            failed = False
        except (ReadTimeout, Expired):
            failed = False
            raise
        finally:
            self._return_buffer(name, bounce, reads, failed)

    def _run_reads(
        self, peer: _Peer, bounce: _BounceBuffer, blocks: Sequence[PeerBlock], reads: deque[_BounceRead]
    ) -> None:
        """Keep two reads outstanding, so that one is transferred while the other is verified."""
        step = bounce.blocks_per_read
        for start in range(0, len(blocks), step):
            if len(reads) == 2:
                self._finish_oldest(bounce, reads)
            first_row = step * (start // step % 2)
            self._start_read(peer, bounce, blocks[start : start + step], first_row, reads)
            read = reads[-1]
            if read.is_done and start + step < len(blocks):
                read.verification = bounce.verifier.submit(self._accept_copies, bounce, read)
        while reads:
            self._finish_oldest(bounce, reads)

    def _start_read(
        self,
        peer: _Peer,
        bounce: _BounceBuffer,
        blocks: Sequence[PeerBlock],
        first_row: int,
        reads: deque[_BounceRead],
    ) -> None:
        bounce_rows = np.arange(first_row, first_row + len(blocks), dtype=np.int32)
        transfer = self._agent.make_read(bounce.descriptors, bounce_rows, peer.descriptors, _remote_rows(blocks))
        reads.append(_BounceRead(blocks, first_row, transfer))
        reads[-1].is_done = self._agent.start_read(transfer)
        peer.is_synchronous = reads[-1].is_done

    def _finish_oldest(self, bounce: _BounceBuffer, reads: deque[_BounceRead]) -> None:
        """Wait until the oldest read is done and verified, and remove it."""
        read = reads[0]
        pause = 0.0
        while not read.is_done:
            if time.monotonic() >= read.blocks[0].operation.deadline - self._margin_s:
                raise ReadTimeout("the peer did not respond in time")
            time.sleep(pause)
            pause = min(pause + 20e-6, 500e-6)
            read.is_done = self._agent.is_done(read.transfer)
        if read.verification is not None:
            read.verification.result()
        else:
            self._accept_copies(bounce, read)
        reads.popleft()
        self._agent.release(read.transfer)

    def _accept_copies(self, bounce: _BounceBuffer, read: _BounceRead) -> None:
        """Verify the blocks of a finished read and copy them into the pool."""
        rows = range(read.first_row, read.first_row + len(read.blocks))
        accept_copies(read.blocks, bounce.memory, rows)

    def _take_buffer(self) -> _BounceBuffer:
        with self._lock:
            if self._free_buffers:
                return self._free_buffers.pop()
        return _BounceBuffer(self._agent, self._pool, self._blocks_per_read)

    def _return_buffer(self, peer: bytes, bounce: _BounceBuffer, reads: Iterable[_BounceRead], failed: bool) -> None:
        """Make a buffer available to others if nothing can write to it any more; otherwise quarantine it."""
        in_progress = []
        for read in reads:
            if read.verification is not None:
                read.verification.exception()  # waits for it, as it reads the buffer
            if read.is_done or self._agent.has_ended(read.transfer):
                self._agent.release(read.transfer)
            else:
                in_progress.append(read.transfer)
        with self._lock:
            if in_progress or (failed and reads):
                not_before = time.monotonic() + self._quarantine_s
                self._quarantined.append(QuarantinedBuffer(peer, bounce, in_progress, not_before))
            else:
                self._free_buffers.append(bounce)

    def _free(self, bounce: _BounceBuffer) -> None:
        bounce.verifier.shutdown()
        self._agent.deregister(bounce.registration, bounce.descriptors)


def _describe(agent: Agent, memory: Memory) -> Any:
    """Return descriptors of this process's memory."""
    row_bytes = memory.nbytes // len(memory)
    return agent.prepare("", memory.address, row_bytes, len(memory), memory.kind, memory.device)


def _remote_rows(blocks: Sequence[PeerBlock]) -> npt.NDArray[np.int32]:
    return np.array([block.remote_row for block in blocks], dtype=np.int32)
