"""Choice of the codec that stores blocks fastest, for `?codec=auto`, by measured times. Plain Python; times in seconds.

Each codec is tried by whole operations, since encoding overlaps with sending: at first each in turn, and from then on one
operation of `TRY_EVERY`. What it costs to load is not measured, but assumed to go with what it costs to store.
"""

from collections.abc import Iterable

from pdserve.costs import OnlineFit

TRY_EVERY = 64  # operations
FIRST_TRIES = 3  # of each codec
MIN_BYTES = 64 << 10  # of an operation that tells something


class CodecChoice:
    """The fastest of some codecs for bytes of KV.

    Attributes:
        fastest: name of the codec; the first one, until there is a measurement.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._seconds = {name: OnlineFit(1, 0) for name in names}
        self._num_tries = dict.fromkeys(self._seconds, 0)
        self._until_next_try = TRY_EVERY
        self.fastest = next(iter(self._seconds))

    def choose(self, num_bytes: int) -> str:
        """Return the name of the codec for the next operation, which stores `num_bytes` bytes of blocks."""
        if num_bytes < MIN_BYTES:
            return self.fastest
        tried_least = min(self._num_tries, key=self._num_tries.__getitem__)
        self._until_next_try -= 1
        if self._num_tries[tried_least] >= FIRST_TRIES and self._until_next_try > 0:
            return self.fastest
        self._until_next_try = TRY_EVERY
        self._num_tries[tried_least] += 1
        return tried_least

    def record(self, name: str, num_bytes: int, seconds: float, now: float) -> None:
        """Record how long storing `num_bytes` bytes of blocks took, and update `fastest`."""
        if num_bytes >= MIN_BYTES:
            self._seconds[name].observe((1, num_bytes), seconds, now)
            fitted = {name: each for name, fit in self._seconds.items() if (each := fit.coefficients(now))}
            self.fastest = min(fitted, key=lambda name: fitted[name][1])
