"""One call of a connector's method, and the watchdog that ends it in time."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.fence import Fence

T = TypeVar("T")


class Answer(Future[T]):
    """Of an operation. It cannot be cancelled, as rows stay reserved until the end, but one may say that nobody wants it."""

    def __init__(self, fence: Fence) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._fence = fence

    def unwanted(self) -> None:
        """Has the operation end with the block that is being moved; the others end as CANCELLED. Returns at once."""
        self._fence.left = True


class Operation(Generic[T]):
    """One call of store, load, match or release on its way through the workers."""

    def __init__(self, kind: str, blocks: int, deadline: float, answer: Callable[["Operation[T]"], T]) -> None:
        self.kind = kind
        self.outcomes = [Outcome.UNAVAILABLE] * blocks
        self.moved = 0  # bytes
        self.matched = 0  # leading keys
        self.started = time.perf_counter()
        self.deadline = deadline  # on the monotonic clock
        self.fence = Fence()
        self.work: Callable[[], None] | None = None
        self.future: Answer[T] = Answer(self.fence)
        self._answer = answer

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def over(self) -> bool:
        return self.fence.left or self.future.done() or time.monotonic() >= self.deadline

    def complete(self) -> None:
        """The watchdog and the worker both come here; the first one answers."""
        if self.fence.close():
            self.work = None
            if self.fence.left:
                end = {Outcome.UNAVAILABLE: Outcome.CANCELLED}
                self.outcomes = [end.get(outcome, outcome) for outcome in self.outcomes]
            self.future.set_result(self._answer(self))

    def fail(self, defect: BaseException) -> None:
        if self.fence.close():
            self.work = None
            self.future.set_exception(defect)


class Watchdog:
    """Completes operations at their deadlines."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._watch, name=f"kv-{name}-watchdog", daemon=True)
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
        """Completes what is left, whether its deadline has come or not."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while (operation := self._next()) is not None:
            operation.complete()

    def _next(self) -> Operation[Any] | None:
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
