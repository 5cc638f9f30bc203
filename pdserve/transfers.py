"""Stores and loads under way. Each holds its blocks until it is done, whatever becomes of the request meanwhile."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pdserve.engine.block_pool import BlockPool
from pdserve.job import Desk, Job
from pdserve.kv_transfer.connector import Connector, Result

Then = Callable[[Result], None]


class Transfers:
    """The one way from an instance's pool to its connector. Lives on the engine thread.

    Attributes:
        num_holding: transfers whose blocks are still held; those that peers read in place may outlive their request.
    """

    def __init__(self, pool: BlockPool, connector: Connector, desk: Desk) -> None:
        self._pool = pool
        self._connector = connector
        self._desk = desk
        self.num_holding = 0

    def store(self, job: Job, keys: Sequence[bytes], blocks: list[int], lease_s: float, then: Then) -> None:
        """`then` gets the result on the engine thread; until it is called, `job.transfers` counts the transfer."""
        self._watch(job, blocks, self._connector.store(keys, blocks, lease_s=lease_s), then)

    def load(
        self, job: Job, keys: Sequence[bytes], blocks: list[int], then: Then, tickets: Sequence[bytes] = ()
    ) -> None:
        """As `store`."""
        self._watch(job, blocks, self._connector.load(keys, blocks, tickets=tickets), then)

    def _watch(self, job: Job, blocks: list[int], future: Future[Result], then: Then) -> None:
        self._pool.hold(blocks)
        self.num_holding += 1
        job.transfers += 1
        self._desk.when_done(future, lambda result: self._done(job, blocks, result, then))

    def _done(self, job: Job, blocks: list[int], result: Result, then: Then) -> None:
        job.transfers -= 1
        if result.held is None:
            self._let_go(blocks)
        else:
            self._desk.when_done(result.held, lambda _: self._let_go(blocks))
        then(result)

    def _let_go(self, blocks: list[int]) -> None:
        self.num_holding -= 1
        self._pool.release(blocks)
