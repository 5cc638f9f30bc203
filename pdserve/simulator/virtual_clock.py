"""Virtual clock: time that passes from event to event."""

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """A heap of future events. Events of the same time happen in the order in which they were added.

    Attributes:
        time: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Call the action once, at this time; now if it is over."""
        heapq.heappush(self._events, (time if time > self.time else self.time, next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call the action once, this much later."""
        self.at(self.time + seconds, action)

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call the action again and again, for the first time after one interval."""

        def repeat() -> None:
            action()
            self.after(seconds, repeat)

        self.after(seconds, repeat)

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until a condition holds, or none is left."""
        events = self._events
        while events and not until():
            self.time, _, action = heapq.heappop(events)
            action()
