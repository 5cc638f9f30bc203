"""The state of one connector call in flight, and the watchdog thread that completes calls at their deadlines."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from pdserve.kv_transfer.connector import OperationFuture, Outcome, request_cancel
from pdserve.kv_transfer.fence import Fence

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


class Operation(Generic[T]):
    """One call of store, load, match or release, from submission until its future is done.

    Attributes:
        outcomes: one per block; UNAVAILABLE until marked otherwise.
        bytes_moved: payload bytes stored or loaded so far.
        matched: leading keys found so far, for `match`.
        deadline: on the monotonic clock.
    """

    def __init__(self, kind: str, blocks: int, deadline: float, make_result: Callable[["Operation[T]"], T]) -> None:
        self.kind = kind
        self.outcomes = [Outcome.UNAVAILABLE] * blocks
        self.bytes_moved = 0
        self.matched = 0
        self.started = time.perf_counter()
        self.deadline = deadline
        self.fence = Fence()
        self.work: Callable[[], None] | None = None
        self.future: OperationFuture[T] = OperationFuture(self.fence.cancel)
        self._make_result = make_result

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def is_over(self) -> bool:
        """True once the operation is cancelled, completed or past its deadline."""
        return self.fence.cancelled or self.future.done() or time.monotonic() >= self.deadline

    def complete(self) -> None:
        """Set the future's result. Called by both the worker and the watchdog; only the first call has an effect."""
        if self.fence.close():
            self.work = None
            if self.fence.cancelled:
                final = {Outcome.UNAVAILABLE: Outcome.CANCELLED}
                self.outcomes = [final.get(outcome, outcome) for outcome in self.outcomes]
            try:
                result = self._make_result(self)
            except Exception as error:  # noqa: BLE001 - raised to the caller; the thread that completes others lives on
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an exception on the future, unless it is completed already."""
        if self.fence.close():
            self.work = None
            self.future.set_exception(error)


class Watchdog:
    """Thread that completes operations at their deadlines."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}-watchdog", daemon=True)
        self._changed = threading.Condition()
        self._operations: list[tuple[float, int, Operation[Any]]] = []  # a heap: the earliest deadline first
        self._serial = count()
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def watch(self, operation: Operation[Any]) -> None:
        with self._changed:
            heappush(self._operations, (operation.deadline, next(self._serial), operation))
            if self._operations[0][2] is operation:
                self._changed.notify()

    def stop(self) -> None:
        """Complete all remaining operations, due or not, and stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (operation := self._next_due()) is not None:
            operation.complete()

    def _next_due(self) -> Operation[Any] | None:
        """Wait for the next operation past its deadline. None: stopped, and no operations remain."""
        with self._changed:
            while True:
                while self._operations and self._operations[0][2].future.done():
                    heappop(self._operations)
                if not self._operations and self._stopped:
                    return None
                wait = self._operations[0][0] - time.monotonic() if self._operations else None
                if self._stopped or (wait is not None and wait <= 0):
                    return heappop(self._operations)[2]
                self._changed.wait(wait)


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
