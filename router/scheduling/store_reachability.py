"""Detection of (prefill, decode) pairs that do not share a KV store, from hand-overs in which no block arrives.

The connectors' names do not tell: one server may have two names, and two hosts have shared memory of the same name. The
evidence is whether decode ever loads KV that prefill has stored.
"""

MAX_FAILED_HANDOVERS = 3  # consecutive hand-overs without a block after which a pair counts as unreachable
RETRY_AFTER_S = 300.0

Pair = tuple[str, str]  # ids of a prefill and a decode instance


class StoreReachability:
    """Failed hand-overs per pair. The current time is an argument, in monotonic seconds.

    A pair is unreachable for `RETRY_AFTER_S` after `MAX_FAILED_HANDOVERS` consecutive failures. It is then tried again,
    and one more failure makes it unreachable again.
    """

    def __init__(self) -> None:
        self._failed_handovers: dict[Pair, int] = {}
        self._unreachable_until: dict[Pair, float] = {}

    def record_handover(self, pair: Pair, blocks: int, now: float) -> bool:
        """Record how many stored blocks decode received. Return True if the pair becomes unreachable for the first time."""
        if blocks:
            self._failed_handovers.pop(pair, None)
            self._unreachable_until.pop(pair, None)
            return False
        self._failed_handovers[pair] = self._failed_handovers.get(pair, 0) + 1
        if self._failed_handovers[pair] >= MAX_FAILED_HANDOVERS:
            self._unreachable_until[pair] = now + RETRY_AFTER_S
        return self._failed_handovers[pair] == MAX_FAILED_HANDOVERS

    @property
    def any_unreachable(self) -> bool:
        """False if all pairs are reachable, so that most requests need no check per pair."""
        return bool(self._unreachable_until)

    def is_unreachable(self, pair: Pair, now: float) -> bool:
        return now < self._unreachable_until.get(pair, now)

    def forget(self, instance_id: str) -> None:
        """Drop all pairs of an instance that left; it may come back with other settings."""
        for pair in [pair for pair in self._failed_handovers if instance_id in pair]:
            del self._failed_handovers[pair]
            self._unreachable_until.pop(pair, None)
