"""Break-even of loading a prefix from the KV store against computing it, from recent load times and the cost model.

A load takes a + b × blocks seconds: a is latency, b the inverse of bandwidth. Both are fitted by weighted least squares over
recent loads. Where computing is cheaper, an occasional probe load keeps the estimate up to date.
"""

from enum import StrEnum

HALF_LIFE_S = 10.0  # a load of this age has half its weight
PROBE_SHARE = 0.05  # maximum share of time spent on loads that are expected to be dearer than computing
PROBE_S = (1.0, 60.0)  # minimum and maximum time between two probes
_PRIOR = 0.05  # weight of the prior, a line through the origin; it matters only while all loads have a similar size


class Reason(StrEnum):
    """Reason for loading a prefix, or for computing it (DEARER). A label value of `pdserve_store_hits_total`."""

    CHEAPER = "cheaper"
    UNMEASURED = "unmeasured"
    PROBE = "probe"
    DEARER = "dearer"


class BreakEven:
    """Decides whether to load. The caller supplies the clock: `now` is in seconds, monotonic."""

    def __init__(self) -> None:
        self._decayed_at = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums: loads, blocks, seconds, …
        self._next_probe_at = 0.0

    def record_load(self, blocks: int, seconds: float, now: float) -> None:
        """Add a load that moved `blocks` blocks; 0 if the store did not answer in time.

        Outliers count in full, because the next load may be as slow.
        """
        decay = 0.5 ** (max(0.0, now - self._decayed_at) / HALF_LIFE_S)
        amount = max(1, blocks)
        self._decayed_at = now
        self._n = decay * self._n + 1
        self._x = decay * self._x + amount
        self._y = decay * self._y + seconds
        self._xx = decay * self._xx + amount * amount
        self._xy = decay * self._xy + amount * seconds
        self._schedule_probe(seconds, now)

    def load_seconds(self, blocks: int) -> float:
        """Return the estimated seconds of a load, by least squares with a ≥ 0 and b ≥ 0."""
        x, y = self._x / self._n, self._y / self._n
        ratio, prior = y / x, _PRIOR * x * x
        slope = (self._xy / self._n - x * y + prior * ratio) / (self._xx / self._n - x * x + prior)
        slope = min(max(slope, 0.0), ratio)
        return y + slope * (blocks - x)

    def decide(self, blocks: int, compute_seconds: float, now: float) -> Reason:
        """Decide whether to load `blocks` blocks that take `compute_seconds` to compute."""
        if not self._n:
            return Reason.UNMEASURED
        seconds = self.load_seconds(blocks)
        if seconds <= compute_seconds:
            return Reason.CHEAPER
        if now < self._next_probe_at:
            return Reason.DEARER
        self._schedule_probe(seconds, now)
        return Reason.PROBE

    def _schedule_probe(self, seconds: float, now: float) -> None:
        least, most = PROBE_S
        self._next_probe_at = now + min(max(seconds / PROBE_SHARE, least), most)
