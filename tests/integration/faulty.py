"""Fault-injecting connectors, whose store loses, truncates, corrupts and delays blocks: `faulty+shm://`, `faulty+redis://`.

Parameters in addition to those of the real connector:
    seed      selects the blocks that are hit, by their keys and how often each was accessed before
    journal   folder to which each process writes its injected faults, one line of JSON each; no fault is injected until
              the folder contains a file `armed`

A fault is applied to the block in the store immediately before the real connector reads it, so that the real code must
detect it. Absent blocks and blocks that are not read afterwards are not counted as hit. Expected failure kind per fault:
    lost         the block is deleted                      missing
    truncated    the end of the block is lost              corrupt
    flipped      one bit is inverted                       corrupt
    slow         a pause                                   none
    late         a pause until the operation's deadline    unavailable: this and all later blocks of the operation
"""

import json
import os
import random
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.url import Query

FAULT_RATES = {  # fractions of all blocks
    "load": {"lost": 0.03, "truncated": 0.03, "flipped": 0.03, "slow": 0.005, "late": 0.005},
    "store": {"slow": 0.01, "late": 0.003},
}

PAUSES_S = {"slow": (0.01, 0.2), "late": (0.5, 2.0)}  # (min, max)

B = TypeVar("B", Incoming, Outgoing)


class Faulty(BatchedConnector):
    """Mixin that injects faults; must precede the real connector among the bases."""

    API_VERSION: ClassVar[int] = 2

    def __init__(self, url: str) -> None:
        super().__init__(url.partition("+")[2])

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._seed = query.count("seed", 1)
        folder = Path(query.text("journal", "."))
        self._accesses: Counter[bytes] = Counter()
        self._journal, self._armed = folder / f"{os.getpid()}.jsonl", folder / "armed"

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._inject("load", blocks, super().get_many)  # type: ignore[safe-super]  # implemented by the real connector

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        put = super().put_many  # type: ignore[safe-super]  # likewise
        self._inject("store", blocks, lambda part: put(part, lease_s))

    @abstractmethod
    def lose(self, key: bytes) -> bool:
        """Delete the block from the store. This and the other faults return False if the block is absent."""

    @abstractmethod
    def truncate(self, key: bytes, chance: random.Random) -> bool: ...

    @abstractmethod
    def flip(self, key: bytes, chance: random.Random) -> bool: ...

    def _inject(self, direction: str, blocks: Sequence[B], transfer: Callable[[Sequence[B]], None]) -> None:
        """Run the real operation with injected faults; each pause splits it into parts."""
        if not self._armed.exists():
            return transfer(blocks)
        start, hits = 0, list[str]()
        for i, block in enumerate(blocks):
            self._accesses[block.key] += 1
            chance = random.Random(f"{self._seed} {direction} {block.key.hex()} {self._accesses[block.key]}")
            hit = self._draw_fault(direction, chance)
            if hit in ("slow", "late"):
                transfer(blocks[start:i])
                self._record(direction, hits)
                start, hits = i, []
                if self._pause(direction, hit, blocks[i:], chance):
                    return
            elif (
                (hit == "lost" and self.lose(block.key))
                or (hit == "truncated" and self.truncate(block.key, chance))
                or (hit == "flipped" and self.flip(block.key, chance))
            ):
                hits.append(hit)
        transfer(blocks[start:])
        self._record(direction, hits)

    def _draw_fault(self, direction: str, chance: random.Random) -> str:
        rates = FAULT_RATES[direction]
        return chance.choices([*rates, ""], [*rates.values(), 1 - sum(rates.values())])[0]

    def _pause(self, direction: str, hit: str, rest: Sequence[B], chance: random.Random) -> bool:
        """Sleep, and return True if the operation is past its deadline afterwards."""
        operation = rest[0]._operation
        seconds = chance.uniform(*PAUSES_S[hit])
        time.sleep(seconds)
        if hit == "late":
            operation.complete()  # as the watchdog does at the deadline, which is set too far away to be reached here
        is_over = operation.is_over
        # An operation that follows a store comes in parts: more blocks than the rest of this part are late.
        # One that was cancelled meanwhile loses blocks, too, but not to the fault: they end as CANCELLED.
        num_late = 0 if operation.fence.cancelled else operation.outcomes.count(Outcome.UNAVAILABLE)
        self._record(direction, ["late"] * num_late if is_over else ["slow"], seconds)
        return is_over

    def _record(self, direction: str, hits: Sequence[str], seconds: float = 0.0) -> None:
        with self._journal.open("a") as journal:
            for hit in hits:
                journal.write(json.dumps({"direction": direction, "hit": hit, "seconds": seconds}) + "\n")
                seconds = 0.0


class FaultyShm(Faulty, ShmConnector):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, follows=False)

    def lose(self, key: bytes) -> bool:
        exists = self._slab.find(self.namespace + key) is not None
        self.delete_many([key])
        return exists

    def truncate(self, key: bytes, chance: random.Random) -> bool:
        """Invert the end of the payload: slots have a fixed size, so the unwritten part of one holds other bytes."""
        slot = self._slab.find(self.namespace + key)
        if slot is not None:
            payload = self._slab.payload(slot)
            end = payload[chance.randrange(len(payload)) :]
            end[:] = ~end
        return slot is not None

    def flip(self, key: bytes, chance: random.Random) -> bool:
        slot = self._slab.find(self.namespace + key)
        if slot is not None:
            payload = self._slab.payload(slot)
            payload[chance.randrange(len(payload))] ^= np.uint8(1 << chance.randrange(8))
        return slot is not None


class FollowingShm(FaultyShm):
    """Follows the writer: blocks are read while others of their operation are absent, so a hit may count twice or not."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, follows=True)


class FaultyRedis(Faulty, RedisConnector):
    def lose(self, key: bytes) -> bool:
        return any(self._server.call(("DEL", *self._block_names().of(key))))

    def truncate(self, key: bytes, chance: random.Random) -> bool:
        return self._change(key, chance, lambda value: value[: chance.randrange(len(value))])

    def flip(self, key: bytes, chance: random.Random) -> bool:
        def changed(value: bytes) -> bytes:
            at = chance.randrange(len(value))
            return value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]

        return self._change(key, chance, changed)

    def _change(self, key: bytes, chance: random.Random, change: Callable[[bytes], bytes]) -> bool:
        name = chance.choice(self._block_names().of(key))  # a piece of the payload, or the header
        # The buffer of a large reply is valid only until the next reply is read: copy it.
        (value,) = (answer and bytes(answer) for answer in self._server.call(("GET", name)))
        if value is None:
            return False
        assert len(value) >= HEADER_BYTES
        (status,) = self._server.call(("SET", name, change(value), "KEEPTTL"))
        return bool(bytes(status) == b"OK")
