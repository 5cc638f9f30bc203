"""One connector for a pool of several groups of blocks: each group has an attached connector of its own.

A group's layout is its namespace in the store, so its blocks have the same keys as those of the other groups, and never meet
them. Block ids say which group is meant: those of different groups differ (`BlockPool`). Transfers name each block of each
group, with the key once for each.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from typing import Any, Protocol, TypeVar

import torch

from pdserve.keys import STATE_WINDOW, Layout
from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    GrowingStore,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
    request_cancel,
)
from pdserve.kv_transfer.staging import attach_pool
from pdserve.kv_transfer.tickets import join_tickets, tickets_of_rank

MAX_MATCHES = 8  # questions to the store of a group that lacks what the longest prefix needs
MAX_STATE_MATCHES = 64  # numbers of tokens at which it is asked for a state, the longest first
STATE_GROWTH = 8  # by which more of them are asked for at once, if the first has none: mostly it has one

T = TypeVar("T")
R = TypeVar("R")


class PoolViews(Protocol):
    """The tensors of a pool, one for each group of blocks, and the copies of its blocks; `KVMemory` has them."""

    @property
    def views(self) -> Sequence[torch.Tensor]: ...

    @property
    def copies(self) -> Any: ...


def attach_groups(first: Connector, connect: Callable[[], Connector], kv: PoolViews, layout: Layout) -> Connector:
    """Attach a pool to a connector, or to one for each of its groups, and return what to use.

    Args:
        first: of the first group.
        connect: makes the others.

    Raises:
        SetupError: as `attach_pool`.
    """
    attached = []
    for at, group in enumerate(layout.groups):
        connector = connect() if at else first
        connector.may_start_out = True
        attached.append(attach_pool(connector, kv.views[at], group, lambda at=at: kv.copies(at)))  # type: ignore[misc]
        attached[-1].has_started_out = connector.has_started_out
    return attached[0] if len(attached) == 1 else GroupedConnector(attached, layout, [len(one) for one in kv.views])


class GroupedConnector(Connector):
    """Combines the attached connectors of the groups.

    Args:
        sizes: blocks of each group.
    """

    scheme = "grouped"

    def __init__(self, parts: Sequence[Connector], layout: Layout, sizes: Sequence[int]) -> None:
        self.scheme = parts[0].scheme  # type: ignore[misc]  # a class attribute in other connectors
        self.has_started_out = any(part.has_started_out for part in parts)
        self._parts = parts
        self._groups = layout.groups
        self._first_ids = [sum(sizes[:at]) for at in range(len(sizes))]
        self._calling = threading.Lock()  # a match goes on in the thread in which that of another group ends

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._parts[0].capabilities, stores_growing=False, cancels=True)

    def attach(self, memory: PoolMemory) -> None:
        raise AssertionError("the parts are attached")

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._each(keys, block_ids, lambda at, part, *blocks: part.store(*blocks, lease_s=lease_s))

    def store_growing(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> GrowingStore:
        raise AssertionError("the capability is not there")

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._each(
            keys, block_ids, lambda at, part, *blocks: part.load(*blocks, tickets=self._tickets(tickets, at))
        )

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._each(keys, block_ids, lambda at, part, *blocks: part.follow(*blocks, patience_s=patience_s))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        """Count the leading keys of the first group of which the others have what the token behind them reaches."""
        found: Future[int] = Future()
        self._match(list(keys), 0, 0, found)
        return found

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        """End the leases of the first group's blocks, and those of tickets."""
        self.release_blocks(keys, [0] * len(keys), tickets=tickets)

    def release_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> None:
        """End the leases of blocks, each in the group of its id: other prompts may have leased its key in another group."""
        for at, places in enumerate(self._places(block_ids)):
            of_group = self._tickets(tickets, at)
            if places or of_group:
                with self._calling:
                    self._parts[at].release([keys[place] for place in places], tickets=of_group)

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        for at, part in enumerate(self._parts):
            with self._calling:
                part.prolong(keys, lease_s=lease_s, tickets=self._tickets(tickets, at))

    def stats(self) -> Stats:
        """Return the sum of the groups' counters; of a combined store, of each part too."""
        return reduce(Stats.plus, (part.stats() for part in self._parts))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _tickets(self, tickets: Sequence[bytes], at: int) -> list[bytes]:
        return tickets_of_rank(tickets, at, len(self._parts))

    def _places(self, block_ids: Sequence[int]) -> list[list[int]]:
        """Return the places of each group's ids."""
        places: list[list[int]] = [[] for _ in self._parts]
        for place, block in enumerate(block_ids):
            places[sum(block >= first for first in self._first_ids) - 1].append(place)
        return places

    def _each(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        start: Callable[[int, Connector, list[bytes], list[int]], Future[Result]],
    ) -> Future[Result]:
        """Start a transfer of each group that has some of the blocks, and return the future of all."""
        places = self._places(block_ids)
        futures = dict[int, Future[Result]]()
        for at, of_group in enumerate(places):
            if of_group:
                ids = [block_ids[place] - self._first_ids[at] for place in of_group]
                with self._calling:
                    futures[at] = start(at, self._parts[at], [keys[place] for place in of_group], ids)

        def join(results: list[Result]) -> Result:
            outcomes, tickets = [Outcome.OK] * len(block_ids), [b""] * len(self._parts)
            for at, result in zip(futures, results, strict=True):
                tickets[at] = result.ticket
                for place, outcome in zip(places[at], result.outcomes, strict=True):
                    outcomes[place] = outcome
            seconds = max((one.seconds for one in results), default=0.0)
            return Result(outcomes, seconds, join_tickets(tickets), joined_held(results))

        def cancel() -> None:
            for future in futures.values():
                request_cancel(future)

        return when_all([*futures.values()], join, OperationFuture(cancel))

    def _match(self, keys: list[bytes], at: int, asked: int, found: Future[int]) -> None:
        """Ask group `at` and those behind it of how many leading keys they have what is needed."""
        size, window = self._groups[at].block_size, self._groups[at].window
        first = max(0, len(keys) * size + 1 - window) // size if at else 0  # as `Group.num_unreached`
        if not keys or asked > MAX_MATCHES:
            found.set_result(0)
            return
        if at and window == STATE_WINDOW:
            self._match_states(keys, at, 0, asked, found)
            return

        def on_matched(count: int) -> None:
            stop = first + count
            if at and stop < len(keys):  # of fewer keys, all groups have to be asked
                self._match(keys[:stop], 1, asked + 1, found)
            elif at + 1 < len(self._parts):
                self._match(keys[:stop], at + 1, asked, found)
            else:
                found.set_result(stop)

        if first == len(keys):
            on_matched(0)
            return
        with self._calling:
            matched = self._parts[at].match(keys[first:])
        _then(matched, on_matched, found)

    def _match_states(self, keys: list[bytes], at: int, tried: int, asked: int, found: Future[int]) -> None:
        """Ask the last group for the longest prefixes that have a state behind them, but for those that were tried."""
        stop = min(len(keys), tried * STATE_GROWTH or 1)
        if tried == stop or tried >= MAX_STATE_MATCHES:
            found.set_result(0)
            return
        lengths = range(len(keys) - tried, len(keys) - stop, -1)

        def on_matched(counts: list[int]) -> None:
            length = next((length for length, count in zip(lengths, counts, strict=True) if count), 0)
            if not length:
                self._match_states(keys, at, stop, asked, found)
            elif at == 1 or length == len(keys):
                found.set_result(length)
            else:  # of fewer keys, the windows have to be asked
                self._match(keys[:length], 1, asked + 1, found)

        with self._calling:
            matched = [self._parts[at].match(keys[length - 1 : length]) for length in lengths]
        _then(when_all(matched, list, Future()), on_matched, found)


def _then(future: Future[T], on_result: Callable[[T], None], found: Future[int]) -> None:
    """Call `on_result` once a future is done; an exception, also of that call, goes to `found`."""

    def on_done(done: Future[T]) -> None:
        try:
            on_result(done.result())
        except Exception as error:  # noqa: BLE001 - passed on
            found.set_exception(error)

    future.add_done_callback(on_done)


def joined_held(results: Sequence[Result]) -> Future[None] | None:
    """Return the future of the end of all that results hold; None if they hold nothing."""
    held = [result.held for result in results if result.held is not None]
    return when_all(held, lambda _: None, Future()) if held else None


def when_all(futures: Sequence[Future[T]], combine: Callable[[list[T]], R], combined: Future[R]) -> Future[R]:
    """Complete a future once all others are done, with what `combine` makes of their results, or the first exception."""
    lock, left = threading.Lock(), 1 + len(futures)  # one for the start: there may be no others

    def on_done(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            result = combine([future.result() for future in futures])
        except Exception as error:  # noqa: BLE001 - passed on
            combined.set_exception(error)
        else:
            combined.set_result(result)

    for future in futures:
        future.add_done_callback(on_done)
    on_done(None)
    return combined
