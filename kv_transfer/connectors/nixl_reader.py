"""The reader's side of `nixl://`: rows of other pools, read into ours and checked, or into bounce buffers first."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdserve.kv_transfer.blocks import Incoming
from pdserve.kv_transfer.connectors.nixl_agent import Agent, NixlFault, TooLate
from pdserve.kv_transfer.connectors.nixl_tickets import Introduction, Place
from pdserve.kv_transfer.fence import Expired, Fence
from pdserve.kv_transfer.header import Row

_MAX_PEERS: Final = 256  # the one unused for longest makes room


class Wanted(Incoming):
    """A block to be read from a peer."""

    __slots__ = ("place", "to")

    place: Place | None
    to: int  # the row of our pool

    @property
    def is_ours(self) -> bool:
        """Whether what lies there is said to be this block, of our layout. Else it is not read at all."""
        assert self.place is not None
        owner = self.place.ticket.owner
        return self._seal.fits(self.place.header, self.key) and owner.block_bytes == self._seal.block_bytes

    @property
    def owner(self) -> Introduction:
        assert self.place is not None
        return self.place.ticket.owner

    @property
    def row(self) -> int:
        assert self.place is not None
        return self.place.row

    @property
    def deadline(self) -> float:
        return self._operation.deadline

    @property
    def fence(self) -> Fence:
        return self._fence

    def take(self, arrived: Row) -> None:
        assert self.place is not None
        self.accept(self.place.header, [arrived])

    def check(self) -> None:
        assert self.place is not None
        self.accept_placed(self.place.header)


class _Bounce:
    """Registered memory for two reads of up to `piece` blocks each."""

    def __init__(self, agent: Agent, block_bytes: int, piece: int) -> None:
        self.piece = piece
        self.rows: Row = np.empty((2 * self.piece, block_bytes), np.uint8)
        self.registration = agent.register(self.rows)
        self.targets = agent.prepare("", self.rows.ctypes.data, block_bytes, len(self.rows))
        self.checker = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl-check")


@dataclass
class _Peer:
    sources: Any  # prepared descriptors of all its rows
    at_once: bool | None = None  # the last read was over when it had begun
    users: int = 0  # reads that need them
    failed: bool = False  # to be forgotten when nobody needs it


@dataclass
class _Piece:
    """One read under way."""

    blocks: Sequence[Wanted]
    first: int  # row of the bounce buffer
    transfer: Any
    over: bool = False
    check: Future[None] | None = None  # on another thread


@dataclass
class QuarantinedBuffer:
    """A bounce buffer that NIXL may still write to."""

    peer: bytes
    bounce: _Bounce
    transfers: list[Any]
    not_before: float


class Reader:
    """Reads rows of other pools. Several workers may share one."""

    def __init__(self, agent: Agent, rows: Row, piece_bytes: int, timeout: float) -> None:
        self._agent = agent
        self._block_bytes = rows.shape[1]
        self._rows = agent.prepare("", rows.ctypes.data, self._block_bytes, len(rows))
        self._piece = max(1, piece_bytes // self._block_bytes)
        self._settle_s = timeout
        self._margin_s = timeout / 10  # for putting a buffer aside before the load is answered
        self._lock = threading.RLock()
        self._peers: dict[bytes, _Peer] = {}  # the most recently used last
        self._free: list[_Bounce] = []
        self._aside: list[QuarantinedBuffer] = []

    def read(self, owner: Introduction, blocks: Sequence[Wanted]) -> None:
        """Reads blocks of one peer.

        Through shared memory it is this thread that copies, within NIXL's call. The first blocks of a peer show whether that
        is so. Then nothing can arrive late, and rows are read into directly; else through a bounce buffer.

        Raises:
            NixlFault: the peer is dead, or did not answer in time.
        """
        peer, failed = self._meet(owner), True
        try:
            if peer.at_once is None:
                for block in blocks[:2]:  # the first one also connects
                    self._read_by_bounce(owner.name, peer, [block])
                blocks = blocks[2:]
            if peer.at_once:
                self._read_straight(peer, blocks)
            elif blocks:
                self._read_by_bounce(owner.name, peer, blocks)
            failed = False
        except (TooLate, Expired):
            failed = False
            raise
        finally:
            self._part(owner.name, peer, failed)

    def tell(self, owner: Introduction, message: bytes) -> bool:
        """Sends a message to a peer. Whether it is one that was not met before, so that the message is not away yet.

        Raises:
            NixlFault: it is dead.
        """
        is_new = owner.name not in self._peers
        peer = self._meet(owner)
        try:
            self._agent.send(owner.name.decode(), message)
        finally:
            self._part(owner.name, peer, failed=False)
        return is_new

    def collect(self) -> set[bytes]:
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

    def close(self) -> None:
        """No other method is running. Closes the agent too."""
        for aside in self._aside:
            for transfer in aside.transfers:
                self._agent.release(transfer)  # the buffer outlives the agent, and with it the read
            aside.transfers.clear()
        for bounce in self._free + [aside.bounce for aside in self._aside]:
            self._forget(bounce)
        self._agent.release(self._rows)
        for name, peer in self._peers.items():
            self._agent.remove(name.decode(), peer.sources)
        self._peers.clear()
        self._agent.close()

    def _meet(self, owner: Introduction) -> _Peer:
        with self._lock:
            peer = self._peers.pop(owner.name, None) or self._add(owner)
            self._peers[owner.name] = peer
            if peer.failed:
                raise NixlFault("it has failed just now")
            peer.users += 1
            return peer

    def _add(self, owner: Introduction) -> _Peer:
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

    def _read_straight(self, peer: _Peer, blocks: Sequence[Wanted]) -> None:
        for start in range(0, len(blocks), self._piece):
            piece = blocks[start : start + self._piece]
            targets = np.array([block.to for block in piece], dtype=np.int32)
            with piece[0].fence:
                peer.at_once = self._agent.read(self._rows, targets, peer.sources, _sources(piece))
                for block in piece:
                    block.check()

    def _read_by_bounce(self, name: bytes, peer: _Peer, blocks: Sequence[Wanted]) -> None:
        bounce, failed = self._borrow(), True
        flying: deque[_Piece] = deque()
        try:
            self._read(peer, bounce, blocks, flying)
            failed = False
        except (TooLate, Expired):
            failed = False
            raise
        finally:
            self._give_back(name, bounce, flying, failed)

    def _read(self, peer: _Peer, bounce: _Bounce, blocks: Sequence[Wanted], flying: deque[_Piece]) -> None:
        """Two pieces at a time, so that one travels while the other is checked."""
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
        self, peer: _Peer, bounce: _Bounce, blocks: Sequence[Wanted], first: int, flying: deque[_Piece]
    ) -> None:
        targets = np.arange(first, first + len(blocks), dtype=np.int32)
        transfer = self._agent.make_read(bounce.targets, targets, peer.sources, _sources(blocks))
        flying.append(_Piece(blocks, first, transfer))
        flying[-1].over = self._agent.begin(transfer)
        peer.at_once = flying[-1].over

    def _land(self, bounce: _Bounce, flying: deque[_Piece]) -> None:
        """Waits for the oldest piece to arrive and to be checked."""
        piece = flying[0]
        pause = 0.0
        while not piece.over:
            if time.monotonic() >= piece.blocks[0].deadline - self._margin_s:
                raise TooLate("it did not answer in time")
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
        return _Bounce(self._agent, self._block_bytes, self._piece)

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
                self._aside.append(QuarantinedBuffer(peer, bounce, under_way, time.monotonic() + self._settle_s))
            else:
                self._free.append(bounce)

    def _forget(self, bounce: _Bounce) -> None:
        bounce.checker.shutdown()
        self._agent.forget(bounce.registration, bounce.targets)


def _sources(blocks: Sequence[Wanted]) -> npt.NDArray[np.int32]:
    return np.array([block.row for block in blocks], dtype=np.int32)
