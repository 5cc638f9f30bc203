"""The connector of several ranks: a block is what all of its slices are."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
    request_cancel,
)
from pdserve.kv_transfer.tickets import join_tickets, tickets_of_rank
from pdserve.ranks.followers import Followers
from pdserve.ranks.messages import Cancel, OnLeases, Transfer
from pdserve.ranks.ranked_connector import RankedConnector

OK, MISSING, FULL = Outcome.OK, Outcome.MISSING, Outcome.FULL
KEYS = [bytes([i]) * 16 for i in range(3)]


class OneFollower:
    """A follower whose replies the test gives."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: list[Future[Any]] = []

    def __len__(self) -> int:
        return 1

    def attach(self) -> None: ...

    def send(self, command: Any) -> None:
        self.sent.append(command)

    def send_each(self, make: Callable[[int], Any]) -> None:
        self.sent.append(make(1))

    def transfer(self, make: Callable[[int, int], Any]) -> tuple[int, list[Future[Any]]]:
        self.sent.append(make(7, 1))
        self.replies.append(Future())
        return 7, self.replies[-1:]

    def match(self, make: Callable[[int], Any]) -> list[Future[Any]]:
        return self.transfer(lambda operation, _: make(operation))[1]


class Own(Connector):
    """The connector of rank 0, whose futures the test completes."""

    scheme = "own"

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.calls: list[Any] = []
        self.was_cancelled = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(follows=True)

    def attach(self, memory: PoolMemory) -> None: ...

    def store(self, keys: Any, block_ids: Any, *, lease_s: float) -> Future[Result]:
        self.future = OperationFuture(lambda: setattr(self, "was_cancelled", True))
        return self.future

    def load(self, keys: Any, block_ids: Any, *, tickets: Any = ()) -> Future[Result]:
        self.calls.append(list(tickets))
        return self.store(keys, block_ids, lease_s=0)

    def follow(self, keys: Any, block_ids: Any, *, patience_s: float) -> Future[Result]:
        return self.store(keys, block_ids, lease_s=0)

    def match(self, keys: Any) -> Future[int]:
        self.future = Future()
        return self.future

    def release(self, keys: Any, *, tickets: Any = ()) -> None:
        self.calls.append(list(tickets))

    def stats(self) -> Stats:
        return Stats(bytes={"store": 100, "load": 10})

    def close(self) -> None: ...


@pytest.fixture
def parts() -> tuple[RankedConnector, Own, OneFollower]:
    own, follower = Own(), OneFollower()
    return RankedConnector(own, cast(Followers, follower)), own, follower


Parts = tuple[RankedConnector, Own, OneFollower]


def test_a_block_is_stored_if_all_slices_are(parts: Parts) -> None:
    connector, own, follower = parts
    future = connector.store(KEYS, [4, 5, 6], lease_s=60)
    assert follower.sent == [Transfer(7, "store", KEYS, [4, 5, 6], {"lease_s": 60})]
    own.future.set_result(Result([OK, OK, FULL], 0.5))
    assert not future.done()
    follower.replies[0].set_result(Result([OK, FULL, OK], 0.25))
    assert future.result(600) == Result([OK, FULL, FULL], 0.5)
    assert connector.stats().failures == {("store", FULL): 1}, "which only the follower had"
    assert connector.stats().bytes == {"store": 200, "load": 20}


@pytest.mark.parametrize(("mine", "other", "both"), [(3, 2, 2), (1, 3, 1)])
def test_match_counts_what_all_ranks_have(mine: int, other: int, both: int, parts: Parts) -> None:
    connector, own, follower = parts
    future = connector.match(KEYS)
    follower.replies[0].set_result(other)
    own.future.set_result(mine)
    assert future.result(600) == both


def test_cancellation_reaches_all_ranks(parts: Parts) -> None:
    connector, own, follower = parts
    assert connector.capabilities.cancels and connector.follows and connector.scheme == "own"
    request_cancel(connector.follow(KEYS, [0, 1, 2], patience_s=1))
    assert own.was_cancelled and follower.sent[-1] == Cancel(7)


def test_tickets_are_joined_and_divided(parts: Parts) -> None:
    connector, own, follower = parts
    held: list[Future[None]] = [Future(), Future()]
    future = connector.store(KEYS[:1], [0], lease_s=60)
    own.future.set_result(Result([OK], 0, b"first", held[0]))
    follower.replies[0].set_result(Result([OK], 0, b"second", held[1]))
    result = future.result(600)
    assert result.held is not None and [tickets_of_rank([result.ticket], rank, 2) for rank in (0, 1)] == [
        [b"first"],
        [b"second"],
    ]
    held[0].set_result(None)
    assert not result.held.done()
    held[1].set_result(None)
    assert result.held.done()

    connector.load(KEYS[:1], [1], tickets=[result.ticket, b"broken"])
    connector.release([], tickets=[join_tickets([b"mine", b"yours"])])
    assert own.calls == [[b"first"], [b"mine"]]
    load, release = Transfer(7, "load", KEYS[:1], [1], {"tickets": [b"second"]}), {"tickets": [b"yours"]}
    assert follower.sent[1:] == [load, OnLeases("release", [], release)]


def test_errors_are_passed_on(parts: Parts) -> None:
    connector, own, follower = parts
    future = connector.store(KEYS, [0, 1, 2], lease_s=0)
    own.future.set_exception(ValueError("a programming error"))
    follower.replies[0].set_result(Result([OK] * 3, 0))
    with pytest.raises(ValueError, match="programming"):
        future.result(600)
    with pytest.raises(AssertionError):
        connector.attach(PoolMemory(np.zeros((1, 1), np.uint8), cast(Layout, None)))
