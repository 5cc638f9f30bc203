"""Block pool: reference counts, prefix cache and eviction of KV blocks. Hands out block ids; `KVMemory` has the tensor.

A block is in exactly one of three states:
    free     unreferenced, without a key
    cached   unreferenced, with a key: a prefix hit revives it, an allocation may evict it (least recently used first)
    held     referenced by one or more holders (sequences, transfers in flight)
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Protocol

BlockPairs = list[tuple[int, int]]  # (block, block of the same pool or of another)


class NoFreeBlocks(Exception):
    """An allocation asked for more blocks than are free or cached."""


class BlockListener(Protocol):
    """Is told what the pool's blocks hold."""

    def store(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """A key became findable. `parent` is the key of the block before, if any."""

    def remove(self, key: bytes) -> None: ...


class BlockPool:
    """Reference counts, content keys and an LRU of cached blocks. Every operation is constant time per block.

    Attributes:
        refs: number of holders of each block. One with several must not be written to.
        listeners: are told of each key that becomes findable or stops being so.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.listeners: list[BlockListener] = []

    @property
    def num_free(self) -> int:
        """Number of blocks available to an allocation: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the block ids of the longest prefix of `keys` in the pool, held or cached. Takes no reference."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, reviving cached ones."""
        for block in blocks:
            if self.refs[block] == 0:
                assert block in self._cached, f"block {block} is free and cannot be held"
                del self._cached[block]
            self.refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each, evicting cached blocks when the free ones run out.

        Raises:
            NoFreeBlocks: fewer than `count` are free or cached; nothing was taken.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks requested, {self.num_free} of {self.num_blocks} free")
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block. A block without references is cached if it has a key, else free.

        The last block is released first, so that the tail of a prefix is evicted before its head.
        """
        for block in reversed(blocks):
            assert self.refs[block] > 0, f"block {block} released more often than held"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes, parent: bytes | None = None, tokens: Sequence[int] = ()) -> None:
        """Make a held block, now full and final, findable by its key. The first block registered for a key keeps it.

        Args:
            parent, tokens: for the listeners.
        """
        assert self.refs[block] > 0, f"block {block} registered without a holder"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            for listener in self.listeners:
                listener.store(key, parent, tokens)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that keys and blocks agree."""
        free, cached = set(self._free), set(self._cached)
        held = set(compress(range(self.num_blocks), self.refs))
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not held & (free | cached), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert min(self.refs) >= 0
        assert dict(zip(self._key_of.values(), self._key_of, strict=True)) == self._block_of, "keys and blocks disagree"
        assert cached <= self._key_of.keys() and not free & self._key_of.keys()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        for listener in self.listeners:
            listener.remove(key)
        return block
