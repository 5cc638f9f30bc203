"""Tests of the fence around an operation's rows."""

import threading

import pytest

from pdserve.kv_transfer.fence import Expired, Fence


def test_a_closed_fence_cannot_be_entered() -> None:
    fence = Fence()
    with fence:
        pass
    assert fence.close()
    with pytest.raises(Expired), fence:
        raise AssertionError("entered")
    assert not fence.close(), "only the first call closes it"


def test_a_cancelled_fence_cannot_be_entered_and_can_still_be_closed() -> None:
    fence = Fence()
    fence.cancelled = True
    with pytest.raises(Expired), fence:
        raise AssertionError("entered")
    assert fence.close()


def test_close_waits_for_a_copy_in_progress() -> None:
    fence, closed = Fence(), threading.Event()

    def close() -> None:
        fence.close()
        closed.set()

    thread = threading.Thread(target=close)
    with fence:
        thread.start()
        assert not closed.wait(0.05)
    assert closed.wait(60)
    thread.join()
