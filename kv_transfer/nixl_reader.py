"""The reader's side of `nixl://`: rows of other pools, read into bounce buffers, checked, and copied to our own."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.nixl_agent import Agent, NixlFault, TooLate
from pdserve.kv_transfer.nixl_tickets import Introduction, Place
from pdserve.kv_transfer.threaded import Expired, Incoming

_MAX_PEERS: Final = 256  # the one unused for longest makes room


class Wanted(Incoming):
    """A block to be read from a peer."""

    __slots__ = ("place",)

    place: Place | None

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

    def take(self, arrived: Row) -> None:
        assert self.place is not None
        self.accept(self.place.header, arrived)


class _Bounce:
    """Registered memory for two reads of up to `piece` blocks each."""

    def __init__(self, agent: Agent, block_bytes: int, piece_bytes: int) -> None:
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

    blocks: Sequence[Wanted]
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


class Reader:
    """Reads rows of other pools. Used by several workers at a time."""

    def __init__(self, agent: Agent, block_bytes: int, bounce_bytes: int, timeout: float) -> None:
        self._agent = agent
        self._block_bytes = block_bytes
        self._bounce_bytes = bounce_bytes
        self._settle_s = timeout
        self._margin_s = timeout / 10  # for putting a buffer aside before the load is answered
        self._lock = threading.RLock()
        self._peers: dict[bytes, _Peer] = {}  # the most recently used last
        self._free: list[_Bounce] = []
        self._aside: list[_Aside] = []

    def read(self, owner: Introduction, blocks: Sequence[Wanted]) -> None:
        """Reads blocks of one peer, two pieces at a time, so that one travels while the other is checked.

        Raises:
            NixlFault: the peer is dead, or did not answer in time.
        """
        if owner.name in self._collect():
            raise TooLate("it did not answer an earlier read, which is still not over")
        bounce, peer = self._borrow(), None
        flying: deque[_Piece] = deque()
        failed = True
        try:
            peer = self._meet(owner)
            self._read(peer, bounce, blocks, flying)
            failed = False
        except (TooLate, Expired):
            failed = False
            raise
        finally:
            self._give_back(owner.name, bounce, flying, failed)
            if peer is not None:
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

    def _read(self, peer: _Peer, bounce: _Bounce, blocks: Sequence[Wanted], flying: deque[_Piece]) -> None:
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
