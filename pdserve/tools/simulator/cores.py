"""Cores of one machine that instances, routers and the client of a fleet share. Plain arithmetic."""

import math

SLICE_S = 4e-3  # for which a core stays with a thread that others wait for: a tick of Linux at 250 Hz
WINDOW_S = 0.1  # over which the work of routers and client counts as a share of a core


def cores_needed(instances: int, threads: int, routers: int) -> int:
    """Return the cores with which none waits for another: of instances with so many threads, routers, and a client."""
    return instances * threads + routers + 1


class SharedCores:
    """Says how long work takes that shares cores, of which each thread has an equal share, and what cores share, such as
    bandwidth. What a thread waits for a core, it waits in whole slices: most of its short work takes no longer, some much.

    A share is taken to stay what it was when the work began: what computes then goes on, and nothing else begins.

    Args:
        count: cores.
        threads: of an instance while it is in a step.
        others: threads of other programs that compute all the time.
        contention: times as long that a step takes while all other cores compute; with fewer of them, in proportion.
    """

    def __init__(self, count: int, threads: int = 1, others: float = 0.0, contention: float = 1.0) -> None:
        self._count = count
        self._contention = contention
        self._threads = threads
        self._others = others
        self._ends: dict[object, float] = {}  # of the step that each instance is in
        self._owed: dict[object, float] = {}  # seconds that each has not waited yet, less than a slice
        self._light_s, self._light_at = 0.0, 0.0  # recent work of routers and client, fading

    def step(self, instance: object, at: float, seconds: float) -> float:
        """Return how long a step takes that an instance begins at a time, and that takes so long alone."""
        seconds = self._prolonged(instance, at, seconds, self._threads)
        self._ends[instance] = at + seconds
        return seconds

    def light(self, at: float, seconds: float) -> float:
        """Return how long a router's work takes that begins at a time. The client is taken to compute as long as it."""
        prolonged = self._prolonged(None, at, seconds, 1)
        self._light_s, self._light_at = self._faded(at) + 2 * seconds, max(at, self._light_at)
        return prolonged

    def _prolonged(self, own: object, at: float, seconds: float, threads: int) -> float:
        running = self._threads * sum(end > at for one, end in self._ends.items() if one is not own)
        others = running + self._others + self._faded(at) / WINDOW_S
        seconds *= 1 + (self._contention - 1) * min(1.0, others / max(1, self._count - threads))
        owed = self._owed.get(own, 0.0) + seconds * max(0.0, (threads + others) / self._count - 1)
        self._owed[own] = owed % SLICE_S
        return seconds + owed - self._owed[own]

    def _faded(self, at: float) -> float:
        return self._light_s * math.exp(-max(0.0, at - self._light_at) / WINDOW_S)
