"""Connectors whose store loses, truncates and changes blocks, and answers late: `faulty+shm://`, `faulty+redis://`.

Parameters beside those of the real connector:
    seed      which blocks are hit, by their keys and how often they were here before
    journal   a folder to which each process writes what it did, a line of JSON each; nothing is hit before there is a
              file `armed` in it

A block is hit in the store, right before the real connector reads it from there, so it is the real code that has to find
out. Not hit is what is not there, or what was not read after all. What a hit must be counted as:
    lost                  deleted                            missing
    truncated, flipped    its end is gone; one bit           corrupt
    slow                  a pause                            nothing
    late                  one at whose end the time is over  unavailable: this and all blocks behind it in the operation
"""

import json
import os
import random
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connectors.redis_connector import RedisConnector
from pdserve.kv_transfer.connectors.shm import ShmConnector
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.threaded import BatchedConnector
from pdserve.kv_transfer.url import Query

SHARES = {  # of the blocks
    "load": {"lost": 0.03, "truncated": 0.03, "flipped": 0.03, "slow": 0.005, "late": 0.005},
    "store": {"slow": 0.01, "late": 0.003},
}

PAUSES = {"slow": (0.01, 0.2), "late": (0.5, 2.0)}  # in seconds

B = TypeVar("B", Incoming, Outgoing)


class Faulty(BatchedConnector):
    """Stands before the real connector among the bases."""

    API_VERSION: ClassVar[int] = 1

    def __init__(self, url: str) -> None:
        super().__init__(url.partition("+")[2])

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._seed = query.count("seed", 1)
        folder = Path(query.text("journal", "."))
        self._seen: Counter[bytes] = Counter()
        self._journal, self._armed = folder / f"{os.getpid()}.jsonl", folder / "armed"

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._in_parts("load", blocks, super().get_many)  # type: ignore[safe-super]  # the real connector's

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        put = super().put_many  # type: ignore[safe-super]  # likewise
        self._in_parts("store", blocks, lambda part: put(part, lease_s))

    @abstractmethod
    def lose(self, key: bytes) -> bool:
        """Whether there was something to lose; likewise the others."""

    @abstractmethod
    def truncate(self, key: bytes, chance: random.Random) -> bool: ...

    @abstractmethod
    def flip(self, key: bytes, chance: random.Random) -> bool: ...

    def _in_parts(self, direction: str, blocks: Sequence[B], go_on: Callable[[Sequence[B]], None]) -> None:
        """The real operation, in one go up to each pause."""
        if not self._armed.exists():
            return go_on(blocks)
        start, hits = 0, list[str]()
        for i, block in enumerate(blocks):
            self._seen[block.key] += 1
            chance = random.Random(f"{self._seed} {direction} {block.key.hex()} {self._seen[block.key]}")
            hit = self._draw(direction, chance)
            if hit in ("slow", "late"):
                go_on(blocks[start:i])
                self._note(direction, hits)
                start, hits = i, []
                if self._pause(direction, hit, blocks[i:], chance):
                    return
            elif (
                (hit == "lost" and self.lose(block.key))
                or (hit == "truncated" and self.truncate(block.key, chance))
                or (hit == "flipped" and self.flip(block.key, chance))
            ):
                hits.append(hit)
        go_on(blocks[start:])
        self._note(direction, hits)

    def _draw(self, direction: str, chance: random.Random) -> str:
        shares = SHARES[direction]
        return chance.choices([*shares, ""], [*shares.values(), 1 - sum(shares.values())])[0]

    def _pause(self, direction: str, hit: str, rest: Sequence[B], chance: random.Random) -> bool:
        """Whether the operation's time is over afterwards."""
        operation = rest[0]._operation
        seconds = chance.uniform(*PAUSES[hit])
        time.sleep(seconds)
        if hit == "late":
            operation.complete()  # as the watchdog does at the deadline, which comes by itself only where something hangs
        over = operation.is_over
        self._note(direction, ["late"] * len(rest) if over else ["slow"], seconds)
        return over

    def _note(self, direction: str, hits: Sequence[str], seconds: float = 0.0) -> None:
        with self._journal.open("a") as journal:
            for hit in hits:
                journal.write(json.dumps({"direction": direction, "hit": hit, "seconds": seconds}) + "\n")
                seconds = 0.0


class FaultyShm(Faulty, ShmConnector):
    follows: ClassVar[bool] = False

    def lose(self, key: bytes) -> bool:
        there = self._slab.find(self.namespace + key) is not None
        self.delete_many([key])
        return there

    def truncate(self, key: bytes, chance: random.Random) -> bool:
        """A slot has a fixed size: what its writer did not get to holds something else."""
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
    """Blocks are read while others of their operation are not there yet: one hit can spoil a block twice, or none."""

    follows: ClassVar[bool] = True


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
        # A large one arrives until the next answer is asked for.
        (value,) = (answer and bytes(answer) for answer in self._server.call(("GET", name)))
        if value is None:
            return False
        assert len(value) >= HEADER_BYTES
        (done,) = self._server.call(("SET", name, change(value), "KEEPTTL"))
        return bool(bytes(done) == b"OK")
