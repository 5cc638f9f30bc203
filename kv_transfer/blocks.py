"""The blocks of one operation, as a connector's batch hooks handle them: a key, a pool row and an outcome each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from pdserve.kv_transfer.codec import Codec, Undecodable
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import (
    Buffer,
    HeaderFormat,
    Row,
    copy_and_hash,
    has_checksum,
    payload_length,
    read_and_hash,
)
from pdserve.kv_transfer.operation import Operation


class StreamedPart(ABC):
    """Part of a payload that is still being received. It is read directly into its destination, without a buffer."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Total length in bytes."""

    @abstractmethod
    def read_into(self, memory: memoryview) -> int:
        """Move the bytes received so far to the front of `memory` without blocking, and return their number.

        `memory` must not be longer than the remaining part.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block until `read_into` can return bytes. Raises one of the connector's faults."""

    def __bytes__(self) -> bytes:
        whole = bytearray(len(self))
        remaining = memoryview(whole)
        while remaining:
            count = self.read_into(remaining)
            remaining = remaining[count:]
            if not count:
                self.wait()
        return bytes(whole)


class Block:
    """Base of the blocks of an operation.

    Attributes:
        key: the block key.
    """

    __slots__ = ("_codec", "_fence", "_header_format", "_index", "_operation", "_payload_bytes", "_row", "key")

    def __init__(
        self, operation: Operation[Any], index: int, key: bytes, row: Row, header_format: HeaderFormat, codec: Codec
    ) -> None:
        self._operation = operation
        self._fence = operation.fence
        self._index = index
        self._row = row
        self._header_format = header_format
        self._codec = codec
        self._payload_bytes = 0
        self.key = key

    @property
    def outcome(self) -> Outcome:
        return self._operation.outcomes[self._index]


class Outgoing(Block):
    """A block to be stored, as passed to `put_many`. A block that is never marked ends as UNAVAILABLE."""

    __slots__ = ()

    def read(self) -> tuple[bytes, memoryview]:
        """Return header and payload, for transports that send directly from the pool row.

        The row may change under the transport once the deadline has passed. The checksum does not match then, which a load
        detects. Check `in_time` before publishing to keep such a value from becoming visible at all.
        """
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            return self._header_format.pack(self.key, payload), payload.data

    def copy_to(self, target: Row) -> bytes:
        """Copy the payload to the front of `target`, and return the header of the copied bytes."""
        with self._fence:
            payload = self._codec.encode(self._row)
            self._payload_bytes = len(payload)
            hasher = xxhash.xxh3_64()
            copy_and_hash(target, payload, hasher)
            return self._header_format.pack_checksum(self.key, len(payload), hasher.digest())

    def in_time(self) -> bool:
        """Return True while the operation is neither cancelled nor past its deadline."""
        return not self._operation.is_over

    def stored(self) -> None:
        """Mark the block as stored."""
        self._operation.bytes_moved += self._payload_bytes
        self._operation.outcomes[self._index] = Outcome.OK

    def present(self) -> None:
        """Mark the block as already in the store, with nothing copied."""
        self._operation.outcomes[self._index] = Outcome.OK

    def failed(self, outcome: Outcome) -> None:
        """Mark the block as not stored, for this reason."""
        self._operation.outcomes[self._index] = outcome


class Incoming(Block):
    """A block to be loaded, as passed to `get_many`. A block that is never marked ends as UNAVAILABLE.

    Attributes:
        header: of the value that was accepted or rejected, for `delete_corrupt`.
    """

    __slots__ = ("header",)

    header: bytes

    def accept(self, header: bytes, parts: Iterable[Buffer | Row | StreamedPart]) -> Outcome:
        """Verify a stored value and copy it into the pool row. Marks the block OK or CORRUPT, and returns that outcome.

        The parts of the payload are requested one at a time, each when the previous one is no longer used, so `parts` may
        be a generator that blocks or raises.

        The checksum is computed after the copy, over the row or over a private copy that is decoded afterwards. So the
        bytes that were verified are the bytes that are used, even if the source is overwritten meanwhile.
        """
        matches = self._header_format.matches(header, self.key)
        return self._mark(Outcome.OK if matches and self._receive_payload(header, parts) else Outcome.CORRUPT, header)

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        """Like `accept`, for transports that can read directly into the pool row without ever blocking.

        Args:
            header: the stored header.
            read: fills the given memory with the payload's bytes from the given offset on, and returns their number.

        Returns:
            None, with the block left unmarked, if the value cannot be read this way: use `accept`.
        """
        if not self._codec.is_identity or not self._header_format.matches(header, self.key):
            return None
        with self._fence:
            digest = read_and_hash(self._row, read)
        if digest is None:
            return None
        outcome = Outcome.OK if has_checksum(header, digest) else Outcome.CORRUPT
        return self._mark(outcome, header)

    def accept_digest(self, header: bytes, digest: bytes) -> Outcome:
        """Like `accept`, for transports that wrote the payload into the row, and hold the fence since before.

        Args:
            digest: checksum of the row's bytes.
        """
        valid = self._header_format.matches(header, self.key) and has_checksum(header, digest)
        return self._mark(Outcome.OK if valid else Outcome.CORRUPT, header)

    def missing(self) -> None:
        """Mark the block as not in the store."""
        self._operation.outcomes[self._index] = Outcome.MISSING

    def corrupt(self) -> None:
        """Mark the block as corrupt."""
        self._operation.outcomes[self._index] = Outcome.CORRUPT

    def _mark(self, outcome: Outcome, header: bytes) -> Outcome:
        self.header = header
        if outcome is Outcome.OK:
            self._operation.bytes_moved += payload_length(header)
        self._operation.outcomes[self._index] = outcome
        return outcome

    def _receive_payload(self, header: bytes, parts: Iterable[Buffer | Row | StreamedPart]) -> bool:
        """Put the payload into the row, decoded. Returns False if it is not the payload of this header."""
        if self._codec.is_identity:
            return self._assemble(self._row, header, parts)
        payload = bytearray(payload_length(header))
        return self._assemble(np.frombuffer(payload, np.uint8), header, parts) and self._decode(payload)

    def _assemble(self, target: Row, header: bytes, parts: Iterable[Buffer | Row | StreamedPart]) -> bool:
        """Copy the parts into `target`. Returns True if they fill it and have the header's checksum."""
        hasher, offset = xxhash.xxh3_64(), 0
        for part in parts:
            destination = target[offset : offset + len(part)]
            if len(destination) < len(part):
                return False
            if isinstance(part, StreamedPart):
                self._receive(destination.data, part, hasher)
            else:
                with self._fence:
                    copy_and_hash(destination, part, hasher)
            offset += len(part)
        return offset == len(target) and has_checksum(header, hasher.digest())

    def _receive(self, target: memoryview, part: StreamedPart, hasher: xxhash.xxh3_64) -> None:
        """Read a part into `target`. Waits outside of the fence, so that closing the fence never waits for the store."""
        while target:
            with self._fence:
                count = part.read_into(target)
                hasher.update(target[:count])
            target = target[count:]
            if not count:
                part.wait()

    def _decode(self, payload: bytearray) -> bool:
        try:
            row = self._codec.decode(payload)
        except Undecodable:
            return False
        with self._fence:
            self._row[:] = row
        return True
