"""`tiered://shm://kv?size=8GiB,redis://host:6379/0`: several stores combined as tiers, fastest first.

    store    writes to the first tier that accepts the block; in the background, copies it from there to the slower tiers
    load     reads from the first tier that has the block intact, and stores it in the faster tiers before it returns,
             unless these have been so slow that the timeout would not suffice
    match    counts leading keys that any of the tiers has

The tiers' URLs are separated by commas. The only own parameter comes before them, as in
`tiered://?buffer=256MiB,shm://kv,file:///mnt/kv`: the size of the buffer for background copies (default 64MiB).

A store completes when the first tier has the block, and the caller may reuse its rows. For the slower tiers, blocks are read
back from that tier into the buffer and written by separate connectors, so no caller waits. If these fall behind, copies are
skipped, and counted as failed stores of the slower tier.

Each tier may use its own codec, but not a lossy one: a block that became inexact in one tier, and in the pool that loaded it
from there, would be stored in another tier as exact.

A tier that times out for all blocks of an operation is skipped for as long as its timeout, and then until it has answered
one operation. A tier that cannot be attached is
retried every few seconds, as long as at least one tier is attached.
"""

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import numpy as np

from pdserve.errors import SetupError, StoreOut
from pdserve.kv_transfer.batched import MIN_BYTES_PER_S
from pdserve.kv_transfer.breaker import StoreBreaker
from pdserve.kv_transfer.codec import CODECS
from pdserve.kv_transfer.connector import PROBE_KEY, Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.url import Query, split_tiers, without_password

log = logging.getLogger(__name__)

MAX_QUEUED_COPIES = 4096  # stores not yet copied to the slower tiers
_COPIERS = 2  # tasks that copy blocks to slower tiers, each with its own part of the buffer
_ATTACH_RETRY_S = 5.0
SLACK_S = 0.1  # by which an operation may be late
_DRAIN_TIMEOUT_S = 10.0  # at close, for copies to slower tiers
# The outcome reported for a block that failed in all tiers: the first of these that occurred.
_PRECEDENCE = (Outcome.CORRUPT, Outcome.FULL, Outcome.UNAVAILABLE, Outcome.MISSING)

T = TypeVar("T")


class _Tier:
    """One tier. `front` transfers the caller's pool rows, `back` those of the buffer, so neither waits for the other."""

    def __init__(self, number: int, url: str) -> None:
        self.url = url
        self.front = self.back = connect(url)
        if self.front.in_place:
            raise SetupError(
                f"{self.front.scheme}:// reads pools in place and keeps no copies, so it cannot be a tier."
            )
        self.name = f"tiered/{number}/{self.front.scheme}"
        self.timeout = self.front.capabilities.timeout_s
        self.attached = False
        # Another tier can take over after a single time-out. The probe after a pause is an operation that waits for it.
        self._breaker = StoreBreaker(self.timeout, threshold=1, pause=self.timeout)
        self._skipped = Stats()
        self._limited_log = RateLimitedLog(self.name)

    def attach(self, memory: PoolMemory, buffer: PoolMemory) -> None:
        """Attach both connectors. May be retried after a `SetupError`."""
        front, back = connect(self.url), connect(self.url)
        try:
            front.attach(memory)
            back.attach(buffer)
        except BaseException:
            front.close()
            back.close()
            raise
        self.front, self.back, self.attached = front, back, True

    def close(self) -> None:
        if self.attached:
            self.back.close()
            self.front.close()

    async def transfer(self, direction: str, keys: list[bytes], call: Callable[[], Future[Result]]) -> list[Outcome]:
        """Return the outcomes of a store or load; all UNAVAILABLE if the tier is not attached or does not answer."""
        none_done = [Outcome.UNAVAILABLE] * len(keys)
        if not self.attached or not self._breaker.allows(time.monotonic()):
            if keys != [PROBE_KEY]:
                self.count_skipped(direction, len(keys))
            return none_done
        result = await self._call(call, self._breaker.record_transfer)
        return result.outcomes if result else none_done

    async def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys; 0 if the tier is not attached or does not answer."""
        if not self.attached or not self._breaker.allows(time.monotonic()):
            return 0
        return await self._call(lambda: self.front.match(keys), self._breaker.record_match) or 0

    def count_skipped(self, direction: str, blocks: int) -> None:
        """Count blocks that were not transferred because the tier was skipped."""
        self._skipped.count_failures(direction, Outcome.UNAVAILABLE, blocks)

    def stats(self) -> Stats:
        total = self.front.stats().plus(self.back.stats()) if self.attached else Stats()
        return dataclasses.replace(total.plus(self._skipped), is_out=not self.attached or self._breaker.is_out)

    async def _call(self, call: Callable[[], Future[T]], record: Callable[[T, float, float], None]) -> T | None:
        """Await a call and return its result; None after an exception. Records whether the store answered it."""
        started = time.monotonic()
        try:
            result = await asyncio.wrap_future(call())
        except Exception as error:  # noqa: BLE001 - of one tier; the others go on
            self._limited_log.warning(f"connector error: {type(error).__name__}: {error}", kind="error")
            return None
        now = time.monotonic()
        record(result, now - started, now)
        if self._breaker.is_open:
            self._limited_log.warning(f"timed out, and is skipped for {self.timeout:g} s", kind="timeout")
        return result


class TieredConnector(Connector):
    """Combines several connectors as tiers, called from one thread that runs an event loop."""

    scheme: ClassVar[str] = "tiered"

    def __init__(self, url: str) -> None:
        own, urls = split_tiers(url)
        query = Query(own)
        self._buffer_bytes = query.size("buffer", 64 << 20)
        query.done()
        if len(urls) < 2:
            form = "tiered://shm://kv?size=1GiB,file:///mnt/kv"
            raise SetupError(f"{without_password(url)!r} must have at least two tiers, fastest first, such as {form}.")
        self._tiers = [_Tier(number, tier_url) for number, tier_url in enumerate(urls, 1)]
        codecs = {tier.front.capabilities.codec for tier in self._tiers}
        lossy = [name for name in codecs if CODECS[name].lossy]
        if lossy and len(codecs) > 1:
            raise SetupError(
                f"{without_password(url)!r}: a tier with codec={lossy[0]} needs the same codec on all tiers."
            )
        self._stats = Stats()
        self._limited_log = RateLimitedLog(self.scheme)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    # The connector contract.

    @property
    def capabilities(self) -> Capabilities:
        """An operation may try each tier in turn. The codec is the first tier's: only lossless ones differ between tiers."""
        fronts = [tier.front.capabilities for tier in self._tiers]
        return Capabilities(
            timeout_s=sum(front.timeout_s for front in fronts),
            keeps_leases=all(front.keeps_leases for front in fronts),
            prolongs=any(front.prolongs for front in fronts),
            skips_hanging=True,
            relayable=all(front.relayable for front in fronts),
            one_process=all(front.one_process for front in fronts),
            codec=fronts[0].codec,
        )

    def attach(self, memory: PoolMemory) -> None:
        self.memory = memory
        rows = max(_COPIERS, min(len(memory.rows), self._buffer_bytes // memory.layout.block_bytes))
        buffer = np.zeros((rows, memory.layout.block_bytes), np.uint8)
        self._buffer = dataclasses.replace(memory, rows=buffer)
        try:
            self._attach_tiers()
            started: Future[None] = Future()
            thread = threading.Thread(target=self._run_loop, args=(started,), name="kv-tiered", daemon=True)
            thread.start()
            started.result()
        except BaseException:  # such as for lack of descriptors
            self.close()
            raise
        self._thread = thread

    def _attach_tiers(self) -> None:
        """Attach the tiers that can be used. Raises `SetupError` or `StoreOut` if there is none."""
        errors = [error for tier in self._tiers if (error := self._try_to_attach(tier)) is not None]
        if len(errors) == len(self._tiers):
            are_out = any(isinstance(error, StoreOut) for error in errors)
            if not are_out or not self.may_start_out:
                message = f"None of the tiers can be used. {' '.join(map(str, errors))}"
                raise (StoreOut if are_out else SetupError)(message)
            self.has_started_out = True
        for error in errors:
            log.warning("%s Retrying every %g s; using the other tiers until then.", error, _ATTACH_RETRY_S)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.memory.check(keys, block_ids)
        return self._submit(self._store(list(keys), list(block_ids), lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self.memory.check(keys, block_ids)
        return self._submit(self._load(list(keys), list(block_ids)))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return self._submit(self._match(list(keys)))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._submit(self._release(list(keys)))

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self._submit(self._prolong(list(keys), lease_s))

    def stats(self) -> Stats:
        """Return the counters. `bytes` excludes background copies; `parts` has all counters by tier."""
        parts = {tier.name: tier.stats() for tier in self._tiers}
        fronts = functools.reduce(Stats.plus, (tier.front.stats() for tier in self._tiers if tier.attached), Stats())
        return dataclasses.replace(self._stats.plus(Stats()), bytes=fronts.bytes, parts=parts)

    def settle(self) -> None:
        """Wait until all blocks stored so far have been copied to the slower tiers."""
        self._submit(self._queue.join()).result()

    def parts(self) -> Sequence[Connector]:
        self.settle()
        return [tier.front for tier in self._tiers if tier.attached]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(self._close_limit_s())
            if self._thread.is_alive():
                log.warning("tiered: closed while background work still waits for a tier")
        for tier in self._tiers:
            tier.close()

    def _close_limit_s(self) -> float:
        """Return the seconds within which operations in flight and the copies that are waited for end."""
        return self.capabilities.timeout_s + len(self._tiers) * self._moving_s(len(self.memory.rows)) + _DRAIN_TIMEOUT_S

    def _moving_s(self, blocks: int) -> float:
        """Return the seconds by which the timeout of an operation on this many blocks is extended, by each tier."""
        return blocks * self.memory.layout.block_bytes / MIN_BYTES_PER_S

    # On the event loop's thread.

    def _run_loop(self, started: Future[None]) -> None:
        work = self._run(started)
        try:
            asyncio.run(work)
        except Exception as error:
            work.close()
            if started.done():
                raise
            started.set_exception(error)

    async def _run(self, started: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._queue: asyncio.Queue[tuple[int, list[bytes], float]] = asyncio.Queue(MAX_QUEUED_COPIES)
        parts = np.array_split(np.arange(len(self._buffer.rows)), _COPIERS)
        background_tasks = [asyncio.create_task(self._copy_to_slower_tiers(part.tolist())) for part in parts]
        background_tasks.append(asyncio.create_task(self._retry_attaching()))
        for task in background_tasks:
            task.add_done_callback(_log_exception)
        started.set_result(None)
        await self._stop.wait()
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                await self._queue.join()
        except TimeoutError:
            log.warning("tiered: closed with %d stores not copied to the slower tiers", self._queue.qsize())
        for task in background_tasks:
            task.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: rows stay reserved until the end
        if self._closed or self._thread is None:
            work.close()
            raise RuntimeError("tiered: closed" if self._closed else "tiered: not attached")
        self._loop.call_soon_threadsafe(self._start, work, future)
        return future

    def _start(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = asyncio.create_task(_run_into_future(work, future))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _store(self, keys: list[bytes], ids: list[int], lease_s: float) -> Result:
        result, moved = await self._try_tiers("store", keys, ids, lease_s=lease_s)
        for number, blocks in enumerate(moved[:-1]):
            if blocks:
                self._queue_copy(number, [keys[block] for block in blocks], lease_s)
        return result

    async def _load(self, keys: list[bytes], ids: list[int]) -> Result:
        give_up_at = time.monotonic() + self.capabilities.timeout_s + len(self._tiers) * self._moving_s(len(keys))
        result, moved = await self._try_tiers("load", keys, ids)
        await asyncio.gather(
            *(
                self._promote(faster, [keys[block] for block in blocks], [ids[block] for block in blocks], give_up_at)
                for number, blocks in enumerate(moved)
                for faster in self._tiers[:number]
                if blocks
            )
        )
        return result

    async def _match(self, keys: list[bytes]) -> int:
        """Continue the match in each tier where the previous one ended, until no tier finds more or time is up."""
        give_up_at = time.monotonic() + self.capabilities.timeout_s
        found, exhausted = 0, 0  # exhausted: consecutive tiers that found no more
        while True:
            for tier in self._tiers:
                is_exhausted = found == len(keys) or exhausted == len(self._tiers)
                if is_exhausted or time.monotonic() + tier.timeout > give_up_at + SLACK_S:
                    return found
                more = await tier.match(keys[found:])
                found += more
                exhausted = 1 if more else exhausted + 1

    async def _release(self, keys: list[bytes]) -> None:
        for tier in self._tiers:
            if tier.attached:
                tier.front.release(keys)

    async def _prolong(self, keys: list[bytes], lease_s: float) -> None:
        for tier in self._tiers:
            if tier.attached and tier.front.capabilities.prolongs:
                tier.front.prolong(keys, lease_s=lease_s)

    async def _try_tiers(
        self, direction: str, keys: list[bytes], ids: list[int], **options: float
    ) -> tuple[Result, list[list[int]]]:
        """Store or load in the tiers in turn, each for the blocks that the previous tiers did not transfer.

        Args:
            options: of the method.

        Returns:
            The result, and for each tier the indices of the blocks it transferred.
        """
        started = time.perf_counter()
        outcomes: list[Outcome] = [Outcome.MISSING] * len(keys)
        moved: list[list[int]] = []
        remaining = list(range(len(keys)))
        for tier in self._tiers:
            moved.append([])
            if not remaining:
                continue
            tier_keys, rows = [keys[block] for block in remaining], [ids[block] for block in remaining]
            call = functools.partial(getattr(tier.front, direction), tier_keys, rows, **options)
            tier_outcomes = await tier.transfer(direction, tier_keys, call)
            for block, outcome in zip(remaining, tier_outcomes, strict=True):
                if outcome is Outcome.OK:
                    moved[-1].append(block)
                    outcomes[block] = outcome
                else:
                    outcomes[block] = min(outcome, outcomes[block], key=_PRECEDENCE.index)
            remaining = [block for block in remaining if outcomes[block] is not Outcome.OK]
        result = Result(outcomes, time.perf_counter() - started)
        if keys != [PROBE_KEY]:
            self._stats.count(direction, result)
        return result, moved

    async def _promote(self, tier: _Tier, keys: list[bytes], ids: list[int], give_up_at: float) -> None:
        if time.monotonic() + tier.timeout + self._moving_s(len(keys)) > give_up_at + SLACK_S:
            tier.count_skipped("store", len(keys))
            return
        await tier.transfer("store", keys, lambda: tier.front.store(keys, ids, lease_s=0.0))

    def _queue_copy(self, number: int, keys: list[bytes], lease_s: float) -> None:
        try:
            self._queue.put_nowait((number, keys, lease_s))
        except asyncio.QueueFull:
            self._count_skipped(number, len(keys))

    async def _copy_to_slower_tiers(self, rows: list[int]) -> None:
        while True:
            number, keys, lease_s = await self._queue.get()
            for start in range(0, len(keys), len(rows)):
                await self._copy_down(number, keys[start : start + len(rows)], rows, lease_s)
            self._queue.task_done()

    async def _copy_down(self, number: int, keys: list[bytes], rows: list[int], lease_s: float) -> None:
        source = self._tiers[number]
        rows = rows[: len(keys)]
        outcomes = await source.transfer("load", keys, functools.partial(source.back.load, keys, rows))
        loaded = [block for block, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        self._count_skipped(number, len(keys) - len(loaded))
        keys, rows = [keys[block] for block in loaded], [rows[block] for block in loaded]
        await asyncio.gather(
            *(
                tier.transfer("store", keys, functools.partial(tier.back.store, keys, rows, lease_s=lease_s))
                for tier in self._tiers[number + 1 :]
                if keys
            )
        )

    def _count_skipped(self, number: int, blocks: int) -> None:
        for tier in self._tiers[number + 1 :]:
            if blocks:
                tier.count_skipped("store", blocks)

    def _try_to_attach(self, tier: _Tier) -> SetupError | None:
        """Attach a tier. Returns the error, or None on success."""
        try:
            tier.attach(self.memory, self._buffer)
        except SetupError as error:
            return error
        return None

    async def _retry_attaching(self) -> None:
        while missing := [tier for tier in self._tiers if not tier.attached]:
            await asyncio.sleep(_ATTACH_RETRY_S)
            for tier in missing:
                try:
                    if await asyncio.to_thread(self._try_to_attach, tier) is None:
                        log.warning("%s is attached now", tier.name)
                except Exception as error:  # noqa: BLE001 - of one tier, which is tried again, as are the others
                    self._limited_log.warning(f"{tier.name}: {type(error).__name__}: {error}", kind=tier.name)


def _log_exception(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("tiered: background work ended by an exception", exc_info=error)


async def _run_into_future(work: Awaitable[T], future: Future[T]) -> None:
    try:
        future.set_result(await work)
    except Exception as error:  # noqa: BLE001 - raised to the caller, not in this loop
        future.set_exception(error)
