"""What happened lately to instances and requests: log records that name their event, kept for the live page."""

import logging
from collections import deque
from dataclasses import asdict, dataclass

CAPACITY = 200
TOGETHER_S = 2.0  # records of one kind about one instance that are no farther apart are one event


@dataclass
class FleetEvent:
    """One event, or several alike.

    Attributes:
        number: counts up, so that readers can tell what is new.
        time: of the last of them, in seconds since 1970.
        event: joined, left, draining, drained, role, refused, breaker, fallback, moved, failed, failed_handovers.
        text: what the log says of the last.
        instance, request_id: whom it is about; empty: nobody.
        count: how many.
    """

    number: int
    time: float
    event: str
    text: str
    instance: str
    request_id: str
    count: int = 1


class Events(logging.Handler):
    """A handler for the logger of the router: records are made where things happen, once, for people and for programs."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._latest: deque[FleetEvent] = deque(maxlen=CAPACITY)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        if not event:
            return
        self._number += 1
        instance, request_id = getattr(record, "instance", ""), getattr(record, "request_id", "")
        now = FleetEvent(self._number, record.created, event, record.getMessage(), instance, request_id)
        last = self._same(now)
        if last is not None:
            self._latest.remove(last)
            now.count += last.count
        self._latest.append(now)

    def _same(self, now: FleetEvent) -> FleetEvent | None:
        for one in reversed(self._latest):
            if now.time - one.time > TOGETHER_S:
                return None
            if (one.event, one.instance) == (now.event, now.instance):
                return one
        return None

    def latest(self) -> list[dict[str, object]]:
        """The newest first."""
        assert self.lock is not None  # a handler has one, as long as nobody takes it
        with self.lock:
            return [asdict(one) for one in reversed(self._latest)]
