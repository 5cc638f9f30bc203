"""Which prefill and decode instances share no KV store. Nobody is asked: it shows in hand-overs in which nothing arrives.

Names say little (two names for one server, one name for the shared memory of two hosts), so what counts is whether KV that
one instance has stored is ever loaded by the other.
"""

MAX_FAILED_HANDOVERS = 3  # hand-overs in a row without a single block: then two instances are taken to be apart
RETRY_S = 300.0  # then they get another chance

Pair = tuple[str, str]


class StoreReachability:
    """By the ids of (prefill, decode) instances. The clock is the caller's."""

    def __init__(self) -> None:
        self._failed_handovers: dict[Pair, int] = {}
        self._apart_until: dict[Pair, float] = {}

    def handed_over(self, pair: Pair, blocks: int, now: float) -> bool:
        """Decode has asked for stored blocks and so many came. Whether it has just turned out that the two are apart."""
        if blocks:
            self._failed_handovers.pop(pair, None)
            self._apart_until.pop(pair, None)
            return False
        self._failed_handovers[pair] = self._failed_handovers.get(pair, 0) + 1
        if self._failed_handovers[pair] >= MAX_FAILED_HANDOVERS:
            self._apart_until[pair] = now + RETRY_S
        return self._failed_handovers[pair] == MAX_FAILED_HANDOVERS

    @property
    def any_apart(self) -> bool:
        """If not, most requests need not ask pair by pair."""
        return bool(self._apart_until)

    def apart(self, pair: Pair, now: float) -> bool:
        return now < self._apart_until.get(pair, now)

    def forget(self, instance_id: str) -> None:
        """It has left, and may come back with other settings."""
        for pair in [pair for pair in self._failed_handovers if instance_id in pair]:
            del self._failed_handovers[pair]
            self._apart_until.pop(pair, None)
