"""Recent fleet events for the live page, collected from log records that carry an `event`."""

import logging
from collections import deque
from dataclasses import asdict, dataclass

CAPACITY = 200
MERGE_WINDOW_S = 2.0  # events of one kind and instance within this time of each other are merged


@dataclass
class FleetEvent:
    """One event, or several merged ones.

    Attributes:
        number: increases with each event, so that readers can find the new ones.
        time: seconds since 1970, of the last merged event.
        event: joined, left, draining, drained, role, refused, missing, breaker, fallback, moved, failed,
            failed_handovers or autoscaler.
        text: the log message of the last merged event.
        instance, request_id: the subject; empty if there is none.
        count: number of merged events.
    """

    number: int
    time: float
    event: str
    text: str
    instance: str
    request_id: str
    count: int = 1


class EventLog(logging.Handler):
    """Log handler that keeps the last `CAPACITY` events.

    Attached to the router's logger, so that one log call serves both readers of the log and the live page.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._latest: deque[FleetEvent] = deque(maxlen=CAPACITY)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record that has an `event` attribute; ignore others."""
        kind = getattr(record, "event", "")
        if not kind:
            return
        self._number += 1
        instance, request_id = getattr(record, "instance", ""), getattr(record, "request_id", "")
        event = FleetEvent(self._number, record.created, kind, record.getMessage(), instance, request_id)
        previous = self._mergeable_with(event)
        if previous is not None:
            self._latest.remove(previous)
            event.count += previous.count
        self._latest.append(event)

    def _mergeable_with(self, event: FleetEvent) -> FleetEvent | None:
        for previous in reversed(self._latest):
            if event.time - previous.time > MERGE_WINDOW_S:
                return None
            if (previous.event, previous.instance) == (event.event, event.instance):
                return previous
        return None

    def latest(self) -> list[dict[str, object]]:
        """Return all stored events as dicts, the newest first."""
        assert self.lock is not None  # created by logging.Handler
        with self.lock:
            return [asdict(event) for event in reversed(self._latest)]
