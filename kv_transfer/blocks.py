"""Blocks on their way through a connector: a key, a row of the pool, and what became of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from pdserve.kv_transfer.codec import Codec, Undecodable
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import Buffer, Row, Seal, announces, copy, fill, intact, payload_length
from pdserve.kv_transfer.operation import Operation


class Arriving(ABC):
    """A part of a payload that is still being received, and goes straight to where it is wanted."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Of all of it."""

    @abstractmethod
    def take(self, memory: memoryview) -> int:
        """Moves what has come of it to the front of `memory`, which is no longer than what is left: how many bytes. Waits
        for nothing."""

    @abstractmethod
    def wait(self) -> None:
        """Until `take` has something. Raises one of the connector's faults."""

    def __bytes__(self) -> bytes:
        whole = bytearray(len(self))
        left = memoryview(whole)
        while left:
            taken = self.take(left)
            left = left[taken:]
            if not taken:
                self.wait()
        return bytes(whole)


class Block:
    __slots__ = ("_codec", "_fence", "_index", "_operation", "_payload_bytes", "_row", "_seal", "key")

    def __init__(self, operation: Operation[Any], index: int, key: bytes, row: Row, seal: Seal, codec: Codec) -> None:
        self._operation = operation
        self._fence = operation.fence
        self._index = index
        self._row = row
        self._seal = seal
        self._codec = codec
        self._payload_bytes = 0
        self.key = key

    @property
    def outcome(self) -> Outcome:
        return self._operation.outcomes[self._index]


class Outgoing(Block):
    """A block on its way out, as `put_many` sees it. One that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def read(self) -> tuple[bytes, memoryview]:
        """Header and payload, for transports that send from the row itself.

        If the deadline passes while they send, the row may change under them. The header does not fit then, and a load
        finds out; `in_time` before publishing keeps such a value from being seen at all.
        """
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            return self._seal.pack(self.key, payload), payload.data

    def copy_to(self, target: Row) -> bytes:
        """Copies the payload to the front of `target`, and returns the header of what it holds then."""
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            hasher = xxhash.xxh3_64()
            copy(target, payload, hasher)
            return self._seal.pack_checksum(self.key, len(payload), hasher.digest())

    def in_time(self) -> bool:
        return not self._operation.over

    def stored(self) -> None:
        self._operation.moved += self._payload_bytes
        self._operation.outcomes[self._index] = Outcome.OK

    def present(self) -> None:
        """The store has it already: nothing was copied."""
        self._operation.outcomes[self._index] = Outcome.OK

    def failed(self, outcome: Outcome) -> None:
        self._operation.outcomes[self._index] = outcome


class Incoming(Block):
    """A block to be loaded, as `get_many` sees it. One that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def accept(self, header: bytes, parts: Iterable[Buffer | Row | Arriving]) -> Outcome:
        """Checks what the store gave for this key, and puts it into the row: OK or CORRUPT, which it also marks.

        Parts are asked for one at a time, and the next when the last is no longer looked at. Whoever gives them may wait
        for them, and may raise.

        The checksum is taken after the copy, over the row, or over a copy of our own that is then decoded: what was
        verified is what will be used, even if somebody overwrote the source meanwhile.
        """
        fits = self._seal.fits(header, self.key)
        return self._accepted(Outcome.OK if fits and self._taken(header, parts) else Outcome.CORRUPT, header)

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        """As `accept`, for transports that can put the payload straight into the row and never wait for it.

        Args:
            read: fills the given memory with the payload's bytes from the given one on; how many it had.

        Returns:
            None, and marks nothing, where that does not work out: use `accept`.
        """
        if not self._codec.as_is or not self._seal.fits(header, self.key):
            return None
        with self._fence:
            digest = fill(self._row, read)
        if digest is None:
            return None
        outcome = Outcome.OK if announces(header, digest) else Outcome.CORRUPT
        return self._accepted(outcome, header)

    def accept_placed(self, header: bytes) -> Outcome:
        """As `accept`, for transports that have put the payload into the row, and have held the fence since before."""
        fits = self._seal.fits(header, self.key) and intact(header, self._row)
        return self._accepted(Outcome.OK if fits else Outcome.CORRUPT, header)

    def missing(self) -> None:
        self._operation.outcomes[self._index] = Outcome.MISSING

    def corrupt(self) -> None:
        self._operation.outcomes[self._index] = Outcome.CORRUPT

    def _accepted(self, outcome: Outcome, header: bytes) -> Outcome:
        if outcome is Outcome.OK:
            self._operation.moved += payload_length(header)
        self._operation.outcomes[self._index] = outcome
        return outcome

    def _taken(self, header: bytes, parts: Iterable[Buffer | Row | Arriving]) -> bool:
        if self._codec.as_is:
            return self._put_together(self._row, header, parts)
        payload = bytearray(payload_length(header))
        return self._put_together(np.frombuffer(payload, np.uint8), header, parts) and self._decode(payload)

    def _put_together(self, target: Row, header: bytes, parts: Iterable[Buffer | Row | Arriving]) -> bool:
        """Whether the parts fill `target` with what the header announces."""
        hasher, at = xxhash.xxh3_64(), 0
        for part in parts:
            span = target[at : at + len(part)]
            if len(span) < len(part):
                return False
            if isinstance(part, Arriving):
                self._receive(span.data, part, hasher)
            else:
                with self._fence:
                    copy(span, part, hasher)
            at += len(part)
        return at == len(target) and announces(header, hasher.digest())

    def _receive(self, target: memoryview, part: Arriving, hasher: xxhash.xxh3_64) -> None:
        """Waits outside of the fence, so that whoever closes it does not."""
        while target:
            with self._fence:
                taken = part.take(target)
                hasher.update(target[:taken])
            target = target[taken:]
            if not taken:
                part.wait()

    def _decode(self, payload: bytearray) -> bool:
        try:
            row = self._codec.decode(payload)
        except Undecodable:
            return False
        with self._fence:
            self._row[:] = row
        return True
