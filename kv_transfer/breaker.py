"""Circuit breaker of one KV store. The current time is an argument, in monotonic seconds.

    closed ── `threshold` time-outs in a row ──► open ── an answer ──► closed
                                                  │
                                                  └── one probe at a time, the next one `pause` after a time-out

Only a store that hangs opens it. A store that refuses connections fails at once, which delays nobody.
"""

from dataclasses import dataclass

LATE = 0.75  # of the timeout: transports are to give up before the deadline of an operation, by the guide at 0.8 of it


@dataclass
class StoreBreaker:
    """State of one store.

    Attributes:
        timeout: of one operation, in seconds.
        threshold: consecutive time-outs that open the breaker.
        pause: seconds from a time-out to the next probe.
    """

    timeout: float
    threshold: int = 2
    pause: float = 0.0
    _timeouts: int = 0
    _next_probe_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return self._timeouts >= self.threshold

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

    def record(self, answered: bool, seconds: float, now: float) -> None:
        """Count the end of an operation, also of one that started before the breaker opened.

        Args:
            answered: the store did at least a part of the operation, or said that it does not have the block.
            seconds: duration of the operation.
        """
        if answered:
            self._timeouts = 0
        elif self.is_late(seconds):
            self._timeouts += 1
            self._next_probe_at = now + self.pause
