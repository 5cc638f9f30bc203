"""One connector for all ranks: each rank moves its slice of a block, and a block is there only if all of its slices are."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
    first_failure,
    request_cancel,
)
from pdserve.kv_transfer.forwarding import ForwardingConnector
from pdserve.kv_transfer.grouped import joined_held, when_all
from pdserve.kv_transfer.tickets import join_tickets, tickets_of_rank
from pdserve.ranks.followers import Followers
from pdserve.ranks.messages import Cancel, Match, OnLeases, Transfer

Options = Callable[[int], dict[str, Any]]  # keyword arguments of a connector's method, by rank


class RankedConnector(ForwardingConnector):
    """Wraps the attached connector of rank 0, and has the followers do the same with theirs."""

    def __init__(self, own: Connector, followers: Followers) -> None:
        super().__init__(own)
        self._followers = followers
        self._lost = Stats()  # blocks whose slice only followers failed to move
        self._lock = threading.Lock()
        followers.attach()

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, cancels=True)

    def attach(self, memory: PoolMemory) -> None:
        raise AssertionError("the constructor attaches")

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._transfer("store", keys, block_ids, lambda _: {"lease_s": lease_s})

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._transfer("load", keys, block_ids, lambda rank: {"tickets": self._tickets(tickets, rank)})

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._transfer("follow", keys, block_ids, lambda _: {"patience_s": patience_s})

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        others = self._followers.match(lambda operation: Match(operation, list(keys)))
        return when_all([super().match(keys), *others], min, Future())

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._on_leases("release", keys, lambda rank: {"tickets": self._tickets(tickets, rank)})

    def release_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> None:
        ids = list(block_ids)
        self._on_leases(
            "release_blocks", keys, lambda rank: {"block_ids": ids, "tickets": self._tickets(tickets, rank)}
        )

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self._on_leases("prolong", keys, lambda rank: {"lease_s": lease_s, "tickets": self._tickets(tickets, rank)})

    def stats(self) -> Stats:
        """Return the counters of rank 0, with the bytes of all ranks, which move as many."""
        own, ranks = super().stats(), 1 + len(self._followers)
        with self._lock:
            total = own.plus(self._lost)
        return replace(total, bytes={direction: count * ranks for direction, count in own.bytes.items()})

    def _tickets(self, tickets: Sequence[bytes], rank: int) -> list[bytes]:
        return tickets_of_rank(tickets, rank, 1 + len(self._followers))

    def _on_leases(self, method: str, keys: Sequence[bytes], options: Options) -> None:
        self._followers.send_each(lambda rank: OnLeases(method, list(keys), options(rank)))
        getattr(self._inner, method)(keys, **options(0))

    def _transfer(
        self, method: str, keys: Sequence[bytes], block_ids: Sequence[int], options: Options
    ) -> Future[Result]:
        direction, blocks = "store" if method == "store" else "load", (list(keys), list(block_ids))
        sent = self._followers.transfer(lambda operation, rank: Transfer(operation, method, *blocks, options(rank)))
        own: Future[Result] = getattr(self._inner, method)(keys, block_ids, **options(0))

        def join(results: list[Result]) -> Result:
            result = join_results(results)
            with self._lock:
                for mine, outcome in zip(results[0].outcomes, result.outcomes, strict=True):
                    if mine is Outcome.OK and outcome not in (Outcome.OK, Outcome.MISSING):
                        self._lost.count_failures(direction, outcome, 1)
            return result

        return join_transfers(self._followers, own, *sent, join)


def join_transfers(
    followers: Followers,
    own: Future[Result],
    operation: int,
    others: list[Future[Result]],
    join: "Callable[[list[Result]], Result] | None" = None,
) -> Future[Result]:
    """Return the future of a transfer that all ranks make: rank 0's own, and the followers'."""

    def cancel() -> None:
        request_cancel(own)
        followers.send(Cancel(operation))

    return when_all([own, *others], join or join_results, OperationFuture(cancel))


def join_results(results: list[Result]) -> Result:
    """Return the result of a transfer of whole blocks from those of their slices, one per rank."""
    outcomes = [first_failure(slices) for slices in zip(*(result.outcomes for result in results), strict=True)]
    return Result(
        outcomes,
        max(result.seconds for result in results),
        join_tickets([result.ticket for result in results]),
        joined_held(results),
    )
