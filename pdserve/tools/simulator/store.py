"""Simulated KV store: remembers keys and times in place of bytes, and the connector through which instances reach it."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pdserve.kv_transfer.connector import Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.tools.simulator.virtual_clock import VirtualClock


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a connector.

    Attributes:
        latency_s, store_latency_s: of one load or store, whatever its size.
        bytes_per_s, store_bytes_per_s: of one load or store alone.
        total_bytes_per_s: of all operations of all instances together.
        streams: operations that one instance has under way at a time; further ones wait.
        follows: blocks can be loaded while later ones of the same prompt are still being stored.
    """

    latency_s: float
    bytes_per_s: float
    total_bytes_per_s: float
    streams: int = 2
    follows: bool = False
    store_latency_s: float | None = None
    store_bytes_per_s: float | None = None


class Lanes:
    """A number of servers with one queue in order of arrival.

    Attributes:
        busy_seconds: for which a server has been, or will have been, occupied in the mean.
    """

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self.busy_seconds = 0.0

    def begin(self, now: float) -> float:
        """Return when the first of them is free."""
        return max(now, self._free_at[0])

    def take(self, begin: float, end: float) -> None:
        """Occupy the first of them."""
        heapq.heapreplace(self._free_at, end)
        self.busy_seconds += (end - begin) / len(self._free_at)


@dataclass(slots=True)
class _Block:
    nbytes: int
    stored_at: float
    leased_until: float


class SimulatedStore:
    """The KV store that the instances of a deployment share.

    Args:
        capacity: bytes; the least recently used blocks without a lease are evicted.
    """

    def __init__(self, link: Link, capacity: int) -> None:
        self.link = link
        self._num_free = capacity
        # As many operations at full speed as the shared link allows; the same for both directions.
        self.lanes = Lanes(max(1, round(link.total_bytes_per_s / link.bytes_per_s)))
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # least recently used first

    @property
    def leases(self) -> dict[bytes, float]:
        """The end of each block's lease, by its key."""
        return {key: block.leased_until for key, block in self._blocks.items()}

    def renew(self, key: bytes, until: float) -> bool:
        """Prolong the lease of a block that the store has, or is being given. Returns False if it is neither."""
        block = self._blocks.get(key)
        if block is None:
            return False
        block.leased_until = max(block.leased_until, until)
        self._blocks.move_to_end(key)
        return True

    def put(self, key: bytes, nbytes: int, now: float, stored_at: float, lease_s: float) -> bool:
        """Store a new block that will be complete at `stored_at`. Returns False if there is no room."""
        while nbytes > self._num_free:
            if not self._evict(now):
                return False
        self._num_free -= nbytes
        self._blocks[key] = _Block(nbytes, stored_at, stored_at + lease_s)
        return True

    def stored_at(self, key: bytes) -> float | None:
        """Return when a block is, or was, complete; None if the store does not have it."""
        block = self._blocks.get(key)
        if block is None:
            return None
        self._blocks.move_to_end(key)
        return block.stored_at

    def release(self, key: bytes) -> None:
        """End the lease of a block."""
        if (block := self._blocks.get(key)) is not None:
            block.leased_until = 0.0

    def discard(self, key: bytes) -> None:
        """Forget a block whose writer has stopped in the middle of it."""
        if (block := self._blocks.pop(key, None)) is not None:
            self._num_free += block.nbytes

    def _evict(self, now: float) -> bool:
        key = next((key for key, block in self._blocks.items() if block.leased_until <= now), None)
        if key is not None:
            self.discard(key)
        return key is not None


class SimulatedConnector(Connector):
    """One instance's connector to a simulated store, for one group of blocks. Its futures complete on the virtual clock.

    Args:
        now: time of the instance, which may be ahead of the clock's: it does not stop in the middle of a step.
        block_bytes: of a block in the store.
        group: index of the group, whose blocks have the keys of those of other groups.
    """

    scheme = "simulated"

    def __init__(
        self, clock: VirtualClock, now: Callable[[], float], store: SimulatedStore, block_bytes: int, group: int = 0
    ) -> None:
        self._namespace = bytes([group]) if group else b""
        self._clock = clock
        self._now = now
        self._store = store
        self._block_bytes = block_bytes
        self.lanes = Lanes(store.link.streams)
        self._stats = Stats()
        self._writes: deque[tuple[float, bytes]] = deque()  # when each block that it writes is complete
        self._has_stopped = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(follows=self._store.link.follows, prolongs=True, skips_hanging=True)

    def attach(self, memory: PoolMemory) -> None: ...

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._start("store", partial(self._store_now, self._named(keys), lease_s))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._start("load", partial(self._load_now, self._named(keys)))

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._start("load", partial(self._follow_now, self._named(keys), patience_s))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        future: Future[int] = Future()
        # Other groups are matched when the answer about the first arrives, which may be in the middle of a step.
        asked_at = self._clock.time if self._namespace else self._now()
        self._at(asked_at + self._store.link.latency_s, lambda: future.set_result(self._match_now(keys)))
        return future

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        """End leases once the clock has reached the instance's time."""

        def end() -> None:
            for key in self._named(keys):
                self._store.release(key)

        self._at(self._now(), end)

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        until = self._now() + lease_s
        self._at(self._now(), lambda: [self._store.renew(key, until) for key in self._named(keys)])

    def stats(self) -> Stats:
        return self._stats

    def close(self) -> None: ...

    def stop(self) -> None:
        """End with the instance's process: nothing begins any more, and blocks that are half written never appear."""
        self._has_stopped = True
        for stored_at, key in self._writes:
            if stored_at > self._clock.time:
                self._store.discard(key)

    def _named(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of this group's blocks in the store."""
        return [self._namespace + key for key in keys] if self._namespace else keys

    def _at(self, time: float, action: Callable[[], object]) -> None:
        """Call the action at this time, if the instance is alive then."""
        self._clock.at(time, lambda: None if self._has_stopped else action())

    def _start(self, direction: str, operation: Callable[[], tuple[float, list[Outcome]]]) -> Future[Result]:
        """Start an operation once the clock has reached the instance's time, so that operations queue in order of time."""
        future: Future[Result] = Future()
        called_at = self._now()

        def begin() -> None:
            begun_at = self.lanes.begin(self._clock.time)
            end, outcomes = operation()
            self.lanes.take(begun_at, end)
            result = Result(outcomes, end - called_at)
            self._stats.count(direction, result)
            self._at(end, lambda: future.set_result(result))

        self._at(called_at, begin)
        return future

    def _store_now(self, keys: Sequence[bytes], lease_s: float) -> tuple[float, list[Outcome]]:
        """Store the blocks that the store does not have; the leases of the others are prolonged."""
        store, link, now = self._store, self._store.link, self._clock.time
        while self._writes and self._writes[0][0] <= now:
            self._writes.popleft()
        latency_s = link.latency_s if link.store_latency_s is None else link.store_latency_s
        known = [store.renew(key, now + latency_s + lease_s) for key in keys]
        begin, each_s = self._book(known.count(False), latency_s, link.store_bytes_per_s or link.bytes_per_s)
        end, outcomes = begin, list[Outcome]()
        for key, is_known in zip(keys, known, strict=True):
            if is_known:
                outcomes.append(Outcome.OK)
                continue
            end += each_s
            if store.put(key, self._block_bytes, now, end, lease_s):
                outcomes.append(Outcome.OK)
                self._writes.append((end, key))
            else:
                outcomes.append(Outcome.FULL)
        return end, outcomes

    def _load_now(self, keys: Sequence[bytes]) -> tuple[float, list[Outcome]]:
        begin, each_s = self._book(len(keys), self._store.link.latency_s, self._store.link.bytes_per_s)
        stored = [self._store.stored_at(key) for key in keys]
        outcomes = [Outcome.OK if at is not None and at <= begin else Outcome.MISSING for at in stored]
        return begin + each_s * outcomes.count(Outcome.OK), outcomes

    def _follow_now(self, keys: Sequence[bytes], patience_s: float) -> tuple[float, list[Outcome]]:
        begin, each_s = self._book(len(keys), self._store.link.latency_s, self._store.link.bytes_per_s)
        end, outcomes = begin, list[Outcome]()
        for key in keys:
            at = self._store.stored_at(key)
            if at is None or at > end + patience_s:
                end += patience_s
                outcomes += [Outcome.MISSING] * (len(keys) - len(outcomes))
                break
            end = max(end, at) + each_s
            outcomes.append(Outcome.OK)
        return end, outcomes

    def _match_now(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the store has."""
        now = self._clock.time
        times = (self._store.stored_at(key) for key in self._named(keys))
        return next((i for i, at in enumerate(times) if at is None or at > now), len(keys))

    def _book(self, blocks: int, latency_s: float, bytes_per_s: float) -> tuple[float, float]:
        """Reserve the shared link. Returns when the operation begins to move bytes, and the seconds per block."""
        now, each_s = self._clock.time, self._block_bytes / bytes_per_s
        begin = max(self.lanes.begin(now), self._store.lanes.begin(now))
        self._store.lanes.take(begin, begin + latency_s + blocks * each_s)
        return begin + latency_s, each_s
