"""Stores and loads, under way or waiting for room: a slow store must not have the whole pool on its way to it.

Each transfer holds its blocks until it is done, whatever becomes of the request meanwhile. So many blocks are in flight at
most; the others wait in order of arrival. As long as stores wait, prefill computes nothing that would have to be stored.
Nothing waits for ever, because every operation of a connector ends by its deadline; and nothing waits for a store that is
silent: after an operation that got no answer, as long again as that took, what has no room ends at once.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pdserve.engine.block_pool import BlockPool
from pdserve.kv_transfer.connector import Connector, Outcome, Result
from pdserve.kv_transfer.operation import Answer
from pdserve.roles.job import InstanceContext, Job

Then = Callable[[Result], None]
PIECES = 4  # into which blocks that come together are divided
PIECE_BYTES = 8 << 20  # at least, so that a piece's messages cost little beside its bytes
PATIENCE_S = 0.1  # for the next block of those that are being stored


class Source(Protocol):
    """Where a load comes from: the instance's connector, or what stands in its place."""

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()
    ) -> Future[Result]: ...

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None: ...


@dataclass(eq=False)
class _Transfer:
    job: Job
    blocks: list[int]
    is_store: bool
    start: Callable[[], Future[Result]]
    then: Then
    leased: bool  # for somebody who waits for it
    asked: float  # when, on the desk's clock
    waited: float = 0.0  # seconds
    future: Future[Result] | None = None  # once it is under way


class Transfers:
    """The one way from an instance's pool to its connector. Lives on the engine thread.

    Attributes:
        largest: blocks that one transfer should have at most, so that others get in between.
        in_flight: blocks that the connector is moving.
        follows: loads can be started while the blocks are being stored.
        in_place: peers read the pool's rows where they are, if they are handed a ticket.
        num_holding: transfers whose blocks are still held; those that peers read in place may outlive their request.
    """

    def __init__(
        self, pool: BlockPool, connector: Connector, context: InstanceContext, max_blocks: int, block_bytes: int
    ) -> None:
        self._pool = pool
        self._connector = connector
        self._context = context
        self._max_blocks = max_blocks
        self._block_bytes = block_bytes
        self._waiting: deque[_Transfer] = deque()
        self._under_way: set[_Transfer] = set()
        self.largest = max(1, max_blocks // 2)
        self._silent_until = -math.inf
        self.in_flight = 0
        self.in_place = connector.in_place
        self.follows = connector.follows
        self.num_holding = 0

    @property
    def waiting(self) -> int:
        """Blocks of transfers that wait for room."""
        return sum(len(transfer.blocks) for transfer in self._waiting)

    @property
    def stores_wait(self) -> bool:
        return any(transfer.is_store for transfer in self._waiting)

    @property
    def room(self) -> int:
        """Blocks that would not have to wait."""
        return 0 if self._waiting else max(0, self._max_blocks - self.in_flight)

    def store(self, job: Job, keys: Sequence[bytes], blocks: list[int], lease_s: float, then: Then) -> None:
        """`then` gets the result on the engine thread; until it is called, `job.transfers` counts the transfer."""
        start = lambda: self._connector.store(keys, blocks, lease_s=lease_s)  # noqa: E731
        self._add(_Transfer(job, blocks, True, start, then, lease_s > 0, self._context.now()))

    def load(
        self,
        job: Job,
        keys: Sequence[bytes],
        blocks: list[int],
        then: Then,
        tickets: Sequence[bytes] = (),
        source: Source | None = None,
    ) -> None:
        """As `store`. `source` None is the connector."""
        from_there = source or self._connector
        start = lambda: from_there.load(keys, blocks, tickets=tickets)  # noqa: E731
        self._add(_Transfer(job, blocks, False, start, then, True, self._context.now()))

    def release(self, keys: Sequence[bytes], ticket: bytes) -> None:
        """Ends the leases of a store that has ended; nobody will load what it stored."""
        if keys:
            self._connector.release(keys, tickets=[ticket] if ticket else [])

    def follow(self, job: Job, keys: Sequence[bytes], blocks: list[int], then: Then) -> None:
        """As `load`, of blocks that are being stored."""
        start = lambda: self._connector.follow(keys, blocks, patience_s=PATIENCE_S)  # noqa: E731
        self._add(_Transfer(job, blocks, False, start, then, True, self._context.now()))

    def pieces(self, first: int, stop: int) -> Iterable[tuple[int, int]]:
        """Divides a range of blocks that come together, so that several threads move them, and others get in between."""
        least = max(1, PIECE_BYTES // self._block_bytes)
        step = min(max(least, -(-(stop - first) // PIECES)), self.largest)
        return ((start, min(start + step, stop)) for start in range(first, stop, step))

    def drop(self, job: Job) -> None:
        """Nobody wants the job's transfers any more. Those that wait end here; those under way end with the block that is
        being moved, where the connector can do that. What is stored without a lease, for whoever finds it, goes on."""
        for transfer in self._under_way:
            if transfer.job is job and transfer.leased and isinstance(transfer.future, Answer):
                transfer.future.unwanted()
        dropped = [transfer for transfer in self._waiting if transfer.job is job]
        self._waiting = deque(transfer for transfer in self._waiting if transfer.job is not job)
        self._give_up(dropped)

    def _add(self, transfer: _Transfer) -> None:
        self._pool.hold(transfer.blocks)
        self.num_holding += 1
        transfer.job.transfers += 1
        self._waiting.append(transfer)
        self._start()
        self._leave_silent_store()

    def _start(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            transfer = self._waiting.popleft()
            transfer.waited = self._context.now() - transfer.asked
            self.in_flight += self._weight(transfer)
            transfer.future = transfer.start()
            self._under_way.add(transfer)
            self._context.when_done(transfer.future, partial(self._done, transfer))

    def _done(self, transfer: _Transfer, result: Result) -> None:
        self._under_way.discard(transfer)
        self.in_flight -= self._weight(transfer)
        if self._weight(transfer):
            self._context.moved(result.outcomes.count(Outcome.OK), result.seconds)
        if Outcome.OK in result.outcomes:
            self._silent_until = -math.inf
        elif Outcome.UNAVAILABLE in result.outcomes:
            self._silent_until = self._context.now() + result.seconds
        self._end(transfer, replace(result, seconds=result.seconds + transfer.waited))
        self._start()
        self._leave_silent_store()

    def _leave_silent_store(self) -> None:
        if self._waiting and self._context.now() < self._silent_until:
            self._context.count("kv_transfer_given_up_blocks", self.waiting)
            dropped, self._waiting = self._waiting, deque()
            self._give_up(dropped)

    def _give_up(self, dropped: Iterable[_Transfer]) -> None:
        """They end soon, not within this call: who has just asked for one expects to hear of it later."""
        for transfer in dropped:
            nothing: Future[Result] = Future()
            nothing.set_result(Result([Outcome.UNAVAILABLE] * len(transfer.blocks), 0.0))
            self._context.when_done(nothing, partial(self._end, transfer))

    def _end(self, transfer: _Transfer, result: Result) -> None:
        transfer.job.transfers -= 1
        if result.held is None:
            self._let_go(transfer)
        else:
            self._context.when_done(result.held, lambda _: self._let_go(transfer))
        transfer.then(result)

    def _let_go(self, transfer: _Transfer) -> None:
        self.num_holding -= 1
        self._pool.release(transfer.blocks)

    def _fits(self, transfer: _Transfer) -> bool:
        return self.in_flight == 0 or self.in_flight + self._weight(transfer) <= self._max_blocks

    def _weight(self, transfer: _Transfer) -> int:
        """Blocks that really move: peers read in place what such a connector stores."""
        return 0 if transfer.is_store and self._connector.in_place else len(transfer.blocks)
