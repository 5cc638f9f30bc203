"""Parses and tokenizes request bodies: on the event loop while that is quick, else beside it, behind a bounded queue."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pdserve.errors import BadRequest, Overloaded, Unavailable
from pdserve.router.api.parsing import BodyType, UnknownFields, parse_body
from pdserve.router.api.requests import with_adapter
from pdserve.router.backend import ModelInfo
from pdserve.router.limits.admission_queue import FairQueue
from pdserve.router.limits.body_budget import BodyBudget
from pdserve.router.parse_server import ParseServer
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer

LARGE_BODY = 32 * 1024  # bytes; above this, parsing on the event loop would delay the streams of other requests
MANY_VALUES = 2000  # in a body: decoding and checking takes a microsecond for each
# From here on the GIL would be held for several milliseconds, which is more than another process costs. It takes 3 or 4 ms
# more for a text of 8,000 tokens, whose tokenizing releases the GIL.
HUGE_BODY = 512 * 1024
HUGE_VALUES = 10_000
TURN_BUDGET_S = 0.02  # of parsing in one turn of the event loop; a burst beyond it waits for a thread
NUM_THREADS = 2

Result = TypeVar("Result")
# Makes of a body what its request comes to: (body, request without prompt, tokenizer, model, most choices) → result.
Parse = Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo, int], Result]


class ParseQueue:
    """Runs the parsing of bodies. Lives on one event loop.

    Small bodies are parsed at once, on the event loop, until `TURN_BUDGET_S` of its turn are used up. Others wait for a
    thread, at most `max_waiting` of them, whose bytes the `budget` limits. So a burst of requests never keeps the event loop
    from reading its sockets, and enters the dispatcher in small groups. API keys share the threads by the bytes of their
    bodies and their `weights`, so one key's burst delays its own bodies.

    For huge bodies, and those of very many values, the thread waits for a process of the `server`: decoding JSON never
    releases the GIL. Without one, threads parse them themselves.

    Attributes:
        unknown_fields: drops fields of bodies that the router does not know; None: they are errors.
    """

    def __init__(
        self,
        max_waiting: int,
        weights: Mapping[str, float],
        budget: BodyBudget,
        metrics: Metrics,
        server: ParseServer | None = None,
    ) -> None:
        self.unknown_fields: UnknownFields | None = None
        self._max_waiting = max_waiting
        self._budget = budget
        self._metrics = metrics
        self._server = server
        if server is not None:
            server.on_ignored = metrics.ignored_fields.inc
        self._num_waiting = 0
        self._queue = FairQueue[asyncio.Future[None]](weights)  # done when a thread is free for the body
        self._free_threads = NUM_THREADS
        self._turn: list[float] = []  # seconds of each body that was parsed in this turn of the event loop
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="parse")

    async def run(self, key: str, raw: bytes, parse: Callable[[], Result], more_bytes: int = 0) -> Result:
        """Return `parse()`, which parses `raw`, a body sent with an API key. Both can be pickled.

        Args:
            more_bytes: of what it processes besides the body.

        Raises:
            BadRequest: the body is nested too deeply.
            Overloaded: too many bodies wait to be parsed.
        """
        try:
            size = len(raw) + more_bytes
            # Counting 4 MiB of values takes the event loop 4 ms, and a huge body is one whatever it holds.
            values = HUGE_VALUES if size >= HUGE_BODY else raw.count(b",") + raw.count(b"[") + raw.count(b"{")
            if size < LARGE_BODY and values < MANY_VALUES and sum(self._turn) < TURN_BUDGET_S:
                if not self._turn:
                    asyncio.get_running_loop().call_soon(self._turn.clear)
                started = time.perf_counter()
                try:
                    return parse()
                finally:
                    self._turn.append(time.perf_counter() - started)
            if values >= HUGE_VALUES and self._server is not None:
                parse = partial(self._server.run, parse)
            return await self._run_in_thread(key, size, parse)
        except RecursionError:
            raise BadRequest("the body is nested too deeply", kind="invalid_json") from None

    async def _run_in_thread(self, key: str, size: int, parse: Callable[[], Result]) -> Result:
        if self._num_waiting >= self._max_waiting:
            message = f"the router is full: {self._num_waiting} requests wait to be tokenized"
            self._metrics.refusals.labels(reason="max_requests").inc()
            raise Overloaded(message, kind="max_requests", retry_after_s=1)
        self._budget.reserve(key, size)
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        thread_is_free = loop.create_future()
        self._queue.push(key, thread_is_free, max(1, size))
        self._assign_threads()

        def end(work: asyncio.Future[Any]) -> None:
            self._num_waiting -= 1
            self._budget.release(key, size)
            if work is not thread_is_free or not work.cancelled():
                self._free_threads += 1
                self._assign_threads()
            if not work.cancelled():
                work.exception()  # marks it as read: without its client, asyncio would log it

        try:
            await thread_is_free
            work = loop.run_in_executor(self._threads, parse)
        except BaseException:  # it was cancelled, or no thread can be started
            end(thread_is_free)
            raise
        work.add_done_callback(end)
        return await asyncio.shield(work)  # a client that leaves must not lend the busy thread to its next body

    def _assign_threads(self) -> None:
        while self._free_threads and len(self._queue):
            thread_is_free = self._queue.pop()
            if not thread_is_free.cancelled():  # its request has been cancelled
                self._free_threads -= 1
                thread_is_free.set_result(None)


# ---- what it runs -------------------------------------------------------------------------------------------------


def read_body(
    model: type[BodyType], raw: bytes, unknown: UnknownFields | None, get: Callable[[BodyType], Result]
) -> Result:
    """Return what a function takes from a validated body."""
    if unknown is not None:
        return unknown.without(raw, lambda body: get(parse_body(model, body)))
    return get(parse_body(model, raw))


def parse_request(
    model: type[BodyType],
    raw: bytes | dict[str, Any],
    unknown: UnknownFields | None,
    parse: Parse[BodyType, Result],
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo | None,
    max_n: int,
) -> Result:
    """Return the result of `parse` for a body. Errors of the body take precedence over the lack of a model."""
    if unknown is not None and isinstance(raw, bytes):
        return unknown.without(raw, lambda body: parse_request(model, body, None, parse, draft, tokenizer, info, max_n))
    body, info = parse_body(model, raw), info or served(info)
    if info.adapters:
        draft, info = with_adapter(getattr(body, "model", None), draft, info)
    return parse(body, draft, tokenizer, info, max_n)


def served(info: ModelInfo | None) -> ModelInfo:
    """Return the served model. Raises Unavailable if there is none."""
    if info is None:
        raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
    return info
