"""Tests of rate-limited warnings."""

from types import SimpleNamespace

import pytest

from pdserve.kv_transfer import rate_limited_log
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog


def test_each_kind_is_logged_at_once_and_then_once_a_minute_with_a_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(rate_limited_log, "time", SimpleNamespace(monotonic=lambda: now))
    limited = RateLimitedLog("store")
    limited.warning("block 1 is corrupt", kind="corrupt")
    limited.warning("block 2 is corrupt", kind="corrupt")
    limited.warning("full")
    now += 59
    limited.warning("block 3 is corrupt", kind="corrupt")
    now += 1
    limited.warning("block 4 is corrupt", kind="corrupt")
    now += 60
    limited.warning("block 5 is corrupt", kind="corrupt")
    assert [record.getMessage() for record in caplog.records] == [
        "store: block 1 is corrupt",
        "store: full",
        "store: block 4 is corrupt (2 more since the last report)",
        "store: block 5 is corrupt",
    ]
