"""Whether to load a prefix from the store or to compute it: what loads took lately, beside what cost models say of computing.

A load takes a + b × blocks: its latency, and the bandwidth's inverse. The line follows what is measured, and recent loads
count more. Its belief is not for ever: where computing is cheaper, one load now and then shows whether it still is.
"""

from enum import StrEnum

HALF_LIFE_S = 10.0  # a load counts half as much as one that came this much later
PROBE_SHARE = 0.05  # of the time at most goes into loads that are expected to be dearer
PROBE_S = (1.0, 60.0)  # between two of them, at least and at most
_PRIOR = 0.05  # how much the loads speak for a line through the origin, unless their sizes differ


class Reason(StrEnum):
    CHEAPER = "cheaper"  # load
    UNMEASURED = "unmeasured"  # load
    PROBE = "probe"  # load
    DEARER = "dearer"  # compute


class BreakEven:
    """The clock is the caller's: `now` is in seconds, monotonic."""

    def __init__(self) -> None:
        self._at = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # sums over loads: their number, blocks, seconds, …
        self._next_probe = 0.0

    def loaded(self, blocks: int, seconds: float, now: float) -> None:
        """A load has moved so many blocks; 0 where the store did not answer in time. One that took long counts in full: that
        is what the next one may meet."""
        keep = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        amount = max(1, blocks)
        self._at = now
        self._n = keep * self._n + 1
        self._x = keep * self._x + amount
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + amount * amount
        self._xy = keep * self._xy + amount * seconds
        self._probe_later(seconds, now)

    def load_seconds(self, blocks: int) -> float:
        """By least squares; neither a nor b is ever below 0."""
        x, y = self._x / self._n, self._y / self._n
        ratio, prior = y / x, _PRIOR * x * x
        slope = (self._xy / self._n - x * y + prior * ratio) / (self._xx / self._n - x * x + prior)
        slope = min(max(slope, 0.0), ratio)
        return y + slope * (blocks - x)

    def decide(self, blocks: int, compute_seconds: float, now: float) -> Reason:
        """Whether to load these blocks, which take so long to compute, and why."""
        if not self._n:
            return Reason.UNMEASURED
        seconds = self.load_seconds(blocks)
        if seconds <= compute_seconds:
            return Reason.CHEAPER
        if now < self._next_probe:
            return Reason.DEARER
        self._probe_later(seconds, now)
        return Reason.PROBE

    def _probe_later(self, seconds: float, now: float) -> None:
        least, most = PROBE_S
        self._next_probe = now + min(max(seconds / PROBE_SHARE, least), most)
