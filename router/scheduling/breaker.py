"""Which instances have failed so often that they get nothing for a while. The clock is the caller's.

    closed ── the third fault in a row ──► open ── its pause is over ──► half-open ── a token ──► closed
                                            ▲                             │ one request at a time
                                            └────── another fault ────────┘ with twice the pause

A fault is the instance's own: it was lost while it served, or made no progress. What it refuses is the client's. Any token
that it brings says that it works.
"""

from dataclasses import dataclass
from enum import StrEnum

FAULTS = 3  # in a row, until nothing is sent any more
INCIDENT_S = 1.0  # faults that are no farther apart are one: whatever happened, it hit many requests
PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
FORGOTTEN_S = 600.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True)
class _Record:
    """Faults in a row, and when the last one was."""

    faults: int
    at: float

    @property
    def pause(self) -> float:
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (self.faults - FAULTS)) if self.faults >= FAULTS else 0.0


class Breakers:
    """Of all instances, by id: one that starts again under its name has still failed."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    @property
    def any_failed(self) -> bool:
        """Lately. If not, all are closed, which most requests need not ask one by one."""
        return bool(self._records)

    def failed(self, instance_id: str, now: float) -> bool:
        """Whether it gets nothing more from now on."""
        self._records = {name: one for name, one in self._records.items() if now - one.at < FORGOTTEN_S}
        record = self._records.get(instance_id, _Record(0, now - FORGOTTEN_S))
        if now - record.at <= INCIDENT_S:
            return False
        self._records[instance_id] = _Record(record.faults + 1, now)
        return self.state(instance_id, now) is BreakerState.OPEN

    def succeeded(self, instance_id: str) -> None:
        self._records.pop(instance_id, None)

    def state(self, instance_id: str, now: float) -> BreakerState:
        record = self._records.get(instance_id)
        if record is None or record.faults < FAULTS:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now - record.at < record.pause else BreakerState.HALF_OPEN

    def allows(self, instance_id: str, requests: int, now: float) -> bool:
        """Whether it may get a request when it has so many."""
        state = self.state(instance_id, now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and requests == 0)
