"""Circuit breaker of one KV store. The current time is an argument, in monotonic seconds.

    closed ── `threshold` time-outs in a row ──► open ── an answer ──► closed
                                                  │
                                                  └── one probe at a time, the next one `pause` after a time-out

Only a store that hangs opens it. A store that refuses connections fails at once, which delays no request. It is out as well,
until a transfer finds it again.
"""

from dataclasses import dataclass

from pdserve.kv_transfer.connector import Outcome, Result

LATE = 0.75  # of the timeout: transports are to give up before the deadline of an operation, by the guide at 0.8 of it


@dataclass
class StoreBreaker:
    """State of one store.

    Attributes:
        timeout: of one operation, in seconds.
        threshold: consecutive time-outs that open the breaker; as many time-outs and refusals are a store that is out.
        pause: seconds from a time-out to the next probe.
        is_open: operations are not to be started.
        is_out: requests go on without the store, because it hangs or refuses transfers.
    """

    timeout: float
    threshold: int = 2
    pause: float = 0.0
    is_open: bool = False
    is_out: bool = False
    _timeouts: int = 0
    _refusals: int = 0
    _next_probe_at: float = 0.0

    def is_late(self, seconds: float) -> bool:
        """Return True if an operation that took this long and did nothing has timed out."""
        return seconds >= LATE * self.timeout

    def allows(self, now: float) -> bool:
        """Return True if an operation may start. While the breaker is open, that is the probe, which must be recorded."""
        if not self.is_open:
            return True
        if now < self._next_probe_at:
            return False
        self._next_probe_at = now + self.timeout + self.pause
        return True

    def start_out(self) -> None:
        """Begin with a store that has not answered yet: it is out until a transfer finds it."""
        self._refusals = self.threshold
        self.is_out = True

    def record_transfer(self, result: Result, seconds: float, now: float) -> None:
        """Count the end of a store or load, also of one that started before the breaker opened."""
        did_nothing = {Outcome.UNAVAILABLE, Outcome.CANCELLED}.issuperset(result.outcomes)
        if not did_nothing:
            self._refusals = 0
        elif Outcome.UNAVAILABLE in result.outcomes and not self.is_late(seconds):
            self._refusals += 1
        self.record(not did_nothing, seconds, now)

    def record_match(self, found: int, seconds: float, now: float) -> None:
        """Count the end of a match. 0 is also the result of one that the store did not answer, or refused."""
        if found:
            self._refusals = 0
        self.record(found > 0 or not self.is_late(seconds), seconds, now)

    def record(self, answered: bool, seconds: float, now: float) -> None:
        """Count the end of an operation that took this long."""
        if answered:
            self._timeouts = 0
        elif self.is_late(seconds):
            self._timeouts += 1
            self._next_probe_at = now + self.pause
        self.is_open = self._timeouts >= self.threshold
        self.is_out = self._timeouts + self._refusals >= self.threshold
