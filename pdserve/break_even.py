"""How much of a prefix to load from the store rather than to compute: what loads and steps take, by what they took lately.

A load takes a + b × blocks: its latency, and the bandwidth's inverse. Computing takes b × tokens: the step is made anyway, it
only becomes longer. Both lines follow what is measured, and recent measurements count more. No belief is for ever:

    not measured yet          load, to learn
    computing is cheaper      one load now and then shows whether it still is
    loading is cheaper        if only short steps were measured lately, the prefix's end is computed: one that is longer
"""

from enum import StrEnum

LOAD_HALF_LIFE_S = 10.0  # a measurement counts half as much as one that came this much later
STEP_HALF_LIFE_S = 60.0
PROBE_SHARE = 0.05  # of the time at most goes into loads that are expected to be dearer
PROBE_S = (1.0, 60.0)  # between two of them, at least and at most
LONG_STEP = 512  # tokens; shorter ones say little about what longer ones take
_PRIOR = 0.05  # how much the measurements speak for a line through the origin, unless their amounts differ


class Reason(StrEnum):
    CHEAPER = "cheaper"  # load
    UNMEASURED = "unmeasured"  # load
    PROBE = "probe"  # load
    LONG_STEP = "long_step"  # load all but the end
    DEARER = "dearer"  # compute


class Line:
    """seconds = a + b × amount, by least squares; neither is ever below 0. Measured amounts are above 0."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._at = 0.0
        self._n = self._x = self._y = self._xx = self._xy = self._largest = 0.0

    def measured(self, amount: float, seconds: float, now: float) -> None:
        keep = self._keep(now)
        self._at = now
        self._n = keep * self._n + 1
        self._x = keep * self._x + amount
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + amount * amount
        self._xy = keep * self._xy + amount * seconds
        self._largest = max(keep * self._largest, amount)

    @property
    def known(self) -> bool:
        return self._n > 0

    @property
    def slope(self) -> float:
        x, y = self._x / self._n, self._y / self._n
        ratio, prior = y / x, _PRIOR * x * x
        slope = (self._xy / self._n - x * y + prior * ratio) / (self._xx / self._n - x * x + prior)
        return min(max(slope, 0.0), ratio)

    @property
    def intercept(self) -> float:
        return (self._y - self.slope * self._x) / self._n

    def reach(self, now: float) -> float:
        """The largest amount measured lately; one that is long ago counts as less."""
        return self._keep(now) * self._largest

    def _keep(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self._at) / self._half_life_s))


class BreakEven:
    """The clock is the caller's: `now` is in seconds, monotonic."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._loads = Line(LOAD_HALF_LIFE_S)
        self._steps = Line(STEP_HALF_LIFE_S)
        self._next_probe = 0.0
        self._begun = 0, 0.0  # tokens and seconds of steps that may still be running

    def loaded(self, blocks: int, seconds: float, now: float) -> None:
        """A load has moved so many blocks; 0 where the store did not answer in time."""
        self._loads.measured(max(1, blocks), seconds, now)
        self._probe_later(seconds, now)

    def computed(self, tokens: int, sampled: int, seconds: float, now: float) -> None:
        """A step has computed so many tokens, and sampled as many new ones.

        A GPU has only begun with a step from which nothing was sampled; the next one that samples has waited for both.
        """
        tokens, seconds = tokens + self._begun[0], seconds + self._begun[1]
        self._begun = (0, 0.0) if sampled else (tokens, seconds)
        if tokens > sampled > 0:  # else it was decoding only
            self._steps.measured(tokens, seconds, now)

    def load_seconds(self, blocks: int) -> float:
        return self._loads.intercept + self._loads.slope * blocks

    def compute_seconds(self, blocks: int) -> float:
        return self._steps.slope * blocks * self._block_size

    def decide(self, blocks: int, now: float) -> tuple[int, Reason]:
        """How many leading ones of the blocks to load, and why. The others are to be computed."""
        if not (self._loads.known and self._steps.known):
            return blocks, Reason.UNMEASURED
        if self.load_seconds(blocks) <= self.compute_seconds(blocks):
            end = min(blocks, LONG_STEP // self._block_size)
            if self._steps.reach(now) < end * self._block_size / 2:
                return blocks - end, Reason.LONG_STEP
            return blocks, Reason.CHEAPER
        if now < self._next_probe:
            return 0, Reason.DEARER
        self._probe_later(self.load_seconds(blocks), now)
        return blocks, Reason.PROBE

    def _probe_later(self, seconds: float, now: float) -> None:
        least, most = PROBE_S
        self._next_probe = now + min(max(seconds / PROBE_SHARE, least), most)
