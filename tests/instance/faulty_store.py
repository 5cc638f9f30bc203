"""A store with faults for instances in one thread: its operations end when the test says so, and fail at random."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    GrowingStore,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
)


@dataclass(eq=False)
class Operation:
    """An operation of a store that has not ended."""

    kind: str
    keys: list[bytes]
    blocks: list[int]
    future: "Future[Any]" = field(default_factory=Future)
    cancelled: bool = False
    tickets: list[bytes] = field(default_factory=list)
    copied: "npt.NDArray[np.uint8] | None" = None

    def cancel(self) -> None:
        self.cancelled = True


class Growth(GrowingStore):
    """A store of rows that are being written, which copies what is final at once."""

    def __init__(self, operation: Operation, rows: "npt.NDArray[np.uint8]", end: Callable[[Operation], None]) -> None:
        super().__init__(operation.cancel)
        operation.future, operation.copied = self, np.zeros((len(operation.blocks), rows.shape[1]), np.uint8)
        self._operation, self._rows, self._end, self._size = operation, rows, end, 0

    def advance(self, num_bytes: int) -> None:
        operation, part = self._operation, slice(self._size, num_bytes)
        assert operation.copied is not None
        operation.copied[:, part] = self._rows[operation.blocks, part]
        self._size = num_bytes
        if num_bytes == self._rows.shape[1] and operation.kind == "growing":
            operation.kind = "store"
            self._end(operation)


@dataclass(eq=False)
class Lease:
    """Rows that others may read in place, until `held` is done."""

    rows: "npt.NDArray[np.uint8]"
    blocks: dict[bytes, int]
    ends_at: float
    held: "Future[None]" = field(default_factory=Future)


class FaultyStore(Connector):
    """A store whose operations end in any order, and fail at random; or, in place, rows of others that are leased.

    Args:
        data: what is stored, by window and key, and leases by tickets; instances share both.
        faults: probability that an operation fails at a block.
        now: clock in seconds.
    """

    scheme = "faulty"

    def __init__(
        self,
        data: "dict[Any, npt.NDArray[np.uint8]]",
        leased: dict[bytes, Lease],
        rng: random.Random,
        faults: float,
        now: Callable[[], float],
        **can: Any,
    ) -> None:
        self._data, self._leased, self._rng, self._faults, self._now, self._can = data, leased, rng, faults, now, can
        self.active: list[Operation] = []
        self.leases: list[Lease] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cancels=True, skips_hanging=True, **self._can)

    def attach(self, memory: PoolMemory) -> None:
        self._memory = memory

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> "Future[Result]":
        return self._begin("store", keys, block_ids)

    def store_growing(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> GrowingStore:
        return Growth(Operation("growing", [*keys], [*block_ids]), self._memory.rows, self.active.append)

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()
    ) -> "Future[Result]":
        return self._begin("load", keys, block_ids, tickets)

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> "Future[Result]":
        return self._begin("follow", keys, block_ids)

    def match(self, keys: Sequence[bytes]) -> "Future[int]":
        self.active.append(operation := Operation("match", [*keys], []))
        return operation.future

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        for ticket in tickets:
            self._leased[ticket].ends_at = self._now()

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        for ticket in tickets:
            self._leased[ticket].ends_at = max(self._leased[ticket].ends_at, self._now() + lease_s)

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None: ...

    def end_one(self) -> None:
        """End some operation, and some lease."""
        if self.leases and self.leases[0].ends_at <= self._now():
            self.leases.pop(0).held.set_result(None)
        self._rng.shuffle(self.leases)
        if not self.active:
            return
        operation = self.active.pop(self._rng.randrange(len(self.active)))
        if operation.kind == "match":
            keys = [] if self._rng.random() < self._faults else operation.keys
            found = (i for i, key in enumerate(keys) if self._name(key) not in self._data)
            operation.future.set_result(next(found, len(keys)))
            return
        if self.in_place and operation.kind == "store":
            operation.future.set_result(self._lease(operation))
            return
        outcomes, stopped = list[Outcome](), False
        for at, (key, block) in enumerate(zip(operation.keys, operation.blocks, strict=True)):
            stopped |= operation.cancelled and self._rng.random() < 0.5
            if stopped:
                outcomes.append(Outcome.CANCELLED if operation.cancelled else Outcome.UNAVAILABLE)
                continue
            outcomes.append(self._end_block(operation, at, key, block))
            stopped = outcomes[-1] is Outcome.UNAVAILABLE and operation.kind != "store"
            if outcomes[-1] is Outcome.MISSING and operation.kind == "follow":
                outcomes += [Outcome.MISSING] * (len(operation.keys) - len(outcomes))
                break
        operation.future.set_result(Result(outcomes, 0.01))

    def _end_block(self, operation: Operation, at: int, key: bytes, block: int) -> Outcome:
        rows, fails = self._memory.rows, self._rng.random() < self._faults
        if operation.kind == "store":
            if fails:
                return self._rng.choice([Outcome.FULL, Outcome.UNAVAILABLE])
            copied = rows[block].copy() if operation.copied is None else operation.copied[at]
            self._data.setdefault(self._name(key), copied)
            return Outcome.OK
        found = self._data.get(self._name(key))
        for ticket in operation.tickets:
            lease = self._leased[ticket]
            if key in lease.blocks and not lease.held.done():
                found = lease.rows[lease.blocks[key]]
        if not fails and found is not None:
            rows[block] = found
            return Outcome.OK
        rows[block] = np.frombuffer(self._rng.randbytes(rows.shape[1]), np.uint8)
        return self._rng.choice([Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE]) if fails else Outcome.MISSING

    def _name(self, key: bytes) -> tuple[int, bytes]:
        return self._memory.layout.window, key

    def _lease(self, operation: Operation) -> Result:
        if operation.cancelled or self._rng.random() < self._faults:
            return Result([Outcome.UNAVAILABLE] * len(operation.keys), 0.01)
        blocks = dict(zip(operation.keys, operation.blocks, strict=True))
        lease = Lease(self._memory.rows, blocks, self._now() + self._rng.choice([1.0, 30.0]))
        ticket = self._rng.randbytes(8)
        self.leases.append(lease)
        self._leased[ticket] = lease
        return Result([Outcome.OK] * len(blocks), 0.01, ticket, lease.held)

    def _begin(
        self, kind: str, keys: Sequence[bytes], block_ids: Sequence[int], tickets: Sequence[bytes] = ()
    ) -> "Future[Result]":
        operation = Operation(kind, [*keys], [*block_ids], tickets=[*tickets])
        operation.future = OperationFuture(operation.cancel)
        self.active.append(operation)
        return operation.future
