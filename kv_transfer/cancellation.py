"""Work that ends early: cancelled between operations of connectors, or waited for until a deadline only."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

from pdserve.kv_transfer.connector import OperationFuture, request_cancel

T = TypeVar("T")


class Cancellation:
    """A request to cancel work of several operations, passed on to the one that is under way.

    Attributes:
        requested: further operations are not to be started.
    """

    def __init__(self) -> None:
        self.requested = False
        self._current: Future[Any] = Future()

    def request(self) -> None:
        self.requested = True
        request_cancel(self._current)

    def wait(self, operation: Future[T]) -> T:
        """Wait for an operation and return its result."""
        self._current = operation
        if self.requested:  # since before the line above
            request_cancel(operation)
        return operation.result()


def submit(threads: Executor, work: Callable[[Cancellation], T]) -> OperationFuture[T]:
    """Run work that consists of several operations in an executor."""
    cancellation = Cancellation()
    future: OperationFuture[T] = OperationFuture(cancellation.request)

    def complete(done: Future[T]) -> None:
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())

    threads.submit(work, cancellation).add_done_callback(complete)
    return future


def run_until(deadline: float, work: Callable[[], None], name: str) -> bool:
    """Run `work` in a thread of its own until the deadline, on the monotonic clock. Returns False if it goes on then.

    Raises:
        Exception: that of `work`.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    wait([done], max(0.0, deadline - time.monotonic()))
    if done.done():
        done.result()
    return done.done()
