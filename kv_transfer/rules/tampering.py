"""Changes one stored byte, unnoticed by the connector that stored it."""

import contextlib
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing, StreamedPart
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer, Row
from pdserve.kv_transfer.rules.context import AttachedPool, NotChecked, batched_connectors, expect


def tamper(pool: AttachedPool, key: bytes, offset: int) -> None:
    """Change one stored byte. Offset 0 is the payload's first; the 64 bytes of the header are at -64 to -1.

    A connector with a `tamper` of its own does it itself. A block with a ticket is changed in the pool that holds
    it. With any other `BatchedConnector`, the value is read and written back changed through its hooks; with a connector
    that combines several, in each that has the block.

    Raises:
        NotChecked: none of these is possible.
    """
    try:
        _tamper(pool, key, offset)
    except LookupError:
        raise NotChecked(f"the connector has nothing to tamper with at offset {offset}") from None


def cut_off(pool: AttachedPool, key: bytes, length: int) -> bool:
    """Leave the first `length` bytes of a stored payload, through hooks. Returns False where there are none."""

    def cut(value: bytearray) -> None:
        del value[HEADER_BYTES + length :]

    if pool.tickets([key]):
        return False
    return any([_rewrite(connector, key, cut) for connector in batched_connectors(pool.connector)])


def _tamper(pool: AttachedPool, key: bytes, offset: int) -> None:
    with contextlib.suppress(NotImplementedError):
        pool.connector.tamper(key, offset)
        return
    if pool.tickets([key]):
        _change_row(pool, key, offset)
    elif connectors := batched_connectors(pool.connector):

        def flip(value: bytearray) -> None:
            value[HEADER_BYTES + offset] ^= 0xFF

        changed = [_rewrite(connector, key, flip) for connector in connectors]
        expect(any(changed), "a block that was stored to be in the store", "none")
    else:
        raise NotChecked("the connector has no method tamper(key, offset), so its bytes cannot be accessed")


def _change_row(pool: AttachedPool, key: bytes, offset: int) -> None:
    """Change a block in the pool row. It has no header there."""
    if offset < 0:
        raise LookupError
    pool.rows[pool.stored_row[key]][offset] ^= 0xFF


class _CapturedBlock:
    """Stands in for an `Incoming` block: keeps the stored value."""

    front_of = None

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.value: bytearray | None = None

    def accept(self, header: bytes, parts: Iterable[Buffer | Row | StreamedPart]) -> Outcome:
        self.value = bytearray(header + b"".join(bytes(part) for part in parts))
        return Outcome.OK

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        return None  # there is no row to read into

    def missing(self) -> None: ...

    def corrupt(self) -> None: ...


class _ForgedBlock:
    """Stands in for an `Outgoing` block: has the given value."""

    def __init__(self, key: bytes, value: bytearray) -> None:
        self.key = key
        self.outcome: Outcome = Outcome.UNAVAILABLE
        self._header = bytes(value[:HEADER_BYTES])
        self._payload = np.frombuffer(bytes(value[HEADER_BYTES:]), np.uint8)

    def read(self) -> tuple[bytes, memoryview]:
        return self._header, self._payload.data

    def copy_to(self, target: Row) -> bytes:
        target[: len(self._payload)] = self._payload
        return self._header

    def in_time(self) -> bool:
        return True

    def stored(self) -> None:
        self.outcome = Outcome.OK

    def present(self) -> None: ...

    def failed(self, outcome: Outcome) -> None:
        self.outcome = outcome


def _rewrite(connector: BatchedConnector, key: bytes, change: Callable[[bytearray], None]) -> bool:
    """Read a value through the hooks and write it back changed. Returns False if the store does not have the block."""
    captured = _CapturedBlock(key)
    connector.get_many(cast("list[Incoming]", [captured]))
    if captured.value is None:
        return False
    change(captured.value)
    forged = _ForgedBlock(key, captured.value)
    connector.delete_many([key])
    connector.put_many(cast("list[Outgoing]", [forged]), 600.0)
    if forged.outcome is not Outcome.OK:
        raise NotChecked("a changed block could not be written back")
    return True
