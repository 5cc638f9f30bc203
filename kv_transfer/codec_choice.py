"""Choice of the codec that moves blocks fastest, for `?codec=auto`, by measured times. Plain Python; times in seconds.

Per byte of a block, a codec takes the time to encode it, to store and to load what is kept of it, and to decode that:

    encode + kept × (store + load) + decode

Only what an instance measures itself counts. Until it has loaded blocks, a load takes as long as a store.
"""

from collections.abc import Iterable

from pdserve.costs import OnlineFit

SMOOTHING = 0.25  # weight of the newest trial


class CodecChoice:
    """The fastest of some codecs, by trials of each and the transfers of late.

    Attributes:
        fastest: name of the codec; the first one, until there is a measurement of the store.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._work = dict.fromkeys(names, (0.0, 1.0))  # seconds per byte of a block, and kept bytes per byte
        self._links = {"store": OnlineFit(1, 0), "load": OnlineFit(1, 0)}
        self.fastest = next(iter(self._work))

    def record_trial(self, name: str, seconds: float, kept: float) -> None:
        """Take the time that a codec took to encode and decode a block, per byte of it, and the part of it that was kept."""
        before = self._work[name]
        weight = 1.0 if before == (0.0, 1.0) else SMOOTHING
        self._work[name] = before[0] + weight * (seconds - before[0]), before[1] + weight * (kept - before[1])

    def record_transfer(self, kind: str, num_bytes: int, seconds: float, now: float) -> None:
        """Take the time that a `store` or `load` of payloads took, without the codec's, and choose again."""
        self._links[kind].observe((1, num_bytes), seconds, now)
        measured = [fitted[1] for link in self._links.values() if (fitted := link.coefficients(now))]
        link = 2 * sum(measured) / max(1, len(measured))
        self.fastest = min(self._work, key=lambda name: self._work[name][0] + self._work[name][1] * link)
