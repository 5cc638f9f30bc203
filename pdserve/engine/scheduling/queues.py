"""Queues of sequences, their order, and the levels of tenants: the running sequences of each, by its weight."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from itertools import count, islice
from operator import attrgetter, itemgetter
from typing import Any

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.request import Tenant

Place = tuple[float, int]  # in the order of sequences: the level of its tenant, and its rank
Order = Callable[[Sequence], Place]
Size = tuple[int, int, int, Sequence]  # of one without blocks: tokens to compute, rank, number in the order of queueing
_RANK, _FIRST = attrgetter("rank"), itemgetter(0)


class Queues:
    """The sequences of an instance in three queues, each in order of rank.

    Attributes:
        waiting: these hold no blocks.
        loaded: these hold blocks, but no slot: their KV was loaded, they are forks, or gave way.
        running: these hold blocks and a slot.
        by_tenant: all, in the order in which they came.
        unreserved: the next sequence that waits for `Scheduler.reserve`, outside of the queues; None if there is none.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.loaded: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_tenant: dict[Tenant, dict[Sequence, None]] = {}
        self.unreserved: Sequence | None = None
        self._sizes: dict[Sequence, Size] = {}  # of those that wait
        self._by_size: dict[Tenant, list[Size]] = {}  # the same, in order
        self._numbers = count()

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.loaded
        yield from self.waiting

    @property
    def has_rivals(self) -> bool:
        """True if several tenants have sequences here. Alone, a tenant has the order of rank, and no limits."""
        if self.unreserved is None or self.unreserved.tenant in self.by_tenant:
            return len(self.by_tenant) > 1
        return len(self.by_tenant) > 0

    def order(self) -> Callable[[Sequence], Any]:
        """Return the order of sequences in all queues, as a key: the level of the tenant if it has rivals, and the rank."""
        if not self.has_rivals:
            return _RANK
        levels = levels_of(self.running)
        return lambda seq: (levels.get(seq.tenant, 0.0), seq.rank)

    def queued(self, num_slots: int, late: AbstractSet[Sequence]) -> Iterator[Sequence]:
        """Yield sequences that could run, of each tenant as many as there are slots: if it were alone, they would."""
        running = late | {*self.running}
        for seqs in self.by_tenant.values():
            yield from islice((seq for seq in seqs if seq not in running), num_slots)

    def prompts_up_to(self, most: int, tenant: Tenant) -> list[Size]:
        """Return the waiting sequences of a tenant that are to compute 2 to `most` tokens, the shortest first."""
        sizes = self._by_size.get(tenant, [])
        return sizes[bisect_right(sizes, 1, key=_FIRST) : bisect_right(sizes, most, key=_FIRST)]

    def wait(self, seq: Sequence, num_tokens: int) -> None:
        """Queue a sequence without blocks, of which that many tokens are to be computed."""
        insort(self.waiting, seq, key=_RANK)
        self._sizes[seq] = num_tokens, seq.rank, next(self._numbers), seq
        insort(self._by_size.setdefault(seq.tenant, []), self._sizes[seq])

    def load(self, seq: Sequence) -> None:
        """Queue a sequence with blocks."""
        insort(self.loaded, seq, key=_RANK)

    def run(self, seq: Sequence) -> None:
        """Give a slot to a sequence that is in no queue."""
        insort(self.running, seq, key=_RANK)

    def take_slot(self, seq: Sequence) -> None:
        """Take the slot of a running sequence, which keeps its blocks."""
        self.running.remove(seq)
        self.load(seq)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence from its queue."""
        if seq in self._sizes:
            self.waiting.remove(seq)
            by_size = self._by_size[seq.tenant]
            del by_size[bisect_left(by_size, self._sizes.pop(seq))]
        elif seq in self.running:
            self.running.remove(seq)
        elif seq in self.loaded:
            self.loaded.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended."""
        self.take(seq)
        if seq in (of_tenant := self.by_tenant.get(seq.tenant, {})):
            del of_tenant[seq]
            if not of_tenant:
                del self.by_tenant[seq.tenant]
                self._by_size.pop(seq.tenant, None)


def levels_of(running: SequenceABC[Sequence]) -> dict[Tenant, float]:
    """Return the number of running sequences of each tenant that has some, divided by its weight."""
    counts = Counter(seq.tenant for seq in running)
    return {tenant: count / tenant.weight for tenant, count in counts.items()}


def giving_way(running: SequenceABC[Sequence], tenants: Iterable[Tenant]) -> dict[Tenant, Sequence]:
    """Return which running sequence gives way to a new one of each tenant; without tenants that would rise to its level."""
    levels = levels_of(running)
    candidates = [one for one in reversed(running) if one.may_give_way]
    victim = max(candidates, key=lambda one: (levels[one.tenant], one.rank), default=None)
    if victim is None:
        return {}
    highest = levels[victim.tenant]
    return {tenant: victim for tenant in tenants if levels.get(tenant, 0.0) + 1 / tenant.weight < highest}


def last_to_run(running: SequenceABC[Sequence], tenant: Tenant) -> Sequence:
    """Return the newest running sequence of the tenant of the highest level; of this one if no other is above it."""
    levels = levels_of(running)
    candidates = [one for one in reversed(running) if one.tenant == tenant or one.may_give_way]
    return max(candidates, key=lambda one: (levels[one.tenant], one.rank))


def tokens_now(
    tenants: Iterable[Tenant], running: Iterable[Sequence], queued: Iterable[Sequence], pool: BlockPool
) -> dict[Tenant, float]:
    """Return how many tokens of each tenant this step could compute, if the tenant were alone in it.

    Args:
        queued: those for which there is a slot; they count as far as the pool has room for those of their tenant.
    """
    tokens = dict.fromkeys(tenants, 0.0)
    blocks = dict.fromkeys(tokens, pool.num_spare)
    for seq in running:
        tokens[seq.tenant] += seq.kv.num_uncomputed
    for seq in queued:
        blocks[seq.tenant] -= seq.kv.blocks_needed(pool)
        if blocks[seq.tenant] >= 0:
            tokens[seq.tenant] += seq.kv.num_uncomputed
    return tokens


def place_alone(seq: Sequence) -> Place:
    """Return the place of a sequence in the order while its tenant is alone."""
    return 0.0, seq.rank


def precedes(waiting: Sequence, loaded: list[Sequence], first_loaded: Sequence | None, order: Order) -> bool:
    """Return whether a waiting sequence goes before `first_loaded`, the first of some loaded ones that has room.

    It overtakes none that is before it in the order, even if that lacks room, nor one of its level that only decodes.
    """
    if order(waiting) >= min(map(order, loaded)):
        return False
    has_rivals = any(order(seq)[0] <= order(waiting)[0] for seq in loaded)
    return not has_rivals or (first_loaded is not None and not first_loaded.kv.is_decoding)
