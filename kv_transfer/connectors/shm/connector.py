"""`shm://name?size=1GiB`: a store in the shared memory of one machine. The default of `pdserve up`.

A store copies a block once, a load copies it once, and each hashes it once. See `slab.py` for what happens when a
process dies.

Size: by default 512 MiB, but at most half of the free shared memory and at least 32 blocks. A segment in use keeps its
size; an unused one is recreated if another size is requested. There is one segment per block length; unused segments for
other block lengths are removed by the next process that attaches.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome
from pdserve.kv_transfer.connectors.shm import segment, slab
from pdserve.kv_transfer.header import NAME, payload_length
from pdserve.kv_transfer.url import Query, split, split_tiers

_GROUP_BYTES = 4 << 20  # blocks claimed and published together
_GROUP_BLOCKS = 32  # the lock is held for about 0.1 ms then


def unlink(url: str) -> bool:
    """Remove the segments of this URL. Returns True if there were any.

    Connectors still attached to them keep sharing them; connectors that attach later do not see them.
    """
    return segment.unlink(_segment_name(url))


@contextmanager
def removing_new_segments(url: str) -> Iterator[None]:
    """Context manager that removes the segments created for this URL in its body, unless they are still in use.

    The URL may be a `tiered://` URL.
    """
    urls = split_tiers(url)[1] if url.startswith("tiered://") else [url]
    names = [_segment_name(tier) for tier in urls if tier.startswith("shm://")]
    before = {path for name in names for path in segment.paths(name)}
    try:
        yield
    finally:
        segment.remove_unused(path for name in names for path in segment.paths(name) if path not in before)


def count_leases(url: str) -> int:
    """Count the blocks that are leased now in the segments of this URL."""
    return sum(map(slab.count_leases, segment.paths(_segment_name(url))))


class ShmConnector(BatchedConnector):
    """Stores blocks in the slots of a shared-memory slab."""

    scheme: ClassVar[str] = "shm"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, follows=True, prolongs=True, stores_growing=self.codec_name == "none")

    def configure(self, query: Query) -> None:
        self._name = _segment_name(self.url)
        self._size = query.size("size", None)

    def open(self) -> None:
        self._slab = segment.attach(self._name, self.payload_lengths[-1], self._size)

    def shut(self) -> None:
        self._slab.close()
        segment.remove_abandoned()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        step = max(1, min(_GROUP_BLOCKS, _GROUP_BYTES // self.memory.layout.block_bytes))
        for start in range(0, len(blocks), step):
            self._put_group(blocks[start : start + step], lease_s)

    def put_growing(self, blocks: Sequence[Outgoing], lease_s: float) -> Generator[None, int, None]:
        claimed: list[tuple[Outgoing, int]] = []
        written: list[tuple[Outgoing, int, bytes]] = []
        num_bytes = yield
        try:
            for start in range(0, len(blocks), _GROUP_BLOCKS):
                claimed += self._claim(blocks[start : start + _GROUP_BLOCKS], lease_s)
            while num_bytes < self.memory.layout.block_bytes:
                for block, slot in claimed:
                    block.copy_front(self._slab.payload(slot), num_bytes)
                    self._slab.grow(slot, num_bytes)
                num_bytes = yield
            for block, slot in claimed:
                written.append((block, slot, block.copy_front(self._slab.payload(slot), num_bytes)))
        finally:
            self._publish_or_free(claimed, written, lease_s)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            name = self.namespace + block.key
            self._slab.check_length()
            slot = self._slab.find(name)
            if slot is None:
                block.missing()
                continue
            self._slab.touch(slot)
            header, payload = self._slab.header(slot), self._slab.payload(slot)
            if not self.codec.is_identity:
                payload = payload[: payload_length(header)]
            elif block.front_of == slot and block.accept_rest(header, payload):
                continue
            if block.accept(header, [payload]) is Outcome.CORRUPT and not (
                self._slab.holds(slot, header) and header[NAME] == name
            ):
                block.missing()  # evicted during the read, or before, and the slot has another block

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        for key in keys:
            self._slab.check_length()
            yield self._slab.find(self.namespace + key) is not None

    def read_ahead(self, blocks: Sequence[Incoming]) -> bool:
        has_read = False
        for block in blocks if self.codec.is_identity else ():
            slot = self._slab.find_growing(self.namespace + block.key) if block.front_of is None else block.front_of
            if slot is None:
                break
            has_read |= block.read_front(self._slab.front(slot), slot)
        return has_read

    def delete_many(self, keys: Sequence[bytes]) -> None:
        with self._slab.locked(self.timeout):
            for slot in self._slab.find_all(self.namespace, keys):
                self._slab.free(slot)

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        """Free the slots that are corrupt now: since the load, another process may have stored a block again."""
        with self._slab.locked(self.timeout):
            for block in blocks:
                for slot in self._slab.find_all(self.namespace, [block.key]):
                    header = self._slab.header(slot)
                    payload = self._slab.payload(slot)[: payload_length(header)]
                    if not self.is_sound(block.key, header, payload):
                        self._slab.free(slot)

    def release_many(self, keys: Sequence[bytes]) -> None:
        with self._slab.locked(self.timeout):
            for slot in self._slab.find_all(self.namespace, keys):
                self._slab.release(slot)

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        with self._slab.locked(self.timeout):
            for slot in self._slab.find_all(self.namespace, keys):
                self._slab.prolong(slot, lease_s)

    def _put_group(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        claimed = self._claim(blocks, lease_s)
        written: list[tuple[Outgoing, int, bytes]] = []
        try:
            for block, slot in claimed:
                written.append((block, slot, block.copy_to(self._slab.payload(slot))))
        finally:
            # Also after the deadline passed half-way: copied blocks are valid, and the other slots are freed.
            self._publish_or_free(claimed, written, lease_s)

    def _claim(self, blocks: Sequence[Outgoing], lease_s: float) -> list[tuple[Outgoing, int]]:
        claimed: list[tuple[Outgoing, int]] = []
        with self._slab.locked(self.timeout):
            for block in blocks:
                name = self.namespace + block.key
                existing = self._slab.find(name)
                if existing is not None:
                    self._slab.renew(existing, lease_s)
                    block.present()
                elif (slot := self._slab.claim(name)) is not None:
                    claimed.append((block, slot))
                else:
                    block.failed(Outcome.FULL)
        return claimed

    def _publish_or_free(
        self, claimed: list[tuple[Outgoing, int]], written: list[tuple[Outgoing, int, bytes]], lease_s: float
    ) -> None:
        try:
            with self._slab.locked(self.timeout):
                for block, slot, header in written:
                    # A late block gets no lease: it is not reported as stored, so no caller would release it.
                    lease = lease_s if block.in_time() else 0.0
                    existing = self._slab.find(self.namespace + block.key)
                    if existing is None:
                        self._slab.publish(slot, header, lease)
                        block.stored()
                    else:  # the same block was stored by another connector meanwhile
                        self._slab.free(slot)
                        self._slab.renew(existing, lease)
                        block.present()
                for _, slot in claimed[len(written) :]:
                    self._slab.free(slot)
        except TimeoutError:
            self._slab.abandon(slot for _, slot in claimed)
            raise


def _segment_name(url: str) -> str:
    parts = split(url)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", parts.netloc) or parts.path not in ("", "/"):
        raise SetupError(
            f"{url!r} must have a plain name of letters, digits, dots, dashes and underscores, such as shm://pdserve."
        )
    return parts.netloc
