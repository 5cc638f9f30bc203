"""Weighted fair queue over API keys (Virtual Token Counter: Sheng et al., "Fairness in Serving LLMs", 2024).

Each key has a counter: the tokens that its requests have used, divided by its weight. The key with the lowest counter is
served next. A request's prompt is charged when it leaves the queue and its output when it ends. Keys that always have
requests queued therefore share the tokens in proportion to their weights, whatever the sizes of their requests, and no key
starves. An idle key saves up no credit: when it queues a request again, its counter is raised to that of the key served
last. Within a key, requests are ordered by priority (lower first), then by arrival; one level of priority is worth
`ARRIVALS_PER_PRIORITY` arrivals, as in the scheduler of the instances.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.request import ARRIVALS_PER_PRIORITY

Item = TypeVar("Item")


@dataclass(order=True)
class _Entry(Generic[Item]):
    rank: int
    arrival: int
    tokens: int = field(compare=False)
    item: Item = field(compare=False)


class _KeyQueue(Generic[Item]):
    """The queued requests of one key, as a heap, and its counter."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.heap: list[_Entry[Item]] = []


class FairQueue(Generic[Item]):
    """Queue of items, each belonging to a key. Its length is unbounded; the caller limits it with `drop`.

    Attributes:
        backlogged: the queues that are not empty, by key.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` maps every key to its weight, which is above 0."""
        self._queues = {key: _KeyQueue[Item](weight) for key, weight in weights.items()}
        self.backlogged: dict[str, _KeyQueue[Item]] = {}
        self._arrivals = 0
        self._last_counter = 0.0  # the highest counter at which an item has been popped

    def __len__(self) -> int:
        return sum(len(queue.heap) for queue in self.backlogged.values())

    def __iter__(self) -> Iterator[Item]:
        return (entry.item for queue in self.backlogged.values() for entry in queue.heap)

    def num_queued(self, key: str) -> int:
        return len(self._queues[key].heap)

    def push(self, key: str, item: Item, tokens: int, priority: int = 0) -> None:
        """Queue an item. `tokens`, 1 or more, are charged to the key when the item is popped."""
        assert tokens > 0, tokens
        queue = self._queues[key]
        if not queue.heap:
            queue.counter = max(queue.counter, self._last_counter)
            self.backlogged[key] = queue
        self._arrivals += 1
        heapq.heappush(
            queue.heap, _Entry(self._arrivals + ARRIVALS_PER_PRIORITY * priority, self._arrivals, tokens, item)
        )

    def pass_by(self, key: str, tokens: int) -> None:
        """Charge a key for an item that need not wait, as `push` and `pop` would while the queue is empty."""
        queue = self._queues[key]
        self._last_counter = queue.counter = max(queue.counter, self._last_counter)
        queue.counter += tokens / queue.weight

    def next_key(self) -> str | None:
        """Return the key that is served next; None if the queue is empty."""
        return min(self.backlogged, key=lambda name: self.backlogged[name].counter, default=None)

    def keys_in_turn(self) -> list[str]:
        """Return the keys with queued items, the one that is served next first."""
        return sorted(self.backlogged, key=lambda name: self.backlogged[name].counter)

    def peek(self, key: str | None = None) -> Item | None:
        """Return the item that `pop` would return, or None if there is none."""
        queue = self.backlogged.get(key or self.next_key() or "")
        return queue.heap[0].item if queue is not None else None

    def pop(self, key: str | None = None) -> Item:
        """Remove and return the first item of a key, by default of the next one, and charge its tokens to the key."""
        key = key or self.next_key()
        assert key is not None, "the queue is empty"
        queue = self.backlogged[key]
        self._last_counter = max(self._last_counter, queue.counter)
        entry = heapq.heappop(queue.heap)
        self.charge(key, entry.tokens)
        self._discard_if_empty(key)
        return entry.item

    def charge(self, key: str, tokens: int) -> None:
        """Charge further tokens, such as an output, for an item popped earlier."""
        queue = self._queues[key]
        queue.counter += tokens / queue.weight

    def remove(self, key: str, item: Item) -> None:
        """Remove a queued item without charging its key."""
        queue = self.backlogged[key]
        queue.heap = [entry for entry in queue.heap if entry.item is not item]
        heapq.heapify(queue.heap)
        self._discard_if_empty(key)

    def drop(self) -> Item:
        """Remove and return the last item of the key with the longest queue relative to its weight.

        When the queue is full, this sheds load from the heaviest sender and not from keys that arrive later or send less.
        """
        key = max(self.backlogged, key=lambda name: len(self.backlogged[name].heap) / self.backlogged[name].weight)
        item = max(self.backlogged[key].heap).item
        self.remove(key, item)
        return item

    def _discard_if_empty(self, key: str) -> None:
        if not self._queues[key].heap:
            del self.backlogged[key]
