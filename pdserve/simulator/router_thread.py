"""The thread of a simulated router: one queue of work in order of arrival."""

from collections import deque

SLOT_S = 0.005
MAX_SLOTS = 200  # how late work may become known: longer than skipped steps are left to be caught up with


class RouterThread:
    """Says when work is done. Tokens of skipped steps become known late: their work then counts from when it arrived, so that
    it fills the time in which the thread was idle, and does not delay what arrives now.

    Work is therefore summed by slots of time, and what is ahead of an arrival is known up to the length of a slot. So
    skipping may change the order of what arrives within a slot, and with it these times and what is decided then.

    Attributes:
        busy_seconds: all work, including that which waits.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._first = 0  # number of the first slot
        self._work = deque([0.0])  # seconds, by slot
        self._backlog = deque([0.0])  # seconds that are left of earlier work when the slot begins

    def add(self, at: float, seconds: float) -> float:
        """Add work that arrives, or has arrived, at a time. Returns when it is done."""
        slot = int(at / SLOT_S) - self._first
        if slot < 0:
            slot = 0
        while slot >= len(self._work):
            slot -= self._append_slot()
        begins = (self._first + slot) * SLOT_S
        ahead = self._backlog[slot] + self._work[slot] - (at - begins if at > begins else 0.0)
        if ahead < 0:
            ahead = 0.0
        self._work[slot] += seconds
        self.busy_seconds += seconds
        if slot + 1 < len(self._work):
            self._update_backlogs(slot + 1)
        return at + ahead + seconds

    def _append_slot(self) -> int:
        """Append a slot. Returns by how many slots the first one has moved."""
        self._backlog.append(self._left(len(self._work) - 1))
        self._work.append(0.0)
        if len(self._work) <= MAX_SLOTS:
            return 0
        self._work.popleft()
        self._backlog.popleft()
        self._first += 1
        return 1

    def _update_backlogs(self, slot: int) -> None:
        while slot < len(self._work) and self._backlog[slot] != (left := self._left(slot - 1)):
            self._backlog[slot] = left
            slot += 1

    def _left(self, slot: int) -> float:
        """Return the seconds of work that are left at the end of a slot."""
        return max(0.0, self._backlog[slot] + self._work[slot] - SLOT_S)
