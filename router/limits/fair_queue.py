"""In which order those who wait are let in: the key goes first that has had the least for its weight.

A key's account is what its requests have taken, in tokens divided by its weight: the prompt when one is let in, the output
when it has ended. So among keys that always have somebody waiting each gets its weight's share of the tokens, whatever the
sizes of their requests, and nobody starves. A key for which nobody waited saves nothing up: its account is raised to that
of whoever was let in last. (Sheng et al., Fairness in Serving Large Language Models, 2024.) Within a key, lower
priorities go first, and equals in order of arrival; a level of priority is worth `LEVEL` arrivals, as on the instances.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.request import LEVEL

Item = TypeVar("Item")


@dataclass(order=True)
class _Waiting(Generic[Item]):
    rank: int
    arrival: int
    tokens: int = field(compare=False)
    item: Item = field(compare=False)


class _Lane(Generic[Item]):
    """Those of one key."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.account = 0.0
        self.heap: list[_Waiting[Item]] = []


class FairQueue(Generic[Item]):
    """How long it may become is the caller's to say: see `drop`."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are those of all keys that there are; more than 0."""
        self._lanes = {key: _Lane[Item](weight) for key, weight in weights.items()}
        self._busy: dict[str, _Lane[Item]] = {}  # in which somebody waits
        self._arrivals = 0
        self._last = 0.0  # the highest account with which somebody was let in

    def __len__(self) -> int:
        return sum(len(lane.heap) for lane in self._busy.values())

    def __iter__(self) -> Iterator[Item]:
        return (waiting.item for lane in self._busy.values() for waiting in lane.heap)

    def push(self, key: str, item: Item, tokens: int, priority: int = 0) -> None:
        """`tokens`, 1 or more, are what it takes when it is let in."""
        assert tokens > 0, tokens
        lane = self._lanes[key]
        if not lane.heap:
            lane.account = max(lane.account, self._last)
            self._busy[key] = lane
        self._arrivals += 1
        heapq.heappush(lane.heap, _Waiting(self._arrivals + LEVEL * priority, self._arrivals, tokens, item))

    def first(self) -> Item | None:
        """Who is to be let in next."""
        return self._busy[self._next()].heap[0].item if self._busy else None

    def pop(self) -> Item:
        """Takes out the first, at its key's expense."""
        key = self._next()
        lane = self._busy[key]
        self._last = max(self._last, lane.account)
        waiting = heapq.heappop(lane.heap)
        self.charge(key, waiting.tokens)
        self._tidy(key)
        return waiting.item

    def charge(self, key: str, tokens: int) -> None:
        """For what one that was let in has taken besides."""
        lane = self._lanes[key]
        lane.account += tokens / lane.weight

    def remove(self, key: str, item: Item) -> None:
        """Takes out one that does not want to wait any more."""
        lane = self._busy[key]
        lane.heap = [waiting for waiting in lane.heap if waiting.item is not item]
        heapq.heapify(lane.heap)
        self._tidy(key)

    def drop(self) -> Item:
        """Takes out the last of the key that has the most waiting for its weight: when there is no room for all, it is not
        those who come later, or send less, who must go."""
        key = max(self._busy, key=lambda name: len(self._busy[name].heap) / self._busy[name].weight)
        item = max(self._busy[key].heap).item
        self.remove(key, item)
        return item

    def _next(self) -> str:
        return min(self._busy, key=lambda name: self._busy[name].account)

    def _tidy(self, key: str) -> None:
        if not self._lanes[key].heap:
            del self._busy[key]
