"""Virtual clock: time that passes from event to event."""

import heapq
from collections.abc import Callable
from functools import partial
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
        self._repeated: dict[tuple[float, float], list[Callable[[], object]]] = {}  # by interval and beginning

    def now(self) -> float:
        return self.time

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Call the action once, at this time; now if it is over."""
        heapq.heappush(self._events, (time if time > self.time else self.time, next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call the action once, this much later."""
        self.at(self.time + seconds, action)

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call the action again and again, for the first time after one interval.

        Actions that begin at the same time with the same interval share one event, in the order in which they were added.
        """
        actions = self._repeated.setdefault((seconds, self.time), [])
        actions.append(action)
        if len(actions) == 1:
            self.after(seconds, partial(self._repeat, seconds, actions))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until a condition holds, or none is left."""
        events, pop = self._events, heapq.heappop
        while events and not until():
            self.time, _, action = pop(events)
            action()

    def _repeat(self, seconds: float, actions: list[Callable[[], object]]) -> None:
        for action in actions:
            action()
        self.after(seconds, partial(self._repeat, seconds, actions))
