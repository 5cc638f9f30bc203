"""The connector contract: the interface through which KV blocks leave one instance and reach another.

A connector handles blocks, keys and bytes, and nothing of the engine. The whole contract is the methods of `Connector`.
`store`, `load` and `match` return a `concurrent.futures.Future` at once, so the engine thread never waits on I/O. For a
plain key-value transport, derive from `kv_transfer.threaded.ThreadedConnector` instead: it provides the futures, the block
headers and the checksums, and needs only blocking `put`, `get`, `contains` and `delete`.

Rules that every connector keeps:
  1. A block that `load` reports as loaded holds exactly the bytes that were stored under that key in this namespace.
     A missing, torn, foreign, stale or corrupt block is reported as such and never returned as good data.
  2. A block becomes visible to `match` and `load` only after all of its bytes are stored.
  3. `match` counts leading keys: a key after the first missing one does not count.
  4. `store` reads the block's bytes until its future is done, and `load` writes them until its future is done. The caller
     keeps the block ids reserved until then, whatever else happens, and until `Result.held` is done where a store sets it.
  5. Every future completes within the connector's timeout. A fault of the store is a per-block outcome, not an exception;
     the future raises only for a programming error.
  6. What a connector can do and how it has to be treated is in its `capabilities`, and nowhere else.
  7. An operation that can be cancelled returns an `OperationFuture`. A plain future means that it cannot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.keys import KEY_BYTES, Layout

API_VERSION = 2
DEFAULT_TIMEOUT_S = 5.0
PROBE_KEY = bytes(KEY_BYTES)  # of no block; loaded alone to ask a store that is out whether it is back

T = TypeVar("T")


class Outcome(StrEnum):
    """The outcome of storing or loading one block."""

    OK = "ok"
    MISSING = "missing"  # load: the store does not hold the block (any more)
    CORRUPT = "corrupt"  # load: header or checksum mismatch: torn, foreign, older layout, flipped bits
    FULL = "full"  # store: no space left
    UNAVAILABLE = "unavailable"  # the store did not respond in time, or not at all
    CANCELLED = "cancelled"  # the caller cancelled the operation


def first_failure(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the first outcome that is not OK, else OK: the outcome of an operation in several parts."""
    return next((outcome for outcome in outcomes if outcome is not Outcome.OK), Outcome.OK)


@dataclass(frozen=True)
class Result:
    """Result of a store or load: one outcome per block, in the order of the call.

    Attributes:
        outcomes: one per block.
        seconds: from the call until the transfer was complete.
        ticket: opaque bytes that the loading side needs to locate the blocks, for connectors that read a peer's memory
            instead of a shared store; otherwise empty.
        held: set by `store` of such a connector. Peers read the blocks in place, so the caller keeps them reserved and
            unchanged until this future is done (they have been read, or the lease has ended). None: the blocks were copied
            out and may be reused.
    """

    outcomes: list[Outcome]
    seconds: float
    ticket: bytes = b""
    held: Future[None] | None = None

    @property
    def leading(self) -> int:
        """The number of leading blocks whose outcome is OK."""
        for i, outcome in enumerate(self.outcomes):
            if outcome is not Outcome.OK:
                return i
        return len(self.outcomes)


class OperationFuture(Future[T]):
    """The future of an operation that can be cancelled on request.

    `cancel()` always fails, since the operation uses pool rows. `request_cancel()` asks it to end early.

    Args:
        stop: called by `request_cancel`, in any thread and at any time, also after the end. It returns at once. The future is
            then done as soon as no row is in use any more, with the outcome CANCELLED for the blocks that were not moved.
            None: a subclass implements `request_cancel`.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._stop = stop

    def request_cancel(self) -> None:
        """Ask the operation to end early. Returns at once."""
        assert self._stop is not None
        self._stop()


def request_cancel(future: Future[Any]) -> None:
    """Ask the operation of this future to end early. A plain future cannot be cancelled, so its operation goes on."""
    if isinstance(future, OperationFuture):
        future.request_cancel()


class GrowingStore(OperationFuture[Result]):
    """The future of a store whose blocks are still being written, front to back (`Connector.store_growing`)."""

    def advance(self, num_bytes: int) -> None:
        """Announce that the first `num_bytes` of every block are final, and return at once. The last bytes end the store."""
        raise NotImplementedError


@dataclass(frozen=True)
class Capabilities:
    """Optional features of a connector, and how callers must treat it. The defaults are those of the minimal connector.

    Attributes:
        timeout_s: seconds within which an operation on few blocks ends.
        in_place: peers read the pool's rows directly; see `Result.held`. Such a connector has no store and no tiers.
        follows: `follow` is supported.
        stores_growing: `store_growing` is supported.
        prolongs: `prolong` is supported.
        cancels: stores and loads return an `OperationFuture`.
        keeps_leases: the store does not evict a block before its lease ends. Only the conformance kit reads it.
        skips_hanging: the connector has circuit breakers of its own, so instances put none in front of it.
        relayable: the conformance kit may connect it to a relay in place of the `host:port` in its URL.
        one_process: blocks are found only in the process that stored them, as of a store for tests. Only the kit reads it.
        codec: name of the codec of stored blocks, one of `codec.CODECS`.
        gpu_memory: `attach` also takes pools in a GPU's memory, as `PoolMemory.gpu`.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    in_place: bool = False
    follows: bool = False
    stores_growing: bool = False
    prolongs: bool = False
    cancels: bool = False
    keeps_leases: bool = True
    skips_hanging: bool = False
    relayable: bool = True
    one_process: bool = False
    codec: str = "none"
    gpu_memory: bool = False


@dataclass(frozen=True)
class PoolMemory:
    """The memory of a pool, as a connector accesses it.

    Attributes:
        rows: the pool's bytes, uint8 of shape [num_blocks, block_bytes], C-contiguous, in host memory.
        layout: the format of a block; its namespace is written into every block header.
        gpu: the pool's rows in a GPU's memory (`Memory` of `connectors/nixl/memory.py`), for connectors with the capability
            `gpu_memory`; `rows` then has the shape of the pool, and none of its bytes. None: the pool is in host memory.
    """

    rows: npt.NDArray[np.uint8]
    layout: Layout
    gpu: Any = None

    def check(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Validate the arguments of a store or load. Raises `ValueError` if they are inconsistent or out of range."""
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys for {len(block_ids)} blocks")
        if set(map(len, keys)) - {KEY_BYTES}:
            raise ValueError(f"a key must have {KEY_BYTES} bytes")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self.rows):
            raise ValueError(f"block ids must be between 0 and {len(self.rows) - 1}")


@dataclass
class Stats:
    """Cumulative transfer counters since `attach`, by direction ("store", "load")."""

    bytes: dict[str, int] = field(default_factory=partial(dict[str, int], store=0, load=0))
    blocks: dict[str, int] = field(default_factory=partial(dict[str, int], store=0, load=0))
    seconds: dict[str, float] = field(default_factory=partial(dict[str, float], store=0.0, load=0.0))
    failures: dict[tuple[str, Outcome], int] = field(default_factory=dict)  # (direction, outcome) → blocks
    # Counters of each underlying store, by name, for a connector that combines several.
    parts: dict[str, "Stats"] = field(default_factory=dict)
    is_out: bool = False  # the store does not answer, and operations go on without it

    @property
    def any_out(self) -> bool:
        """True if the store, or one of several, is out."""
        return self.is_out or any(part.any_out for part in self.parts.values())

    def count(self, direction: str, result: Result, expected: Set[Outcome] = frozenset()) -> None:
        """Add a result to all counters except `bytes`, which a result does not contain.

        Args:
            expected: outcomes that are not counted.
        """
        self.blocks[direction] += 0 if Outcome.OK in expected else result.outcomes.count(Outcome.OK)
        self.seconds[direction] += result.seconds
        for outcome in set(result.outcomes) - {Outcome.OK} - expected:
            self.count_failures(direction, outcome, result.outcomes.count(outcome))

    def count_failures(self, direction: str, outcome: Outcome, blocks: int) -> None:
        self.failures[direction, outcome] = self.failures.get((direction, outcome), 0) + blocks

    def plus(self, other: "Stats") -> "Stats":
        """Return the sum of both, and of their parts of equal names. It is out if one of them is."""
        parts = {name: self.parts.get(name, Stats()).plus(part) for name, part in other.parts.items()}
        total = Stats(dict(self.bytes), dict(self.blocks), dict(self.seconds), dict(self.failures), self.parts | parts)
        total.is_out = self.is_out or other.is_out
        for direction in total.bytes:
            total.bytes[direction] += other.bytes[direction]
            total.blocks[direction] += other.blocks[direction]
            total.seconds[direction] += other.seconds[direction]
        for (direction, outcome), blocks in dict(other.failures).items():
            total.count_failures(direction, outcome, blocks)
        return total


class Connector(ABC):
    """Interface of one instance to the KV store. Created by `kv_transfer.registry.connect(url)`.

    `store`, `load`, `match`, `release` and `prolong` are called from a single thread, and do not wait for the store.
    """

    API_VERSION: ClassVar[int] = API_VERSION
    scheme: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()  # modules that take long to import, and that `attach` imports
    # Instances set `may_start_out` before `attach`. A connector that can begin without its store then sets `has_started_out`
    # instead of raising `StoreOut`, and connects once the store answers.
    may_start_out = False
    has_started_out = False

    @property
    def capabilities(self) -> Capabilities:
        """Features of this connector; constant, and available before `attach`. Default: those of the minimal connector."""
        return Capabilities()

    # Shorthands, which connectors do not override.
    in_place = cached_property(lambda self: self.capabilities.in_place)
    follows = cached_property(lambda self: self.capabilities.follows)

    @abstractmethod
    def attach(self, memory: PoolMemory) -> None:
        """Bind the pool. Called once, before any other method.

        Raises:
            SetupError: the store cannot be used (no space, created for another block size, wrong password).
            StoreOut: it does not answer.
        """

    @abstractmethod
    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        """Copy pool rows `block_ids` to the store under `keys`, leased for `lease_s` seconds.

        A store that supports leases does not evict a block before its lease ends. With a lease of 0 the store may evict
        the blocks at any time.
        """

    def store_growing(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> GrowingStore:
        """Like `store`, for blocks that are still being written: copies their final bytes while the rest is computed.

        Called only if `capabilities.stores_growing`. The blocks become visible when they are complete, as those of a `store`.
        """
        raise NotImplementedError(f"{self.scheme}:// does not support store_growing()")

    @abstractmethod
    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        """Copy the blocks under `keys` into pool rows `block_ids`. The bytes of a row whose load failed are undefined.

        A load of `PROBE_KEY` alone is no failure, and is not counted as one.
        """

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        """Load blocks that are still being stored, waiting at most `patience_s` seconds for each next block.

        Called only if `capabilities.follows`, which is for stores where polling is nearly free. With other stores, blocks are
        loaded once they are announced.
        """
        raise NotImplementedError(f"{self.scheme}:// does not support follow()")

    @abstractmethod
    def match(self, keys: Sequence[bytes]) -> Future[int]:
        """Count the leading keys that a `load` would find now. 0 if the store does not respond."""

    @abstractmethod
    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        """End the leases of these keys and tickets early, so that the store may evict the blocks."""

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        """Let the leases of these keys and tickets end in `lease_s` seconds at the earliest.

        Called only if `capabilities.prolongs`, for KV that waits until decode has room. Without it the store may evict such
        blocks once their leases have ended, and decode computes them. A lease that was released may stay so.
        """
        raise NotImplementedError(f"{self.scheme}:// does not support prolong()")

    @abstractmethod
    def stats(self) -> Stats:
        """Return a snapshot of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Wait for operations in flight, then free all resources. Stored blocks stay available to other instances."""

    def release_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> None:
        """As `release`, of a pool of several groups: the block ids say of which group each key is. Only ours override it."""
        self.release(keys, tickets=tickets)

    # For the conformance kit alone, which checks more where a connector implements these.

    def parts(self) -> Sequence["Connector"]:
        """Return the attached connectors that this one combines, once all blocks stored so far are where they belong."""
        return [self]

    def tamper(self, key: bytes, offset: int) -> None:
        """Change one stored byte of a block: 0 is the payload's first, the 64 bytes of the header are at -64 to -1.

        Raises:
            LookupError: there is no such byte.
            NotImplementedError: this connector cannot do it, and leaves it to the kit. The default.
        """
        raise NotImplementedError
