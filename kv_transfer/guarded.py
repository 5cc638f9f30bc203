"""Circuit breaker in front of a connector: while its store hangs, operations fail at once instead of timing out."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.breaker import StoreBreaker
from pdserve.kv_transfer.connector import PROBE_KEY, Capabilities, Connector, Outcome, Result, Stats
from pdserve.kv_transfer.forwarding import ForwardingConnector
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog

_OPERATIONS = ("store", "load", "follow", "match", "release", "stats")

T = TypeVar("T")


def guard(
    connector: Connector, post: Callable[[Callable[[], None]], None], now: Callable[[], float] = time.monotonic
) -> Connector:
    """Put a circuit breaker in front of an attached connector that does not skip a hanging store by itself.

    Peers that read in place are many stores: one that hangs is no reason to give up the others. A `BatchedConnector` whose
    operations are those of the base class has a breaker inside, which is switched on.
    """
    if connector.in_place or connector.capabilities.skips_hanging:
        return connector
    if isinstance(connector, BatchedConnector) and all(
        getattr(type(connector), name) is getattr(BatchedConnector, name) for name in _OPERATIONS
    ):
        connector.skip_while_hanging()
        return connector
    return GuardedConnector(connector, post, now)


class GuardedConnector(ForwardingConnector):
    """Wraps the connector of one store that may hang.

    After two timeouts in a row that moved no block, stores and loads end as UNAVAILABLE and matches as 0, at once, until
    the store has answered a probe: a match of `PROBE_KEY`, repeated when it times out. No request waits for a probe.

    Args:
        post: runs a function soon in the thread that calls this connector. The probes start there.
        now: monotonic clock.
    """

    def __init__(
        self,
        inner: Connector,
        post: Callable[[Callable[[], None]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._breaker = StoreBreaker(inner.capabilities.timeout_s)
        if inner.has_started_out:
            self._breaker.start_out()
        self._post = post
        self._now = now
        self._lock = threading.Lock()  # operations end on the connector's threads
        self._is_probing = False
        self._skipped = Stats()
        self._limited_log = RateLimitedLog(self.scheme)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, skips_hanging=True)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._transfer("store", keys, lambda: self._inner.store(keys, block_ids, lease_s=lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._transfer("load", keys, lambda: self._inner.load(keys, block_ids, tickets=tickets))

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._transfer("load", keys, lambda: self._inner.follow(keys, block_ids, patience_s=patience_s))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        if self._breaker.is_open:
            return _done(0)
        return self._watch(lambda: self._inner.match(keys), self._breaker.record_match)

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        if not self._breaker.is_open:  # otherwise the leases expire
            self._inner.release(keys, tickets=tickets)

    def release_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> None:
        if not self._breaker.is_open:
            self._inner.release_blocks(keys, block_ids, tickets=tickets)

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        if not self._breaker.is_open:
            self._inner.prolong(keys, lease_s=lease_s, tickets=tickets)

    def stats(self) -> Stats:
        return replace(self._inner.stats().plus(self._skipped), is_out=self._breaker.is_out)

    def _transfer(self, direction: str, keys: Sequence[bytes], begin: Callable[[], Future[Result]]) -> Future[Result]:
        if not self._breaker.is_open:
            return self._watch(begin, self._breaker.record_transfer)
        if list(keys) != [PROBE_KEY]:
            self._skipped.count_failures(direction, Outcome.UNAVAILABLE, len(keys))
        return _done(Result([Outcome.UNAVAILABLE] * len(keys), 0.0))

    def _watch(self, begin: Callable[[], Future[T]], record: Callable[[T, float, float], None]) -> Future[T]:
        """Begin an operation, and record its end before its caller learns of it."""
        started = self._now()
        future = begin()

        def on_end(done: Future[T]) -> None:
            now = self._now()
            with self._lock:
                was_open = self._breaker.is_open
                if done.exception() is None:
                    record(done.result(), now - started, now)
                else:  # a programming error, which the caller gets, and no time-out
                    self._breaker.record(True, now - started, now)
                is_open = self._breaker.is_open
            self._on_recorded(was_open, is_open)

        future.add_done_callback(on_end)
        return future

    def _on_recorded(self, was_open: bool, is_open: bool) -> None:
        if is_open:
            if not was_open:
                self._limited_log.warning("does not answer; requests go on without the store until it does", kind="out")
            self._post(self._probe)
        elif was_open:
            self._limited_log.warning("answers again", kind="back")

    def _probe(self) -> None:
        if self._is_probing or not self._breaker.is_open:
            return
        self._is_probing = True

        def begin() -> Future[int]:
            future = self._inner.match([PROBE_KEY])
            future.add_done_callback(lambda _: setattr(self, "_is_probing", False))
            return future

        self._watch(begin, self._breaker.record_match)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
