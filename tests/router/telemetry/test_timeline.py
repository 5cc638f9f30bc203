"""Timelines: stamps, spans and the bounded log."""

from pdserve.lifetime import Stage
from pdserve.output import Moved
from pdserve.router.telemetry.timeline import Migration, Timeline, TimelineLog


def test_first_stamp_counts_and_kv_is_stored_before_it_is_ready() -> None:
    timeline = Timeline("r")
    timeline.stamp(Stage.RECEIVED, 1.0)
    timeline.stamp(Stage.RECEIVED, 2.0)
    timeline.stamp(Stage.KV_READY, 3.0)
    timeline.stamp(Stage.KV_STORED, 4.0)
    assert timeline.span(Stage.RECEIVED, Stage.KV_STORED) == timeline.span(Stage.RECEIVED, Stage.KV_READY) == 2.0
    assert timeline.span(Stage.RECEIVED, Stage.FINISHED) is None


def test_times_are_milliseconds_since_the_first_stamp() -> None:
    timeline = Timeline("r", stored=Moved(blocks=2, bytes=10**9, seconds=0.5))
    timeline.stamp(Stage.RECEIVED, 10.0)
    timeline.stamp(Stage.ADMITTED, 10.25)
    timeline.migrations.append(Migration(10.5, "d0", "lost"))
    body = timeline.as_dict()
    assert body["stages_ms"] == {"received": 0.0, "admitted": 250.0}
    assert body["migrations"] == 1 and body["moves"] == [
        {"ms": 500.0, "instance": "d0", "why": "lost", "pause_s": None}
    ]
    assert body["stored"] == {"blocks": 2, "bytes": 10**9, "seconds": 0.5, "gb_per_s": 2.0}
    assert body["parts"] == [{"name": "admission", "who": "router", "start_ms": 0.0, "end_ms": 250.0}]


def test_log_keeps_the_latest_timelines() -> None:
    log = TimelineLog(capacity=2)
    for name in "abc":
        log.add(Timeline(name))
    assert log.get("a") is None and log.get("b") is not None
    assert [timeline.request_id for timeline in log.latest(9)] == ["c", "b"]
