"""The connector contract: how KV blocks leave one instance and reach another.

A connector knows blocks, keys and bytes, and nothing of the engine. The whole contract is the seven methods of
`Connector`; `store`, `load` and `match` return a `concurrent.futures.Future` at once, so the engine thread never waits on
I/O. Authors of a plain key-value transport derive from `kv_transfer.threaded.ThreadedConnector` instead, which brings the
futures, the block headers and the checksums, and asks for blocking `put`, `get`, `contains` and `delete` only.

Rules that every connector keeps:
  1. A block that `load` reports as loaded holds exactly the bytes that were stored under that key in this namespace.
     Anything else (missing, torn, foreign, stale, corrupt) is reported, never written as if it were right.
  2. A block is visible to `match` and `load` only after all of its bytes are.
  3. `match` counts leading keys: a key after the first missing one does not count.
  4. Between `store` and its result the block's bytes are read, between `load` and its result they are written: the
     caller keeps the block ids reserved until the future is done, whatever else happens, and until `Result.held` is done
     where a store's result has one.
  5. A future always completes, within the connector's time-out, and does not raise for a fault of the store:
     faults are per-block outcomes. It raises only for a defect of the program.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pdserve.keys import KEY_BYTES, Layout

API_VERSION = 1


class Outcome(StrEnum):
    """What became of one block."""

    OK = "ok"
    MISSING = "missing"  # load: the store does not have it (any more)
    CORRUPT = "corrupt"  # load: header or checksum do not fit: torn, foreign, older layout, flipped bits
    FULL = "full"  # store: no room
    UNAVAILABLE = "unavailable"  # the store did not answer in time, or not at all
    CANCELLED = "cancelled"  # the caller did not want it any more


@dataclass(frozen=True)
class Result:
    """The end of a store or load: one outcome per block, in the order of the call.

    Attributes:
        outcomes: one per block.
        seconds: from the call until the bytes were where they belong.
        ticket: what the loading side needs to find the blocks, for connectors without a store in between; else empty.
        held: of such a connector's store: peers read the blocks where they are, so the caller keeps them reserved and
            unchanged until this future is done (they have been read, or the lease is over). None: the bytes are away.
    """

    outcomes: list[Outcome]
    seconds: float
    ticket: bytes = b""
    held: Future[None] | None = None

    @property
    def leading(self) -> int:
        """How many blocks from the first on went well."""
        for i, outcome in enumerate(self.outcomes):
            if outcome is not Outcome.OK:
                return i
        return len(self.outcomes)


@dataclass(frozen=True)
class PoolMemory:
    """A pool as a connector sees it.

    Attributes:
        rows: the pool's bytes, uint8 of shape [num_blocks, block_bytes], C-contiguous, in host memory.
        layout: what the bytes mean; its namespace goes into every block header.
    """

    rows: npt.NDArray[np.uint8]
    layout: Layout

    def check(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Raises `ValueError` for arguments that no store or load can have."""
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys for {len(block_ids)} blocks")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self.rows):
            raise ValueError(f"block ids go from 0 to {len(self.rows) - 1}")


@dataclass
class Stats:
    """Cumulative counts since `attach`, by direction ("store", "load")."""

    bytes: dict[str, int] = field(default_factory=lambda: {"store": 0, "load": 0})
    blocks: dict[str, int] = field(default_factory=lambda: {"store": 0, "load": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"store": 0.0, "load": 0.0})
    failures: dict[tuple[str, Outcome], int] = field(default_factory=dict)  # (direction, outcome) → blocks
    parts: dict[str, "Stats"] = field(
        default_factory=dict
    )  # of the stores behind a connector that has several, by name

    def count(self, direction: str, result: Result) -> None:
        """Everything but bytes, which a result does not tell."""
        self.blocks[direction] += result.outcomes.count(Outcome.OK)
        self.seconds[direction] += result.seconds
        for outcome in set(result.outcomes) - {Outcome.OK}:
            self.fail(direction, outcome, result.outcomes.count(outcome))

    def fail(self, direction: str, outcome: Outcome, blocks: int) -> None:
        self.failures[direction, outcome] = self.failures.get((direction, outcome), 0) + blocks

    def plus(self, other: "Stats") -> "Stats":
        """The sum, without parts."""
        total = Stats(dict(self.bytes), dict(self.blocks), dict(self.seconds), dict(self.failures))
        for direction in total.bytes:
            total.bytes[direction] += other.bytes[direction]
            total.blocks[direction] += other.blocks[direction]
            total.seconds[direction] += other.seconds[direction]
        for (direction, outcome), blocks in dict(other.failures).items():
            total.fail(direction, outcome, blocks)
        return total


class Connector(ABC):
    """One instance's door to the KV store. Made by `kv_transfer.registry.connect(url)`.

    `store`, `load`, `match` and `release` may be called from any one thread, and return without waiting for the store.
    """

    API_VERSION: ClassVar[int] = API_VERSION
    scheme: ClassVar[str]
    in_place: ClassVar[bool] = False  # peers read the pool's rows where they are, see Result.held
    follows: ClassVar[bool] = False  # has `follow`

    @abstractmethod
    def attach(self, memory: PoolMemory) -> None:
        """Binds the pool; called once, before anything else.

        Raises:
            SetupError: the store cannot be used at all (not there, no room, made for other blocks).
        """

    @abstractmethod
    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        """Copies pool rows `block_ids` out under `keys`, and keeps them at least `lease_s` seconds where it can.

        A lease of 0 is for blocks that nobody waits for: the store may evict them whenever it likes.
        """

    @abstractmethod
    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        """Copies the blocks under `keys` into pool rows `block_ids`. A failed row's bytes are undefined afterwards."""

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        """As `load`, for blocks that are being stored right now: waits for the next one as long as `patience_s` at most.

        For stores where asking again and again costs next to nothing. The others hear of blocks when they are there.
        """
        raise NotImplementedError(f"{self.scheme}:// does not follow")

    @abstractmethod
    def match(self, keys: Sequence[bytes]) -> Future[int]:
        """How many leading keys a `load` would find now. 0 where the store does not answer."""

    @abstractmethod
    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        """Ends leases early, of these keys and of tickets: the caller has what it wanted, and the store may evict them."""

    @abstractmethod
    def stats(self) -> Stats:
        """A snapshot of the counts."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way, then lets go of everything. The store's content stays for other instances."""
