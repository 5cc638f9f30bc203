"""Hands in a store: one stored byte is changed, behind the back of the connector that stored it."""

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from pdserve.kv_transfer.blocks import Arriving, Incoming, Outgoing
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer, Row
from pdserve.kv_transfer.rules.trial import Instance, NotChecked, expect, stores_of
from pdserve.kv_transfer.threaded import BatchedConnector


def tamper(instance: Instance, key: bytes, offset: int) -> None:
    """Changes one stored byte. Offset 0 is the payload's first; the header's 64 lie before it, from -64 to -1.

    A connector that has a method `tamper(key, offset)` does it itself. A block that a ticket stands for is changed in the
    pool where it lies. For every other `BatchedConnector`, the value is read through its hooks and written back changed;
    for a connector that has several behind it, in each that has the block.

    Raises:
        NotChecked: none of these is possible.
    """
    own = getattr(instance.connector, "tamper", None)
    try:
        if own is not None:
            own(key, offset)
        elif instance.tickets([key]):
            _change_row(instance, key, offset)
        elif stores := stores_of(instance.connector):
            changed = [_rewrite(store, key, offset) for store in stores]
            expect(any(changed), "a block that was stored to be in the store", "none")
        else:
            raise NotChecked("the connector has no method tamper(key, offset), so its bytes cannot be reached")
    except LookupError:
        raise NotChecked(f"the connector has nothing to tamper with at offset {offset}") from None


def _change_row(instance: Instance, key: bytes, offset: int) -> None:
    """Where results carry tickets, the pool's row is the store, and has no header."""
    if offset < 0:
        raise LookupError
    instance.rows[instance.row_of[key]][offset] ^= 0xFF


class _Copy:
    """In the place of an `Incoming`: keeps what the store gives."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.value: bytearray | None = None

    def accept(self, header: bytes, parts: Iterable[Buffer | Row | Arriving]) -> Outcome:
        self.value = bytearray(header + b"".join(bytes(part) for part in parts))
        return Outcome.OK

    def read_by(self, header: bytes, read: Callable[[memoryview, int], int]) -> Outcome | None:
        return None  # it has no row

    def missing(self) -> None: ...

    def corrupt(self) -> None: ...


class _Planted:
    """In the place of an `Outgoing`: bytes of the kit's choice."""

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


def _rewrite(connector: BatchedConnector, key: bytes, offset: int) -> bool:
    """Whether the store has the block."""
    copy = _Copy(key)
    connector.get_many(cast("list[Incoming]", [copy]))
    if copy.value is None:
        return False
    copy.value[HEADER_BYTES + offset] ^= 0xFF
    planted = _Planted(key, copy.value)
    connector.delete_many([key])
    connector.put_many(cast("list[Outgoing]", [planted]), 600.0)
    if planted.outcome is not Outcome.OK:
        raise NotChecked("a changed block could not be written back")
    return True
