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
