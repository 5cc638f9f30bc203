"""Tests of operations, and of the fence around their rows."""

import threading
import time

import pytest

from pdserve.kv_transfer.blocks import Expired, Fence, Operation


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


def test_the_end_of_an_operation_is_told_before_its_result_and_once() -> None:
    operation: Operation[int] = Operation("match", [], [], time.monotonic() + 60)
    told: list[tuple[int | None, bool]] = []
    operation.on_end = lambda _, result: told.append((result, operation.done()))
    operation.complete()
    operation.complete(ValueError("too late"))
    assert told == [(0, False)] and operation.is_over and operation.result(0) == 0
