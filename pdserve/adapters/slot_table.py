"""Slots of a step for adapters: which adapters have one, which sequences use it, and which wait for one. Plain data.

Of the adapters in slots, the one that was used least recently gives way, but none that a sequence uses: its sequences wait.
Of those that wait, the oldest comes first, and adapters that have slots go before them `MAX_OVERTAKEN` times at most.
"""

from collections.abc import Callable

from pdserve.engine.adapters import Adapter
from pdserve.engine.sequence import Sequence

MAX_OVERTAKEN = 64  # how often sequences with a slot go before the oldest that waits for one


class SlotTable:
    """The slots of one engine. Sequences whose adapter is None take none.

    Args:
        count: slots.
        fill: puts an adapter into a slot.
    """

    def __init__(self, count: int, fill: Callable[[int, Adapter], None]) -> None:
        self._fill = fill
        self._slots: dict[bytes, int] = {}  # by digest, the least recently used first
        self._free = [*range(count)]
        self._holders: dict[Sequence, bytes] = {}
        self._denied: dict[Sequence, None] = {}  # they wait for a slot
        self._num_overtaken = 0  # of the oldest of these

    @property
    def is_used(self) -> bool:
        return bool(self._holders)

    def slot_of(self, seq: Sequence) -> int:
        """Return the slot of a sequence's adapter; -1: it has none."""
        assert seq.adapter is None or seq.adapter.digest in self._slots, "its adapter has no slot"
        return -1 if seq.adapter is None else self._slots[seq.adapter.digest]

    def acquire(self, seq: Sequence, *siblings: Sequence) -> bool:
        """Give a sequence, and others of its request, the slot of their adapter; return False if it has to wait for one."""
        adapter = seq.adapter
        assert adapter is not None
        if seq in self._holders:
            return True
        oldest = min(self._denied, key=lambda one: one.rank, default=seq)
        is_later, slot = oldest.rank < seq.rank, self._slots.pop(adapter.digest, None)
        if is_later and (slot is None or self._num_overtaken >= MAX_OVERTAKEN):
            may_have = False
        else:
            may_have = slot is not None or bool(self._free) or self._evict()
        if slot is None and may_have:
            slot = self._free.pop()
            self._fill(slot, adapter)
        if slot is not None:
            self._slots[adapter.digest] = slot
        if not may_have:
            self._denied[seq] = None
            return False
        self._num_overtaken = self._num_overtaken + 1 if is_later else 0
        self._denied.pop(seq, None)
        self._holders.update(dict.fromkeys((seq, *siblings), adapter.digest))
        return True

    def release(self, seq: Sequence) -> None:
        """End a sequence's use of a slot, and its wait for one, if there is any."""
        self._holders.pop(seq, None)
        self._denied.pop(seq, None)

    def _evict(self) -> bool:
        """Free the slot that was used least recently, and that no sequence uses; return whether there is one."""
        held = set(self._holders.values())
        unused = next((digest for digest in self._slots if digest not in held), None)
        if unused is not None:
            self._free.append(self._slots.pop(unused))
        return unused is not None
