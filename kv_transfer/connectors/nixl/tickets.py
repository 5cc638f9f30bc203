"""Wire formats of `nixl://`: tickets, sent to the reading side, and notifications, sent back to the owner."""

import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.kv_transfer.batched import MAX_LEASE_S

# Magic, lease id, lease seconds, base address, block bytes, rows, entries, lengths of name and metadata, kind of memory and
# number of the GPU. The name, the metadata and the entries follow.
_TICKET: Final = struct.Struct("<8sQdQQIIHH4sI")
_TICKET_MAGIC: Final = b"pdserveU"
ENTRY: Final = struct.Struct("<16sI64s")  # key, row, header
_NOTIFICATION: Final = struct.Struct("<8sQ")  # magic, lease id; one bit per entry of the ticket follows
_NOTIFICATION_MAGIC: Final = b"pdserveR"
_PROLONGATION: Final = struct.Struct("<8sQd")  # magic, lease id, seconds
_PROLONGATION_MAGIC: Final = b"pdserveP"
_MAX_ROWS: Final = 1 << 22  # of a peer's pool: a reader makes descriptors of all of them
_ADDRESSES: Final = 1 << 64


@dataclass(frozen=True)
class PeerPool:
    """Data that a peer needs to read this pool: agent name and metadata, base address, block length and number of rows.

    Attributes:
        kind, device: as in `Memory`.
    """

    name: bytes
    metadata: bytes
    base: int
    block_bytes: int
    rows: int
    kind: str = "DRAM"
    device: int = 0


@dataclass(eq=False)
class Ticket:
    """One lease, as the reading side tracks it.

    Attributes:
        owner: the pool that holds the blocks.
        lease_id: the owner's id of the lease.
        expires_at: end of the lease on this side's monotonic clock.
        entries: key, row and header of each block.
        unread: one bit per entry that the owner still holds for this reader.
    """

    owner: PeerPool
    lease_id: int
    expires_at: float
    entries: list[tuple[bytes, int, bytes]]
    unread: int


@dataclass(frozen=True)
class RemoteBlock:
    """Location of a block in a peer's pool: one entry of a ticket."""

    ticket: Ticket
    index: int

    @property
    def row(self) -> int:
        return self.ticket.entries[self.index][1]

    @property
    def header(self) -> bytes:
        return self.ticket.entries[self.index][2]


def pack_ticket(owner: PeerPool, lease_id: int, lease_s: float, entries: Sequence[bytes]) -> bytes:
    sizes = (owner.rows, len(entries), len(owner.name), len(owner.metadata))
    place = (owner.kind.encode(), owner.device)
    fixed = _TICKET.pack(_TICKET_MAGIC, lease_id, lease_s, owner.base, owner.block_bytes, *sizes, *place)
    return b"".join((fixed, owner.name, owner.metadata, *entries))


def unpack_ticket(raw: bytes) -> Ticket:
    """Raises `ValueError` if the bytes are not a valid ticket."""
    if len(raw) < _TICKET.size:
        raise ValueError("too short")
    magic, lease_id, lease_s, base, block_bytes, rows, count, *more = _TICKET.unpack_from(raw)
    name_bytes, metadata_bytes, kind, device = more
    start = _TICKET.size + name_bytes + metadata_bytes
    if magic != _TICKET_MAGIC or len(raw) != start + count * ENTRY.size or kind not in (b"DRAM", b"VRAM"):
        raise ValueError("not a ticket")
    if rows > _MAX_ROWS or base + rows * block_bytes > _ADDRESSES:
        raise ValueError(f"no pool has {rows} rows of {block_bytes} bytes at {base:#x}")
    if not lease_s >= 0:
        raise ValueError(f"a lease of {lease_s} seconds")
    name, metadata = raw[_TICKET.size : _TICKET.size + name_bytes], raw[start - metadata_bytes : start]
    owner = PeerPool(name, metadata, base, block_bytes, rows, kind.decode(), device)
    entries = list(ENTRY.iter_unpack(memoryview(raw)[start:]))
    if any(row >= rows for _, row, _ in entries):
        raise ValueError("a row outside of the pool")
    return Ticket(owner, lease_id, time.monotonic() + min(lease_s, MAX_LEASE_S), entries, (1 << count) - 1)


def _try_unpack_ticket(raw: bytes) -> Ticket | None:
    try:
        return unpack_ticket(raw)
    except ValueError:
        return None


def pack_notification(lease_id: int, read: int) -> bytes:
    """Pack the notification that blocks of a lease were read. `read` has one bit per entry of the ticket."""
    return _NOTIFICATION.pack(_NOTIFICATION_MAGIC, lease_id) + read.to_bytes((read.bit_length() + 7) // 8, "little")


def unpack_notification(raw: bytes) -> tuple[int, int] | None:
    """Return the lease id and the bits of the entries read. None if the bytes are not a notification."""
    if len(raw) < _NOTIFICATION.size:
        return None
    magic, lease_id = _NOTIFICATION.unpack_from(raw)
    return (lease_id, int.from_bytes(raw[_NOTIFICATION.size :], "little")) if magic == _NOTIFICATION_MAGIC else None


def pack_prolongation(lease_id: int, lease_s: float) -> bytes:
    """Pack the notification that a lease is to end in `lease_s` seconds at the earliest."""
    return _PROLONGATION.pack(_PROLONGATION_MAGIC, lease_id, lease_s)


def unpack_prolongation(raw: bytes) -> tuple[int, float] | None:
    """Return the lease id and the seconds. None if the bytes are not such a notification."""
    if len(raw) != _PROLONGATION.size:
        return None
    magic, lease_id, lease_s = _PROLONGATION.unpack(raw)
    return (lease_id, min(lease_s, MAX_LEASE_S)) if magic == _PROLONGATION_MAGIC and lease_s > 0 else None


class ReceivedTickets:
    """The tickets received by this instance, until they are released or their leases expire. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[bytes, Ticket] = {}

    def locate(self, tickets: Sequence[bytes]) -> tuple[dict[bytes, RemoteBlock], int]:
        """Return the blocks of the tickets by key, the latest ticket first, and the number of invalid tickets."""
        located: dict[bytes, RemoteBlock] = {}
        invalid = 0
        with self._lock:
            self._remove_expired()
            for raw in reversed(tickets):
                ticket = self._tickets.get(raw) or _try_unpack_ticket(raw)
                if ticket is None:
                    invalid += 1
                    continue
                self._tickets[raw] = ticket
                for index, (key, _, _) in enumerate(ticket.entries):
                    located.setdefault(key, RemoteBlock(ticket, index))
        return located, invalid

    def mark_read(self, blocks: Iterable[RemoteBlock]) -> list[tuple[Ticket, int]]:
        """Mark blocks as read after a load, whatever its outcome. Returns the bits to notify the owners of, per ticket."""
        read_bits: dict[Ticket, int] = {}
        for block in blocks:
            read_bits[block.ticket] = read_bits.get(block.ticket, 0) | 1 << block.index
        with self._lock:
            for ticket, bits in read_bits.items():
                ticket.unread &= ~bits
        return list(read_bits.items())

    def release(self, tickets: Sequence[bytes]) -> list[tuple[Ticket, int]]:
        """Remove tickets. Returns the unread bits to notify the owners of, per ticket."""
        with self._lock:
            removed = [self._tickets.pop(raw, None) or _try_unpack_ticket(raw) for raw in tickets]
        return [(ticket, ticket.unread) for ticket in removed if ticket is not None and ticket.unread]

    def prolong(self, tickets: Sequence[bytes], lease_s: float) -> list[Ticket]:
        """Count these leases as prolonged here, and return those whose owners are to be told."""
        with self._lock:
            known = [self._tickets.get(raw) or _try_unpack_ticket(raw) for raw in tickets]
            prolonged = [ticket for ticket in known if ticket is not None and ticket.unread]
            for ticket in prolonged:
                ticket.expires_at = max(ticket.expires_at, time.monotonic() + lease_s)
        return prolonged

    def _remove_expired(self) -> None:
        now = time.monotonic()
        for raw in [raw for raw, ticket in self._tickets.items() if ticket.expires_at <= now]:
            del self._tickets[raw]
