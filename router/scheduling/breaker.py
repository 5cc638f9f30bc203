"""Circuit breakers of instances (Nygard, Release It!, 2007). The current time is an argument, in monotonic seconds.

    closed ── third fault in a row ──► open ── pause over ──► half-open ── a token ──► closed
                                        ▲                        │ one request at a time
                                        └────── next fault ──────┘ with twice the pause

A fault is the instance's own: its connection was lost while it served, or it made no progress. A request that it rejects
is the client's fault and does not count. Any token that the instance produces closes its breaker.
"""

from dataclasses import dataclass
from enum import StrEnum

FAULT_THRESHOLD = 3  # consecutive faults that open the breaker
INCIDENT_WINDOW_S = 1.0  # faults within this time of the last one count once: one incident hits many requests
BASE_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
FORGET_AFTER_S = 600.0


class BreakerState(StrEnum):
    """State of one breaker. The order is that of the metric `pdserve_breaker_state`: 0, 1, 2."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True)
class FaultRecord:
    """Consecutive faults of one instance, and the time of the last one."""

    faults: int
    last_fault_at: float

    @property
    def pause(self) -> float:
        """Seconds for which the breaker is open; 0 below the threshold."""
        if self.faults < FAULT_THRESHOLD:
            return 0.0
        return min(MAX_PAUSE_S, BASE_PAUSE_S * 2.0 ** (self.faults - FAULT_THRESHOLD))


class CircuitBreakers:
    """One circuit breaker per instance id. A record survives a restart of the instance under the same id.

    Attributes:
        records: instance id → its consecutive faults. While there are none, all breakers are closed.
    """

    def __init__(self) -> None:
        self.records: dict[str, FaultRecord] = {}

    def record_fault(self, instance_id: str, now: float) -> bool:
        """Count a fault. Return True if the breaker is open after a fault that counted."""
        self.records = {
            name: record for name, record in self.records.items() if now - record.last_fault_at < FORGET_AFTER_S
        }
        record = self.records.get(instance_id, FaultRecord(0, now - FORGET_AFTER_S))
        if now - record.last_fault_at <= INCIDENT_WINDOW_S:
            return False
        self.records[instance_id] = FaultRecord(record.faults + 1, now)
        return self.state(instance_id, now) is BreakerState.OPEN

    def record_success(self, instance_id: str) -> None:
        """Close the breaker and reset its count."""
        self.records.pop(instance_id, None)

    def state(self, instance_id: str, now: float) -> BreakerState:
        record = self.records.get(instance_id)
        if record is None or record.faults < FAULT_THRESHOLD:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now - record.last_fault_at < record.pause else BreakerState.HALF_OPEN

    def allows(self, instance_id: str, num_requests: int, now: float) -> bool:
        """Return True if an instance with `num_requests` running requests may receive another one."""
        state = self.state(instance_id, now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and num_requests == 0)
