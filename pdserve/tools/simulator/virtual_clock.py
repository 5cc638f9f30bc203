"""Virtual clock: time that passes from event to event."""

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial


class VirtualClock:
    """Future events, in a heap of their times. Events of the same time happen in the order in which they were added.

    Attributes:
        time: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self._times: list[float] = []  # a heap
        self._events: dict[float, deque[Callable[[], object]]] = {}  # by time
        self._repeated: dict[tuple[float, float], list[Callable[[], object]]] = {}  # by interval and beginning

    def now(self) -> float:
        return self.time

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Call the action once, at this time; now if it is over."""
        if time < self.time:
            time = self.time
        if (actions := self._events.get(time)) is None:
            heapq.heappush(self._times, time)
            self._events[time] = deque((action,))
        else:
            actions.append(action)

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
        while self._times and not until():
            self.time = self._times[0]
            actions = self._events[self.time]
            action = actions.popleft()
            if not actions:
                del self._events[heapq.heappop(self._times)]
            action()

    def _repeat(self, seconds: float, actions: list[Callable[[], object]]) -> None:
        for action in actions:
            action()
        self.after(seconds, partial(self._repeat, seconds, actions))
