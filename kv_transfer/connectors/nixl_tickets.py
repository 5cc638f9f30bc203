"""What the two sides of `nixl://` say to each other: tickets to the reader, and messages of what was read to the owner."""

import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.kv_transfer.threaded import MAX_LEASE_S

# Magic, lease, its seconds, base, block bytes, rows, entries, lengths of name and metadata; these two; the entries.
_TICKET: Final = struct.Struct("<8sQdQQIIHH")
_TICKET_MAGIC: Final = b"pdserveT"
ENTRY: Final = struct.Struct("<16sI64s")  # key, row, header
_MESSAGE: Final = struct.Struct("<8sQ")  # magic, lease; then one bit per entry of the ticket
_MESSAGE_MAGIC: Final = b"pdserveR"


@dataclass(frozen=True)
class Introduction:
    """All that a peer must know of a pool to read it."""

    name: bytes
    metadata: bytes
    base: int
    block_bytes: int
    rows: int


@dataclass(eq=False)
class Ticket:
    """One lease, as the reading side sees it. `unread` has one bit per entry that the owner still holds for us."""

    owner: Introduction
    lease: int
    ends: float
    entries: list[tuple[bytes, int, bytes]]
    unread: int


@dataclass(frozen=True)
class Place:
    """Where a block is: an entry of a ticket."""

    ticket: Ticket
    index: int

    @property
    def row(self) -> int:
        return self.ticket.entries[self.index][1]

    @property
    def header(self) -> bytes:
        return self.ticket.entries[self.index][2]


def pack_ticket(owner: Introduction, lease: int, lease_s: float, entries: Sequence[bytes]) -> bytes:
    sizes = (owner.rows, len(entries), len(owner.name), len(owner.metadata))
    front = _TICKET.pack(_TICKET_MAGIC, lease, lease_s, owner.base, owner.block_bytes, *sizes)
    return b"".join((front, owner.name, owner.metadata, *entries))


def unpack_ticket(raw: bytes) -> Ticket:
    """Raises ValueError for what is no ticket of ours."""
    if len(raw) < _TICKET.size:
        raise ValueError("too short")
    magic, lease, lease_s, base, block_bytes, rows, count, name, metadata = _TICKET.unpack_from(raw)
    start = _TICKET.size + name + metadata
    if magic != _TICKET_MAGIC or len(raw) != start + count * ENTRY.size:
        raise ValueError("not a ticket")
    owner = Introduction(
        raw[_TICKET.size : _TICKET.size + name], raw[start - metadata : start], base, block_bytes, rows
    )
    entries = list(ENTRY.iter_unpack(memoryview(raw)[start:]))
    if any(row >= rows for _, row, _ in entries):
        raise ValueError("a row outside of the pool")
    return Ticket(owner, lease, time.monotonic() + min(lease_s, MAX_LEASE_S), entries, (1 << count) - 1)


def _read(raw: bytes) -> Ticket | None:
    try:
        return unpack_ticket(raw)
    except ValueError:
        return None


def pack_message(lease: int, bits: int) -> bytes:
    return _MESSAGE.pack(_MESSAGE_MAGIC, lease) + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_message(raw: bytes) -> tuple[int, int] | None:
    """The lease, and its bits. None for what is no message of ours."""
    if len(raw) < _MESSAGE.size:
        return None
    magic, lease = _MESSAGE.unpack_from(raw)
    return (lease, int.from_bytes(raw[_MESSAGE.size :], "little")) if magic == _MESSAGE_MAGIC else None


class Tickets:
    """The tickets that this instance has been given, until they are released or their leases are over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[bytes, Ticket] = {}

    def places(self, given: Sequence[bytes]) -> tuple[dict[bytes, Place], int]:
        """Where the blocks are, by key, the newest ticket first; and how many tickets cannot be read."""
        places: dict[bytes, Place] = {}
        strange = 0
        with self._lock:
            self._forget_ended()
            for raw in reversed(given):
                ticket = self._known.get(raw) or _read(raw)
                if ticket is None:
                    strange += 1
                    continue
                self._known[raw] = ticket
                for index, (key, _, _) in enumerate(ticket.entries):
                    places.setdefault(key, Place(ticket, index))
        return places, strange

    def mark_read(self, places: Iterable[Place]) -> list[tuple[Ticket, int]]:
        """What to tell the owners after a load, whatever its outcome: nobody will ask for these blocks again."""
        bits: dict[Ticket, int] = {}
        for place in places:
            bits[place.ticket] = bits.get(place.ticket, 0) | 1 << place.index
        with self._lock:
            for ticket, read in bits.items():
                ticket.unread &= ~read
        return list(bits.items())

    def give_up(self, given: Sequence[bytes]) -> list[tuple[Ticket, int]]:
        """Forgets these tickets, and returns what they still hold."""
        with self._lock:
            over = [self._known.pop(raw, None) or _read(raw) for raw in given]
        return [(ticket, ticket.unread) for ticket in over if ticket is not None and ticket.unread]

    def _forget_ended(self) -> None:
        now = time.monotonic()
        for raw in [raw for raw, ticket in self._known.items() if ticket.ends <= now]:
            del self._known[raw]
