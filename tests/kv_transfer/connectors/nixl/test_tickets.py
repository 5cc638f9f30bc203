"""Tests of the wire format of tickets."""

import os

import pytest

from pdserve.kv_transfer.connectors.nixl.tickets import ENTRY, PeerPool, pack_ticket, unpack_ticket
from pdserve.kv_transfer.header import HEADER_BYTES

BLOCK_BYTES = 16384


def test_unpacking_restores_tickets_and_rejects_everything_else() -> None:
    owner = PeerPool(b"name", bytes(range(40)), 4096, BLOCK_BYTES, 9)
    entries = [(os.urandom(16), row, os.urandom(HEADER_BYTES)) for row in (8, 0)]
    raw = pack_ticket(owner, 3, 60.0, [ENTRY.pack(*entry) for entry in entries])
    ticket = unpack_ticket(raw)
    assert (ticket.owner, ticket.lease_id, ticket.entries, ticket.unread) == (owner, 3, entries, 0b11)
    for end in range(len(raw)):
        with pytest.raises(ValueError):
            unpack_ticket(raw[:end])
    outside = pack_ticket(owner, 3, 60.0, [ENTRY.pack(entries[0][0], 9, entries[0][2])])
    with pytest.raises(ValueError, match="row"):
        unpack_ticket(outside)


@pytest.mark.parametrize(
    ("base", "rows", "lease_s"),
    [(4096, (1 << 32) - 1, 60.0), ((1 << 64) - BLOCK_BYTES, 2, 60.0), (4096, 9, -1.0), (4096, 9, float("nan"))],
)
def test_a_pool_or_lease_that_cannot_be_is_rejected(base: int, rows: int, lease_s: float) -> None:
    """A reader makes descriptors of all rows, and forgets a ticket when its lease has ended."""
    owner = PeerPool(b"name", b"", base, BLOCK_BYTES, rows)
    with pytest.raises(ValueError, match=r"no pool has|a lease of"):
        unpack_ticket(pack_ticket(owner, 3, lease_s, []))
