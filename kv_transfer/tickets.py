"""Tickets of several ranks in one: each with its length before it."""

import struct
from collections.abc import Sequence

_LENGTH = struct.Struct("<I")


def join_tickets(tickets: Sequence[bytes]) -> bytes:
    """Return one ticket for those of all ranks; empty if all of them are."""
    return b"".join(_LENGTH.pack(len(ticket)) + ticket for ticket in tickets) if any(tickets) else b""


def ticket_of_rank(joined: bytes, rank: int, ranks: int) -> bytes:
    """Return the ticket of one of the ranks; empty if `joined` does not hold one per rank. A load without one fails."""
    if ranks == 1:
        return joined
    tickets, start = [], 0
    while start + _LENGTH.size <= len(joined):
        end = start + _LENGTH.size + _LENGTH.unpack_from(joined, start)[0]
        tickets.append(joined[start + _LENGTH.size : end])
        start = end
    return tickets[rank] if len(tickets) == ranks and start == len(joined) else b""


def tickets_of_rank(joined: Sequence[bytes], rank: int, ranks: int) -> list[bytes]:
    """Return the tickets of one of the ranks, without empty ones."""
    return [ticket for one in joined if (ticket := ticket_of_rank(one, rank, ranks))]
