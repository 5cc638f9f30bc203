"""`tiered://shm://kv?size=8GiB,redis://host:6379/0`: several stores as one, fastest first.

    store    goes to the first tier that takes the block, and later from there to the slower ones
    load     comes from the first tier that has the block whole, and goes to the faster ones before it ends
    match    counts leading keys that any tier has

The URLs of the tiers stand behind each other with commas. Our own parameter stands before them, as in
`tiered://?buffer=256MiB,shm://kv,file:///mnt/kv`: the memory through which blocks pass on their way to slower tiers (64MiB).

A store is done when the first tier has it: its rows are the caller's again. What goes to the slower tiers is read from the
tier that has it, into rows of our own, by connectors of their own that nobody waits for. If these do not keep up, blocks
are left out, and counted as stores that the slower tier did not take.

Each tier may have a codec of its own, but for lossy ones: what has lost something in one tier, and in the pool that has
loaded it from there, would be stored in another one as exact.

A tier that answers for no block of an operation is left alone for as long as its time-out. One that cannot be attached is
tried again every few seconds, as long as another one can be.
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

from pdserve.errors import SetupError
from pdserve.kv_transfer.codec import CODECS, Codec
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.url import Query, tiers, without_password

log = logging.getLogger(__name__)

MAX_BEHIND = 4096  # stores that wait for the slower tiers
_WRITERS = 2  # that bring blocks to slower tiers, each with its part of the buffer
_ATTACH_EVERY_S = 5.0
_CLOSE_S = 10.0  # for what still has to go to slower tiers
_DEFAULT_TIMEOUT_S = 5.0
_SAYS_MOST = (Outcome.CORRUPT, Outcome.FULL, Outcome.UNAVAILABLE, Outcome.MISSING)  # of a block that no tier moved

T = TypeVar("T")


class _Tier:
    """A connector, twice: `front` moves the caller's rows, `back` those of the buffer, so neither waits for the other."""

    def __init__(self, number: int, url: str) -> None:
        self.url = url
        self.front = self.back = connect(url)
        if self.front.in_place:
            raise SetupError(f"{self.front.scheme}:// reads pools in place and has no copy that a tier could keep.")
        self.name = f"tiered/{number}/{self.front.scheme}"
        self.timeout = float(getattr(self.front, "timeout", _DEFAULT_TIMEOUT_S))
        self.attached = False
        self._rests_until = 0.0
        self._left_out = Stats()
        self._complaints = RateLimitedLog(self.name)

    def attach(self, memory: PoolMemory, buffer: PoolMemory) -> None:
        """May be tried again after a `SetupError`."""
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

    @property
    def awake(self) -> bool:
        return self.attached and time.monotonic() >= self._rests_until

    async def ask(self, direction: str, blocks: int, call: Callable[[], Future[Result]]) -> list[Outcome]:
        """Its outcomes; all UNAVAILABLE where the tier is left alone."""
        nothing = [Outcome.UNAVAILABLE] * blocks
        if not self.awake:
            self.leave_out(direction, blocks)
            return nothing
        result = await self._answer(call, lambda result: result.outcomes == nothing)
        return result.outcomes if result else nothing

    async def match(self, keys: Sequence[bytes]) -> int:
        if not self.awake:
            return 0
        return await self._answer(lambda: self.front.match(keys), lambda found: found == 0) or 0

    def leave_out(self, direction: str, blocks: int) -> None:
        """Counts blocks that are not asked of this tier."""
        self._left_out.fail(direction, Outcome.UNAVAILABLE, blocks)

    def stats(self) -> Stats:
        moved = self.front.stats().plus(self.back.stats()) if self.attached else Stats()
        return moved.plus(self._left_out)

    async def _answer(self, call: Callable[[], Future[T]], in_vain: Callable[[T], bool]) -> T | None:
        """The answer, None for a defect. A tier that took all of its time for nothing gets a rest."""
        started = time.monotonic()
        try:
            answer = await asyncio.wrap_future(call())
        except Exception as defect:  # noqa: BLE001 - of one tier; the others go on
            self._complaints.add(f"a defect of the connector: {type(defect).__name__}: {defect}", kind="defect")
            return None
        now = time.monotonic()
        if in_vain(answer) and now - started > 0.9 * self.timeout:
            self._complaints.add(f"does not answer, and is left alone for {self.timeout:g} s", kind="rest")
            self._rests_until = now + self.timeout
        return answer


class TieredConnector(Connector):
    """All tiers are called from one thread, which runs an event loop.

    Attributes:
        timeout: the sum of the tiers' time-outs, since a block may be asked of each.
    """

    scheme: ClassVar[str] = "tiered"

    def __init__(self, url: str) -> None:
        own, urls = tiers(url)
        query = Query(own)
        self._buffer_bytes = query.size("buffer", 64 << 20)
        query.done()
        if len(urls) < 2:
            form = "tiered://shm://kv?size=1GiB,file:///mnt/kv"
            raise SetupError(f"{without_password(url)!r} needs two tiers or more, fastest first, such as {form}.")
        self._tiers = [_Tier(number, one) for number, one in enumerate(urls, 1)]
        codecs = {getattr(tier.front, "codec_name", "none") for tier in self._tiers}
        lossy = [name for name in codecs if CODECS[name].lossy]
        if lossy and len(codecs) > 1:
            raise SetupError(f"{without_password(url)!r}: a tier with codec={lossy[0]} needs the same on all tiers.")
        self.timeout = sum(tier.timeout for tier in self._tiers)
        self._stats = Stats()
        self._under_way: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def connectors(self) -> list[Connector]:
        """The tiers that can be used, for the conformance kit."""
        return [tier.front for tier in self._tiers if tier.attached]

    @property
    def codec(self) -> Codec | None:
        """The first tier's, through which everything goes. Others may have another, if it changes nothing."""
        return getattr(self._tiers[0].front, "codec", None)

    @property
    def keeps_leases(self) -> bool:
        return all(getattr(tier.front, "keeps_leases", True) for tier in self._tiers)

    # The contract.

    def attach(self, memory: PoolMemory) -> None:
        self.memory = memory
        rows = max(_WRITERS, min(len(memory.rows), self._buffer_bytes // memory.layout.block_bytes))
        buffer = np.zeros((rows, memory.layout.block_bytes), np.uint8)
        self._buffer = dataclasses.replace(memory, rows=buffer)
        troubles = [trouble for tier in self._tiers if (trouble := self._try_to_attach(tier))]
        if len(troubles) == len(self._tiers):
            raise SetupError(f"None of the tiers can be used. {' '.join(troubles)}")
        for trouble in troubles:
            log.warning("%s It is tried again every %g s; until then the other tiers do.", trouble, _ATTACH_EVERY_S)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name="kv-tiered", daemon=True)
        self._thread.start()
        started.result()

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

    def stats(self) -> Stats:
        """Bytes are those of the tiers' fronts: what the callers waited for. `parts` has everything, by tier."""
        parts = {tier.name: tier.stats() for tier in self._tiers}
        fronts = functools.reduce(Stats.plus, (one.stats() for one in self.connectors), Stats())
        return dataclasses.replace(self._stats.plus(Stats()), bytes=fronts.bytes, parts=parts)

    def settle(self) -> None:
        """Waits until all that was stored so far has gone to the slower tiers."""
        self._submit(self._queue.join()).result()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        for tier in self._tiers:
            tier.close()

    # On the event loop's thread.

    async def _run(self, started: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._queue: asyncio.Queue[tuple[int, list[bytes], float]] = asyncio.Queue(MAX_BEHIND)
        parts = np.array_split(np.arange(len(self._buffer.rows)), _WRITERS)
        helpers = [asyncio.create_task(self._write_behind(part.tolist())) for part in parts]
        helpers.append(asyncio.create_task(self._attach_the_missing()))
        started.set_result(None)
        await self._stop.wait()
        while self._under_way:
            await asyncio.wait(self._under_way)
        try:
            await asyncio.wait_for(self._queue.join(), _CLOSE_S)
        except TimeoutError:
            log.warning("tiered: closed with %d stores that did not get to the slower tiers", self._queue.qsize())
        for helper in helpers:
            helper.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # rows stay reserved until the end, so nobody can cancel
        if self._closed or self._thread is None:
            work.close()
            raise RuntimeError("tiered: closed" if self._closed else "tiered: not attached")
        self._loop.call_soon_threadsafe(self._start, work, future)
        return future

    def _start(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = asyncio.create_task(_settle(work, future))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _store(self, keys: list[bytes], ids: list[int], lease_s: float) -> Result:
        def store(tier: _Tier, keys: list[bytes], ids: list[int]) -> Future[Result]:
            return tier.front.store(keys, ids, lease_s=lease_s)

        result, moved = await self._pass_down("store", keys, ids, store)
        for number, blocks in enumerate(moved[:-1]):
            if blocks:
                self._leave_for_later(number, [keys[block] for block in blocks], lease_s)
        return result

    async def _load(self, keys: list[bytes], ids: list[int]) -> Result:
        def load(tier: _Tier, keys: list[bytes], ids: list[int]) -> Future[Result]:
            return tier.front.load(keys, ids)

        result, moved = await self._pass_down("load", keys, ids, load)
        await asyncio.gather(
            *(
                self._promote(faster, [keys[block] for block in blocks], [ids[block] for block in blocks])
                for number, blocks in enumerate(moved)
                for faster in self._tiers[:number]
                if blocks
            )
        )
        return result

    async def _match(self, keys: list[bytes]) -> int:
        """A tier may go on where another one ends, as often as there is time for."""
        give_up = time.monotonic() + self.timeout
        found, ended = 0, 0  # ended: tiers in a row that had no more
        while True:
            for tier in self._tiers:
                if found == len(keys) or ended == len(self._tiers) or time.monotonic() + tier.timeout > give_up + 0.1:
                    return found
                more = await tier.match(keys[found:])
                found += more
                ended = 1 if more else ended + 1

    async def _release(self, keys: list[bytes]) -> None:
        for tier in self._tiers:
            if tier.attached:
                tier.front.release(keys)

    async def _pass_down(
        self,
        direction: str,
        keys: list[bytes],
        ids: list[int],
        call: Callable[[_Tier, list[bytes], list[int]], Future[Result]],
    ) -> tuple[Result, list[list[int]]]:
        """Asks the tiers in turn, each for what those before it have not moved.

        Returns:
            The result, and for each tier which blocks of the call it moved.
        """
        started = time.perf_counter()
        outcomes: list[Outcome] = [Outcome.MISSING] * len(keys)
        moved: list[list[int]] = []
        left = list(range(len(keys)))
        for tier in self._tiers:
            moved.append([])
            if not left:
                continue
            theirs, rows = [keys[block] for block in left], [ids[block] for block in left]
            seen = await tier.ask(direction, len(left), functools.partial(call, tier, theirs, rows))
            for block, outcome in zip(left, seen, strict=True):
                if outcome is Outcome.OK:
                    moved[-1].append(block)
                    outcomes[block] = outcome
                else:
                    outcomes[block] = min(outcome, outcomes[block], key=_SAYS_MOST.index)
            left = [block for block in left if outcomes[block] is not Outcome.OK]
        result = Result(outcomes, time.perf_counter() - started)
        self._stats.count(direction, result)
        return result, moved

    async def _promote(self, tier: _Tier, keys: list[bytes], ids: list[int]) -> None:
        await tier.ask("store", len(keys), lambda: tier.front.store(keys, ids, lease_s=0.0))

    def _leave_for_later(self, number: int, keys: list[bytes], lease_s: float) -> None:
        try:
            self._queue.put_nowait((number, keys, lease_s))
        except asyncio.QueueFull:
            self._leave_out(number, len(keys))

    async def _write_behind(self, rows: list[int]) -> None:
        while True:
            number, keys, lease_s = await self._queue.get()
            for start in range(0, len(keys), len(rows)):
                await self._copy_down(number, keys[start : start + len(rows)], rows, lease_s)
            self._queue.task_done()

    async def _copy_down(self, number: int, keys: list[bytes], rows: list[int], lease_s: float) -> None:
        source = self._tiers[number]
        rows = rows[: len(keys)]
        read = await source.ask("load", len(keys), functools.partial(source.back.load, keys, rows))
        there = [block for block, outcome in enumerate(read) if outcome is Outcome.OK]
        self._leave_out(number, len(keys) - len(there))
        keys, rows = [keys[block] for block in there], [rows[block] for block in there]
        await asyncio.gather(
            *(
                tier.ask("store", len(keys), functools.partial(tier.back.store, keys, rows, lease_s=lease_s))
                for tier in self._tiers[number + 1 :]
                if keys
            )
        )

    def _leave_out(self, number: int, blocks: int) -> None:
        for tier in self._tiers[number + 1 :]:
            if blocks:
                tier.leave_out("store", blocks)

    def _try_to_attach(self, tier: _Tier) -> str:
        """What is in the way, as a sentence; empty if it is attached now."""
        try:
            tier.attach(self.memory, self._buffer)
        except SetupError as error:
            return str(error)
        return ""

    async def _attach_the_missing(self) -> None:
        while missing := [tier for tier in self._tiers if not tier.attached]:
            await asyncio.sleep(_ATTACH_EVERY_S)
            for tier in missing:
                if not await asyncio.to_thread(self._try_to_attach, tier):
                    log.warning("%s can be used now", tier.name)


async def _settle(work: Awaitable[T], future: Future[T]) -> None:
    try:
        future.set_result(await work)
    except Exception as defect:  # noqa: BLE001 - it belongs to the caller, not to this loop
        future.set_exception(defect)
