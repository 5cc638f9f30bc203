"""Staging of GPU pools through pinned host memory, for connectors that transfer host memory only.

    store   copy a piece to host rows ─► inner connector stores it ┐    meanwhile the next piece is copied
    load    inner connector loads a piece ─► copy it to the pool   ┘    meanwhile the next piece is loaded

A piece is some blocks of one operation. The pieces of all operations share the host rows of their direction, whose number
bounds the bytes in flight. The pieces of a `follow` come one after the other, since each waits for blocks yet to be stored.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    request_cancel,
)
from pdserve.kv_transfer.forwarding import ForwardingConnector

STAGING_BYTES = 256 << 20  # of host memory, per direction
PIECE_BYTES = 16 << 20  # of a piece, and of the buffer on the GPU, per direction

InnerLoad = Callable[[Sequence[bytes], Sequence[int]], Future[Result]]


class Lane(Protocol):
    """Copies between the pool and host rows in one direction: `kernels/gpu/copies.py`."""

    def mark(self) -> Any: ...
    def read(self, blocks: Sequence[int], rows: torch.Tensor, after: Any) -> None: ...
    def write(self, rows: torch.Tensor, blocks: Sequence[int], after: Any) -> None: ...


class Copies(Protocol):
    """Makes lanes and host rows for one pool."""

    def rows(self, count: int) -> torch.Tensor: ...
    def lane(self, max_blocks: int) -> Lane: ...
    def in_place(self) -> Any: ...


def attach_pool(
    connector: Connector, pool: torch.Tensor, layout: Layout, make_copies: Callable[[], Copies] | None = None
) -> Connector:
    """Attach a pool [num_blocks, …] to a connector, through pinned host memory if the pool is on a GPU.

    Args:
        make_copies: returns what copies between a pool on a GPU and host memory.

    Returns:
        The attached connector to use: `connector` itself, or a `StagedConnector` around it.

    Raises:
        SetupError: the connector reads pools in place, and this one is on a GPU; or as `Connector.attach`.
    """
    if pool.device.type == "cpu":
        connector.attach(PoolMemory(host_rows(pool), layout))
        return connector
    assert make_copies is not None
    copies = make_copies()
    if connector.capabilities.gpu_memory:
        no_bytes = np.broadcast_to(np.uint8(0), (pool.shape[0], layout.block_bytes))
        connector.attach(PoolMemory(no_bytes, layout, copies.in_place()))
        return connector
    if connector.in_place:
        raise SetupError(
            f"{connector.scheme}:// reads pools in place, which is not supported for a pool on {pool.device}"
        )
    return StagedConnector(connector, copies, layout, pool.shape[0])


def host_rows(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a tensor in host memory as uint8 rows [num_blocks, block_bytes]."""
    assert pool.device.type == "cpu" and pool.is_contiguous()
    rows: npt.NDArray[np.uint8] = pool.view(torch.uint8).reshape(pool.shape[0], -1).numpy()
    return rows


class StagedConnector(ForwardingConnector):
    """Wraps a connector so that blocks of a GPU pool are copied through rows in pinned host memory."""

    def __init__(
        self,
        inner: Connector,
        copies: Copies,
        layout: Layout,
        num_blocks: int,
        staging_bytes: int = STAGING_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(inner)
        self._inner_calls = threading.Lock()  # the contract promises one caller at a time
        self._piece = max(1, min(piece_bytes // layout.block_bytes, num_blocks))
        pieces = max(2, min(staging_bytes // (self._piece * layout.block_bytes), -(-num_blocks // self._piece)))
        rows = copies.rows(2 * pieces * self._piece)
        first_rows = range(0, 2 * pieces * self._piece, self._piece)
        self._store = _Direction("store", rows, first_rows[:pieces], copies.lane(self._piece))
        self._load = _Direction("load", rows, first_rows[pieces:], copies.lane(self._piece))
        self._transfers: set[_Transfer] = set()
        inner.attach(PoolMemory(rows.numpy(), layout))

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, cancels=True)

    def attach(self, memory: PoolMemory) -> None:
        raise AssertionError("the constructor attaches")

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        transfer = self._new_transfer(keys, block_ids, self._store.lane.mark())
        for piece in transfer.pieces(self._piece):
            self._store.start(self._store_piece, piece, lease_s)
        return transfer.future

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        transfer = self._new_transfer(keys, block_ids, self._load.lane.mark())
        for piece in transfer.pieces(self._piece):
            self._load.start(self._load_piece, piece, partial(self._inner.load, tickets=list(tickets)))
        return transfer.future

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        transfer = self._new_transfer(keys, block_ids, self._load.lane.mark())
        for piece in transfer.pieces(self._piece, one_by_one=True):
            self._load.start(self._load_piece, piece, partial(self._inner.follow, patience_s=patience_s))
        return transfer.future

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        with self._inner_calls:
            return super().match(keys)

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        with self._inner_calls:
            super().release(keys, tickets=tickets)

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        with self._inner_calls:
            super().prolong(keys, lease_s=lease_s, tickets=tickets)

    def close(self) -> None:
        wait([transfer.future for transfer in list(self._transfers)])
        self._store.close()
        self._load.close()
        super().close()

    def _new_transfer(self, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> "_Transfer":
        transfer = _Transfer(keys, block_ids, mark)
        self._transfers.add(transfer)
        transfer.future.add_done_callback(lambda _: self._transfers.discard(transfer))
        if not keys:
            transfer.finish()
        return transfer

    def _store_piece(self, first_row: int, piece: "_Piece", lease_s: float) -> None:
        """Copy a piece to host rows and start to store it. Runs in the thread of the direction."""
        transfer, slots = piece.transfer, range(first_row, first_row + len(piece))
        self._store.lane.read(piece.blocks, self._store.rows[slots.start : slots.stop], transfer.mark)
        with self._inner_calls:
            storing = self._inner.store(piece.keys, slots, lease_s=lease_s)
        transfer.track(storing)

        def stored(done: "Future[Result]") -> None:
            self._store.free(first_row)
            piece.end(done)

        storing.add_done_callback(stored)

    def _load_piece(self, first_row: int, piece: "_Piece", inner_load: InnerLoad) -> None:
        """Start to load a piece into host rows. Runs in the first thread of the direction."""
        with self._inner_calls:
            loading = inner_load(piece.keys, range(first_row, first_row + len(piece)))
        piece.transfer.track(loading)
        loading.add_done_callback(lambda done: self._load.finish(self._finish_load, first_row, piece, inner_load, done))

    def _finish_load(self, first_row: int, piece: "_Piece", inner_load: InnerLoad, done: Future[Result]) -> None:
        """Copy the loaded blocks of a piece to the pool, and go on with the piece that follows it, if any."""
        loaded = [i for i, outcome in enumerate(done.result().outcomes) if outcome is Outcome.OK]
        if loaded:
            rows = self._load.rows[first_row : first_row + len(piece)]
            rows = rows if len(loaded) == len(piece) else rows[loaded]
            self._load.lane.write(rows, [piece.blocks[i] for i in loaded], piece.transfer.mark)
        self._load.free(first_row)
        if piece.following is not None and len(loaded) == len(piece):
            self._load.start(self._load_piece, piece.following, inner_load)
        elif piece.following is not None:
            piece.following.skip(Outcome.CANCELLED if piece.transfer.is_cancelled else Outcome.MISSING)
        piece.end(done)


class _Direction:
    """The host rows of one direction, in pieces, and the threads that copy between them and the pool.

    Attributes:
        rows: of both directions, uint8 [rows, bytes of a block].
        lane: of this direction; the copies of loads are in the second thread, so that a load which waits for rows cannot
            keep others from giving theirs back.
    """

    def __init__(self, name: str, rows: torch.Tensor, first_rows: Sequence[int], lane: Lane) -> None:
        self.rows = rows
        self.lane = lane
        self._free: SimpleQueue[int] = SimpleQueue()
        for row in first_rows:
            self._free.put(row)
        self._threads = [ThreadPoolExecutor(1, f"staging-{name}{end}") for end in ("", "-end")]

    def start(self, work: Callable[..., None], piece: "_Piece", *arguments: Any) -> None:
        """Run work(first row, piece, …) when there are free rows, unless its operation is cancelled by then."""
        self._threads[0].submit(self._take_and_run, work, piece, *arguments)

    def finish(self, work: Callable[..., None], first_row: int, piece: "_Piece", *arguments: Any) -> None:
        """Run work(first row, piece, …) in the second thread."""
        self._threads[1].submit(self._run, work, first_row, piece, *arguments)

    def free(self, first_row: int) -> None:
        self._free.put(first_row)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def _take_and_run(self, work: Callable[..., None], piece: "_Piece", *arguments: Any) -> None:
        first_row = self._free.get()
        if piece.transfer.is_cancelled:
            self.free(first_row)
            piece.skip(Outcome.CANCELLED)
        else:
            self._run(work, first_row, piece, *arguments)

    def _run(self, work: Callable[..., None], first_row: int, piece: "_Piece", *arguments: Any) -> None:
        try:
            work(first_row, piece, *arguments)
        except Exception as error:  # noqa: BLE001 - raised to the caller: a defect, or a GPU that failed
            self.free(first_row)
            piece.fail(error)


class _Transfer:
    """One store, load or follow, which is over when all of its pieces are: the rows of the others are in use until then.

    Attributes:
        mark: what the copies wait for.
        is_cancelled: pieces that have not been started are left out.
        error: that its future raises in the end, if any.
    """

    def __init__(self, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> None:
        self.keys, self.block_ids = list(keys), list(block_ids)
        self.mark = mark
        self.is_cancelled = False
        self.future: OperationFuture[Result] = OperationFuture(self._cancel)
        self._outcomes = [Outcome.UNAVAILABLE] * len(keys)
        self._unfinished = len(keys)
        self.error: Exception | None = None
        self._running: set[Future[Result]] = set()
        self._started = time.perf_counter()
        self._lock = threading.Lock()

    def pieces(self, size: int, *, one_by_one: bool = False) -> "list[_Piece]":
        """Return its pieces of `size` blocks, or only the first, which the others follow."""
        pieces = [_Piece(self, start, min(size, len(self.keys) - start)) for start in range(0, len(self.keys), size)]
        if one_by_one:
            for piece, following in pairwise(pieces):
                piece.following = following
        return pieces[:1] if one_by_one else pieces

    def track(self, operation: "Future[Result]") -> None:
        """Pass a cancellation on to this operation from now on."""
        with self._lock:
            self._running.add(operation)
        if self.is_cancelled:  # since before the line above
            request_cancel(operation)

    def end(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of some blocks, and finish after the last ones."""
        with self._lock:
            self._outcomes[first : first + len(outcomes)] = outcomes
            self._unfinished -= len(outcomes)
            is_last = not self._unfinished
        if is_last:
            self.finish()

    def finish(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(Result(self._outcomes, time.perf_counter() - self._started))

    def _cancel(self) -> None:
        self.is_cancelled = True
        with self._lock:
            running = list(self._running)
        for operation in running:
            request_cancel(operation)


class _Piece:
    """Some consecutive blocks of a transfer.

    Attributes:
        following: the piece that is to be started once this one is complete, if any.
    """

    def __init__(self, transfer: _Transfer, first: int, count: int) -> None:
        self.transfer = transfer
        self.following: _Piece | None = None
        self._first = first
        self.keys = transfer.keys[first : first + count]
        self.blocks = transfer.block_ids[first : first + count]

    def __len__(self) -> int:
        return len(self.keys)

    def end(self, done: "Future[Result]") -> None:
        """Record the result of the inner connector."""
        if (error := done.exception()) is not None:
            assert isinstance(error, Exception)
            self.fail(error)
        else:
            self.transfer.end(self._first, done.result().outcomes)

    def fail(self, error: Exception) -> None:
        """Record a defect, or a GPU that failed. What has not been started of the transfer is left out."""
        self.transfer.error, self.transfer.is_cancelled = self.transfer.error or error, True
        self.skip(Outcome.UNAVAILABLE)

    def skip(self, outcome: Outcome) -> None:
        """Record that its blocks were not moved, and neither those of the pieces that follow it."""
        piece: _Piece | None = self
        while piece is not None:
            self.transfer.end(piece._first, [outcome] * len(piece))
            piece = piece.following
