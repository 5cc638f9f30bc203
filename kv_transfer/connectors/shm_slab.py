"""The slots for blocks in a segment of shared memory (`shm_segment.py`), as one of its users sees them.

    records       one per slot, 128 bytes: state, owner, lease, and the header of the block in the slot
    payloads      one per slot, the block's bytes, aligned to pages

Life of a slot: FREE → WRITING (claimed by a user, who copies the payload without any lock) → READY → FREE or WRITING.

A key has two sets of 16 slots it may go to, and a claim takes the emptier one: with one set, a slab would turn down
leased blocks when half full; with two, it takes them until 9 of 10 slots are taken.

Who may do what:
  - Records change under the lock of byte LOCK only. The kernel drops it when its holder dies. The word with the state
    is written first on the way down and last on the way up, so a death at any point leaves a slot FREE or WRITING.
  - Every user holds a lock on a byte of its own, at ALIVE plus its number, for as long as it lives. A slot left WRITING
    by a user whose byte is free can be claimed. Numbers are never reused.
  - Readers take no lock. They read the record, copy the payload, and believe it only if its checksum fits the header.
"""

import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import xxhash

from pdserve.kv_transfer.connectors import rangelock, shm_segment
from pdserve.kv_transfer.connectors.shm_segment import ALIVE, LOCK, RECORD_BYTES, RECORDS_AT, WAYS, Segment
from pdserve.kv_transfer.header import HEADER_BYTES, Row

_WORD = struct.Struct("<Q")
_RECORD = struct.Struct("<QddQ96x")  # word (owner and state), lease's end, last use, holders
_RECORDS = np.dtype([("word", "<u8"), ("end", "<f8"), ("rest", "V112")])
_SET = struct.Struct("<" + WAYS * "Qdd104x")
_LEASE = struct.Struct("<ddQ")
_LEASE_AT: Final = 8
_USED_AT: Final = 16
_USED = struct.Struct("<d")
_HEADER_AT: Final = 64
_NAME_AT: Final = _HEADER_AT + 16  # namespace and key inside the header
_SET_BYTES: Final = WAYS * RECORD_BYTES

_FREE, _WRITING, _READY = range(3)
_STATE_BITS: Final = 8


class Slab:
    """One user's view of a slab. Threads may share it."""

    def __init__(self, segment: Segment) -> None:
        self.geometry = geometry = segment.geometry
        self._segment = segment
        self._map = segment.map
        self._fd = segment.fd
        self._user = segment.user
        self._sets = geometry.sets
        self._threads = threading.Lock()
        self._writing: set[int] = set()  # slots that our threads are copying into
        flat = np.frombuffer(self._map, np.uint8, geometry.slots * geometry.stride, geometry.payload_at)
        self._payloads: Row = flat.reshape(geometry.slots, geometry.stride)[:, : geometry.block_bytes]

    def close(self) -> None:
        del self._payloads  # the last view; the map cannot be closed under it
        self._segment.close()

    def payload(self, slot: int) -> Row:
        row: Row = self._payloads[slot]
        return row

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Excludes all other users and threads. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        if not self._threads.acquire(timeout=timeout):
            raise TimeoutError("another thread has held the slab's lock for too long")
        try:
            rangelock.lock(self._fd, LOCK, deadline)
            try:
                yield
            finally:
                rangelock.unlock(self._fd, LOCK)
        finally:
            self._threads.release()

    # Without the lock.

    def find(self, name: bytes) -> int | None:
        """The slot that holds this namespace and key."""
        for start in self._starts(name):
            records = self._records(start)
            at = records.find(name)
            while at >= 0:
                here, inside = divmod(at, RECORD_BYTES)
                if inside == _NAME_AT and records[here * RECORD_BYTES] == _READY:
                    return start + here
                at = records.find(name, at + 1)
        return None

    def header(self, slot: int) -> bytes:
        at = _record_at(slot) + _HEADER_AT
        return self._map[at : at + HEADER_BYTES]

    def holds(self, slot: int, header: bytes) -> bool:
        """Whether the slot still holds what it held when this header was read."""
        return self._map[_record_at(slot)] == _READY and self.header(slot) == header

    def touch(self, slot: int) -> None:
        """Notes a use, for eviction. If the slot has a new owner by now, that one looks a little younger than it is."""
        _USED.pack_into(self._map, _record_at(slot) + _USED_AT, time.monotonic())

    def abandon(self, slots: Iterable[int]) -> None:
        """Gives claimed slots up when the lock cannot be had to free them; the next claim may take them."""
        self._writing.difference_update(slots)

    # Under the lock.

    def claim(self, name: bytes) -> int | None:
        """A slot to write into, or None if all that this name may use are leased or being written."""
        slot = self._free_slot(name)
        if slot is None:
            slot = self._stale_slot(name)
        if slot is not None:
            self._set_word(slot, _WRITING)
            self._writing.add(slot)
        return slot

    def publish(self, slot: int, header: bytes, lease_s: float) -> None:
        """Makes a claimed slot visible, its payload being complete."""
        at = _record_at(slot) + _HEADER_AT
        self._map[at : at + HEADER_BYTES] = header
        self._set_lease(slot, lease_s, holders=1)
        self._set_word(slot, _READY)
        self._writing.discard(slot)

    def renew(self, slot: int, lease_s: float) -> None:
        """One more holder, but for a lease of 0. It ends when all have released it, or when the longest has run out."""
        _, end, _, holders = self._record(slot)
        left = end - time.monotonic()
        self._set_lease(slot, max(lease_s, left), holders + (lease_s > 0) if left > 0 else 1)

    def release(self, slot: int) -> None:
        _, end, used, holders = self._record(slot)
        left = max(0, holders - 1)
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, end if left else 0.0, used, left)

    def free(self, slot: int) -> None:
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, 0.0, 0.0, 0)
        self._set_word(slot, _FREE)
        self._writing.discard(slot)

    def _free_slot(self, name: bytes) -> int | None:
        """A free slot in the emptier set."""
        one, other = ((start, self._records(start)[::RECORD_BYTES]) for start in self._starts(name))
        start, states = max(one, other, key=lambda both: both[1].count(_FREE))
        at = states.find(_FREE)
        return start + at if at >= 0 else None

    def _stale_slot(self, name: bytes) -> int | None:
        """The slot whose last use is longest ago, among those without a lease and those left by the dead."""
        now = time.monotonic()
        stale: list[tuple[float, int, int]] = []
        for start in self._starts(name):
            values = _SET.unpack(self._records(start))
            each = zip(values[2::3], range(start, start + WAYS), values[::3], values[1::3], strict=True)
            stale += [(used, slot, word) for used, slot, word, lease_end in each if lease_end <= now]
        for _, slot, word in sorted(stale):
            if word & 0xFF == _READY or not self._being_written(slot, word >> _STATE_BITS):
                return slot
        return None

    def _being_written(self, slot: int, owner: int) -> bool:
        if owner == self._user:
            return slot in self._writing
        return rangelock.held_by_others(self._fd, ALIVE + owner)

    def _starts(self, name: bytes) -> tuple[int, int]:
        """The first slots of the two sets of a name."""
        digest = xxhash.xxh3_64_intdigest(name)
        one = digest % self._sets
        other = (one + 1 + (digest >> 32) % (self._sets - 1)) % self._sets
        return one * WAYS, other * WAYS

    def _records(self, start: int) -> bytes:
        at = _record_at(start)
        return self._map[at : at + _SET_BYTES]

    def _record(self, slot: int) -> tuple[int, float, float, int]:
        word, end, used, holders = _RECORD.unpack_from(self._map, _record_at(slot))
        return word, end, used, holders

    def _set_word(self, slot: int, state: int) -> None:
        _WORD.pack_into(self._map, _record_at(slot), self._user << _STATE_BITS | state)

    def _set_lease(self, slot: int, lease_s: float, holders: int) -> None:
        now = time.monotonic()
        _LEASE.pack_into(self._map, _record_at(slot) + _LEASE_AT, now + lease_s, now, holders)


def attach(name: str, block_bytes: int, size: int | None) -> Slab:
    """`shm_segment.attach`, and a view of it."""
    return Slab(shm_segment.attach(name, block_bytes, size))


def leases(name: str) -> int:
    """How many blocks in the segments of this name are leased at the moment."""
    return sum(_leases(path) for path in shm_segment.paths(name))


def _leases(path: str) -> int:
    with open(path, "rb") as file:
        geometry = shm_segment.Geometry.read(file.fileno())
        if geometry is None:
            return 0
        records = np.frombuffer(os.pread(file.fileno(), geometry.slots * RECORD_BYTES, RECORDS_AT), _RECORDS)
    return int(np.count_nonzero((records["word"] & 0xFF == _READY) & (records["end"] > time.monotonic())))


def _record_at(slot: int) -> int:
    return RECORDS_AT + slot * RECORD_BYTES
