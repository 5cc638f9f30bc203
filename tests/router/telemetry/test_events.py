"""The log of fleet events."""

import logging

from pdserve.router.telemetry.events import CAPACITY, EventLog


def test_the_log_is_bounded_and_merges_similar_events() -> None:
    log, events = logging.Logger("test"), EventLog()
    log.addHandler(events)
    log.warning("without an event")
    for i in range(40):
        log.warning("%d moved", i, extra={"event": "moved", "instance": "d", "request_id": f"r{i}"})
    (event,) = events.latest()
    assert (event["count"], event["text"], event["number"]) == (40, "39 moved", 40)
    for i in range(2 * CAPACITY):
        log.warning("left", extra={"event": "left", "instance": str(i)})
    assert len(events.latest()) == CAPACITY
