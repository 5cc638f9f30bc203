"""Cores of one machine that instances, routers and the client of a fleet share. Plain arithmetic."""

import math

WINDOW_S = 0.1  # over which the work of routers and client counts as a share of a core


def cores_needed(instances: int, threads: int, routers: int) -> int:
    """Return the cores with which none waits for another: of instances with so many threads, routers, and a client."""
    return instances * threads + routers + 1


class SharedCores:
    """Says how long work takes where more threads compute than there are cores, which then have equal shares of them.

    A share is taken to stay what it was when the work began: what computes then goes on, and nothing else begins.

    Args:
        count: cores.
        threads: of an instance while it is in a step.
        others: threads of other programs that compute all the time.
    """

    def __init__(self, count: int, threads: int = 1, others: float = 0.0) -> None:
        self._count = count
        self._threads = threads
        self._others = others
        self._ends: dict[object, float] = {}  # of the step that each instance is in
        self._light_s, self._light_at = 0.0, 0.0  # recent work of routers and client, fading

    def step(self, instance: object, at: float, seconds: float) -> float:
        """Return how long a step takes that an instance begins at a time, and that takes so long alone."""
        seconds *= self._factor(instance, at, self._threads)
        self._ends[instance] = at + seconds
        return seconds

    def light(self, at: float, seconds: float) -> float:
        """Return how long a router's work takes that begins at a time. The client is taken to compute as long as it."""
        prolonged = seconds * self._factor(None, at, 1)
        self._light_s, self._light_at = self._faded(at) + 2 * seconds, max(at, self._light_at)
        return prolonged

    def _factor(self, own: object, at: float, threads: int) -> float:
        running = self._threads * sum(end > at for one, end in self._ends.items() if one is not own)
        return max(1.0, (threads + running + self._others + self._faded(at) / WINDOW_S) / self._count)

    def _faded(self, at: float) -> float:
        return self._light_s * math.exp(-max(0.0, at - self._light_at) / WINDOW_S)
