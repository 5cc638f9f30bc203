"""Admission: the limits of API keys, and a fair queue while the maximum number of requests is running.

A key that runs less than its share does not wait for others: it may exceed the maximum.

slot = queue.enter(key, ...)      admitted or queued; raises if the request is refused
slot.on_decision = ...            called when a queued request has been admitted or dropped
slot.release(tokens)              however the request ended
"""

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded, RequestError
from pdserve.request import ARRIVALS_PER_PRIORITY
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey
from pdserve.router.limits.quota import Quota
from pdserve.router.telemetry.metrics import Metrics

Item = TypeVar("Item")


@dataclass(eq=False)
class AdmissionSlot:
    """The capacity that one HTTP request holds: places for its choices, running or queued, and tokens of its key.

    Attributes:
        key: name of the API key.
        max_tokens: the most tokens that it can use, prompts and outputs.
        entered_at: when it was queued, on the router's clock.
        is_admitted: False while it is queued, and after it has been dropped.
        refusal: why it was dropped from the queue; None if it was not.
        on_decision: called without arguments when it leaves the queue, admitted or dropped. It only wakes the waiting caller,
            which acts later: the call comes from the middle of a loop over the queue.
    """

    queue: "AdmissionQueue"
    key: str
    choices: int
    prompt_tokens: int
    max_tokens: int
    entered_at: float = 0.0
    is_admitted: bool = False
    refusal: RequestError | None = None
    on_decision: Callable[[], object] = lambda: None
    released: bool = False

    def release(self, tokens: int) -> None:
        """Return the capacity; `tokens` were used, prompts and outputs. Only the first call has an effect."""
        if not self.released:
            self.released = True
            self.queue.release(self, tokens)


class AdmissionQueue:
    """Decides when requests may start.

    Attributes:
        quotas: the limits of each key, by its name, and its use if it has any.
        limited: those of them that limit anything.
        weights: the share of each key, by its name.
        tenants: what instances know of each key, by its name.
    """

    def __init__(
        self, keys: Sequence[ApiKey], config: RouterConfig, metrics: Metrics, now: Callable[[], float]
    ) -> None:
        """`now` is the router's clock, in seconds."""
        all_keys = [*keys, ApiKey(ANONYMOUS, b"")]
        self.quotas = {key.name: Quota(key.limits) for key in all_keys}
        self.limited = {name: quota for name, quota in self.quotas.items() if quota.is_limited}
        self.weights = {key.name: key.weight for key in all_keys}
        self.tenants = {key.name: key.tenant for key in all_keys}
        self._queue = FairQueue[AdmissionSlot](self.weights)
        self._free = self._max_requests = config.max_requests
        self._running = Counter[str]()  # choices, by key
        self._max_queue = config.max_queue
        self._metrics = metrics
        self._now = now
        metrics.queued = self.queued
        metrics.key_names.update((f"{tenant.id:x}", name) for name, tenant in self.tenants.items())
        for name in self.quotas:
            metrics.key_waiting.labels(key=name).set_function(partial(self._queue.num_queued, name))

    def check(self, key: str, choices: int = 1) -> None:
        """Refuse a request of a limited key that has none left, before work is done for it. Raises RequestError."""
        if (refusal := self.limited[key].refusal(choices, 0, self._now())) is not None:
            self._count_refusal(key, refusal)
            raise refusal

    def charge(self, key: str) -> None:
        """Count a request that is not admitted, but has cost work, unless the key has none left."""
        quota, now = self.limited.get(key), self._now()
        if quota is not None and quota.refusal(0, 0, now) is None:
            quota.take(0, 0, now)

    def enter(
        self, key: str, prompt_tokens: int, max_tokens: int, choices: int = 1, priority: int = 0
    ) -> AdmissionSlot:
        """Admit or queue a request.

        Args:
            prompt_tokens: tokens of all prompts.
            max_tokens: the most tokens that it can use, prompts and outputs.
            choices: the places that it needs.
            priority: within its key, lower is served first.

        Raises:
            RequestError: it exceeds a limit of its key, or the queue is full.
        """
        if (quota := self.limited.get(key)) is not None:
            now = self._now()
            if (refusal := quota.refusal(choices, max_tokens, now)) is not None:
                self._count_refusal(key, refusal)
                raise refusal
            quota.take(choices, max_tokens, now)
        slot = AdmissionSlot(self, key, choices, prompt_tokens, max_tokens)
        if choices <= self._free and not self._queue.backlogged:
            self._queue.pass_by(key, prompt_tokens)
            self._admit(slot)
            return slot
        slot.entered_at = self._now()
        self._queue.push(key, slot, prompt_tokens, priority)
        self._admit_queued()
        if len(self._queue) > self._max_queue:
            self._drop_one()
        if slot.refusal is not None:
            slot.release(0)
            raise slot.refusal
        return slot

    def release(self, slot: AdmissionSlot, tokens: int) -> None:
        """Free the capacity of a slot, running or queued, and admit requests that now fit."""
        tokens = min(tokens, slot.max_tokens)
        if (quota := self.limited.get(slot.key)) is not None:
            quota.give_back(slot.choices, slot.max_tokens - tokens, self._now())
        if slot.is_admitted:
            self._free += slot.choices
            self._running[slot.key] -= slot.choices
            self._metrics.key_requests.labels(key=slot.key).dec(slot.choices)
            self._metrics.key_tokens.labels(key=slot.key).inc(tokens)
            self._queue.charge(slot.key, max(0, tokens - slot.prompt_tokens))
        elif slot.refusal is None:
            self._queue.remove(slot.key, slot)
        if self._queue.backlogged:
            self._admit_queued()

    def queued(self) -> list[tuple[float, int]]:
        """Return when each queued request came, and its prompt tokens."""
        return [(slot.entered_at, slot.prompt_tokens) for slot in self._queue]

    def headers(self, key: str) -> dict[str, str]:
        """Return OpenAI's rate-limit headers for the key."""
        return self.limited[key].headers(self._now()) if key in self.limited else {}

    def _admit_queued(self) -> None:
        """Admit queued requests in order. A request that needs several places is not overtaken by smaller ones."""
        while (key := self._next_key()) is not None:
            slot = self._queue.pop(key)
            self._admit(slot)
            slot.on_decision()

    def _admit(self, slot: AdmissionSlot) -> None:
        self._free -= slot.choices
        self._running[slot.key] += slot.choices
        self._metrics.key_requests.labels(key=slot.key).inc(slot.choices)
        slot.is_admitted = True

    def _next_key(self) -> str | None:
        """Return the key whose first request may start, if there is one.

        What others run cannot be called back, and instances are shared by weight. So a key need not wait for a place while it
        runs nothing, or no more than its share of all places would be; at most as many choices run above the limit.
        """
        if (first := self._queue.peek()) is None or first.choices <= self._free:
            return first.key if first is not None else None
        if self._free <= -self._max_requests:
            return None
        heads = [slot for key in self._queue.keys_in_turn() if (slot := self._queue.peek(key)) is not None]
        places = self._max_requests / sum(self.weights[key] for key in {slot.key for slot in heads} | {*+self._running})
        for slot in heads:
            running = self._running[slot.key]
            if not running or running + slot.choices <= places * self.weights[slot.key]:
                return slot.key
        return None

    def _drop_one(self) -> None:
        slot = self._queue.drop()
        running = self._max_requests - self._free
        message = (
            f"the router is full: {running} requests are running and {len(self._queue)} are queued "
            "(limits: --max-requests and --max-queue)"
        )
        slot.refusal = Overloaded(message, kind="max_requests", retry_after_s=1)
        self._count_refusal(slot.key, slot.refusal)
        slot.on_decision()

    def _count_refusal(self, key: str, refusal: RequestError) -> None:
        self._metrics.refusals.labels(reason=refusal.kind).inc()
        self._metrics.key_refusals.labels(key=key, reason=refusal.kind).inc()


class _KeyQueue(Generic[Item]):
    """The queued requests of one key, as sorted tuples (rank, arrival, tokens, item), and its counter."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.entries: list[tuple[int, int, int, Item]] = []


class FairQueue(Generic[Item]):
    """Weighted fair queue over API keys (Virtual Token Counter: Sheng et al., "Fairness in Serving LLMs", 2024).

    Each key has a counter: the tokens that its requests have used, divided by its weight. The key with the lowest
    counter is served next. A request's prompt is charged when it leaves the queue and its output when it ends. Keys
    that always have requests queued therefore share the tokens in proportion to their weights, whatever the sizes of
    their requests, and no key starves. An idle key saves up no credit: when it queues a request again, its counter is
    raised to that of the key served last. Within a key, requests are ordered by priority (lower first), then by
    arrival; one level of priority is worth `ARRIVALS_PER_PRIORITY` arrivals, as in the scheduler of the instances.

    Its length is unbounded; the caller limits it with `drop`.

    Attributes:
        backlogged: the queues of keys that are not empty.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` maps every key to its weight, which is above 0."""
        self._queues = {key: _KeyQueue[Item](weight) for key, weight in weights.items()}
        self.backlogged: dict[str, _KeyQueue[Item]] = {}
        self._arrivals = 0
        self._last_counter = 0.0  # the highest counter at which an item has been popped

    def __len__(self) -> int:
        return sum(len(queue.entries) for queue in self.backlogged.values())

    def __iter__(self) -> Iterator[Item]:
        return (item for queue in self.backlogged.values() for *_, item in queue.entries)

    def num_queued(self, key: str) -> int:
        return len(self._queues[key].entries)

    def push(self, key: str, item: Item, tokens: int, priority: int = 0) -> None:
        """Queue an item. `tokens`, 1 or more, are charged to the key when the item is popped."""
        assert tokens > 0, tokens
        queue = self._queues[key]
        if not queue.entries:
            queue.counter = max(queue.counter, self._last_counter)
            self.backlogged[key] = queue
        self._arrivals += 1
        rank = self._arrivals + ARRIVALS_PER_PRIORITY * priority
        bisect.insort(queue.entries, (rank, self._arrivals, tokens, item))  # no two have the same arrival

    def pass_by(self, key: str, tokens: int) -> None:
        """Charge an item that is served at once because nothing is queued, as if it had been pushed and popped."""
        assert tokens > 0 and not self.backlogged, tokens
        queue = self._queues[key]
        self._last_counter = max(queue.counter, self._last_counter)
        queue.counter = self._last_counter + tokens / queue.weight

    def next_key(self) -> str | None:
        """Return the key that is served next; None if the queue is empty."""
        return min(self.backlogged, key=lambda name: self.backlogged[name].counter, default=None)

    def keys_in_turn(self) -> list[str]:
        """Return the keys with queued items, the one that is served next first."""
        return sorted(self.backlogged, key=lambda name: self.backlogged[name].counter)

    def peek(self, key: str | None = None) -> Item | None:
        """Return the item that `pop` would return, or None if there is none."""
        queue = self.backlogged.get(key or self.next_key() or "")
        return queue.entries[0][-1] if queue is not None else None

    def pop(self, key: str | None = None) -> Item:
        """Remove and return the first item of a key, by default of the next one, and charge its tokens to the key."""
        key = key or self.next_key()
        assert key is not None, "the queue is empty"
        queue = self.backlogged[key]
        self._last_counter = max(self._last_counter, queue.counter)
        _, _, tokens, item = queue.entries.pop(0)
        self.charge(key, tokens)
        self._discard_if_empty(key)
        return item

    def charge(self, key: str, tokens: int) -> None:
        """Charge further tokens, such as an output, for an item popped earlier."""
        queue = self._queues[key]
        queue.counter += tokens / queue.weight

    def remove(self, key: str, item: Item) -> None:
        """Remove a queued item without charging its key."""
        entries = self.backlogged[key].entries
        del entries[next(i for i, entry in enumerate(entries) if entry[-1] is item)]
        self._discard_if_empty(key)

    def drop(self) -> Item:
        """Remove and return the last item of the key with the longest queue relative to its weight.

        When the queue is full, this sheds load from the heaviest sender and not from keys that arrive later or send less.
        """
        key = max(self.backlogged, key=lambda name: len(self.backlogged[name].entries) / self.backlogged[name].weight)
        *_, item = self.backlogged[key].entries.pop()
        self._discard_if_empty(key)
        return item

    def _discard_if_empty(self, key: str) -> None:
        if not self._queues[key].entries:
            del self.backlogged[key]
