"""Clock for the leases and time-outs of peers that does not count the time in which this process itself was stalled."""


class AwakeClock:
    """Advances by ticks: each adds the time since the last one, but at most `interval_s`.

    While a process is busy, stopped or starved of CPU, the frames of its peers wait unread in its sockets. Its own stall
    must not count as their silence. A lease measured by this clock ends only after several ticks, and between two ticks the
    event loop reads its sockets.

    Attributes:
        time: the sum of the ticks, in seconds.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        """`interval_s` is the intended interval of the ticks, and `now` the time of the caller's monotonic clock."""
        self.time = 0.0
        self._interval_s = interval_s
        self._ticked_at = now

    def read(self, now: float) -> float:
        """Return the time between two ticks, at `now` on the caller's clock."""
        return self.time + min(now - self._ticked_at, self._interval_s)

    def tick(self, now: float) -> float:
        """Advance to `now` on the caller's clock, and return `time`."""
        self.time = self.read(now)
        self._ticked_at = now
        return self.time
