"""A clock for connectors with threads, which stands still until the test advances it."""

import pytest

from pdserve.kv_transfer import batched, blocks, cancellation
from pdserve.kv_transfer.batched import BatchedConnector


class Clock:
    """Replaces `time`. It advances only by `advance`, so that a busy machine makes nothing late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (batched, blocks, cancellation):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def advance(self, seconds: float, connector: BatchedConnector) -> None:
        self.now += seconds
        with connector._watchdog._changed:
            connector._watchdog._changed.notify()  # the condition waits by the real clock
