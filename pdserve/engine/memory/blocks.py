"""The pool that hands out blocks of KV, and the prefix cache. Plain data on block ids; `KVMemory` has the tensor.

The pool counts references, and is the prefix cache, from which it evicts. A block is in exactly one of three states:
    free     unreferenced, without a key
    cached   unreferenced, with a key: a prefix hit revives it, an allocation may evict it (least recently used first)
    held     referenced by one or more holders (sequences, transfers in flight), or pinned: never evicted until a reset

A model whose layers have several windows has several groups of blocks, which differ in bytes. Memory is given out in *pages*,
each to one group for as long as a block of it is held or cached: so memory moves between groups. Where there is one group, a
page is a block. What the pool counts (`num_blocks`, `num_free`, promises) are pages.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Protocol

from pdserve.engine.memory.groups import ONE_GROUP, Group, num_usable, pages_for

BlockPairs = list[tuple[int, int]]  # (block, block of the same pool or of another)


class NoFreeBlocks(Exception):
    """An allocation asked for more blocks than are free or cached."""


class BlockListener(Protocol):
    """Is told what the pool's blocks hold."""

    def store(self, key: bytes, parent: bytes | None, tokens: Sequence[int], group: int = 0) -> None:
        """A key became findable in a group. `parent` is the key of the block before, if any."""

    def remove(self, key: bytes, group: int = 0) -> None: ...


class BlockPool:
    """Reference counts, content keys and an LRU of cached pages. Every operation is constant time per block.

    Args:
        num_blocks: pages.
        groups: the one of the longest window first.

    Attributes:
        num_promised: free pages that sequences are promised, see `SequenceKV.promise`.
        num_shared: blocks with several holders.
        has_states: the last group has states of recurrent layers.
        message_ends: tokens that end a message, behind which other prompts may go on.
        refs: number of holders of each block. One with several must not be written to.
        listeners: are told of each key that becomes findable or stops being so.
        pinned: blocks to which the pool itself has a reference.
        max_pinned: how many blocks may be pinned.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[Group] = ONE_GROUP) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.tail_groups = [*enumerate(groups)][1:]
        self.has_states = groups[-1].is_states
        self.message_ends = frozenset[int]()
        self.num_promised = 0
        self.num_shared = 0
        self._page_of: Sequence[int] = range(num_blocks)
        if len(groups) > 1:
            self._page_of = [page for group in groups for page in range(num_blocks) for _ in range(group.per_page)]
        self.refs = [0] * len(self._page_of)
        # Pages without a held block. If a block of one has a key, it is cached, the least recently used first.
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held, self._keyed = [0] * num_blocks, [0] * num_blocks  # of each page: blocks that are, or have keys
        self._group_of = [0] * num_blocks  # of each page, as long as it is not free
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._key_of: dict[int, bytes] = {}
        self.listeners: list[BlockListener] = []
        self.pinned: set[int] = set()
        self.max_pinned = num_blocks

    @property
    def num_free(self) -> int:
        """Number of pages available to an allocation: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_spare(self) -> int:
        """Free pages that are promised to no sequence; negative if running ones have taken promised pages."""
        return self.num_free - self.num_promised

    @property
    def num_held(self) -> int:
        """Number of pages that have holders, without the pinned ones."""
        return self.num_blocks - self.num_free - len({self._page_of[block] for block in self.pinned})

    def num_pages(self, blocks: Iterable[int]) -> int:
        """Return in how many pages these blocks are."""
        return len({self._page_of[block] for block in blocks})

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pages_for(self, num_blocks: int) -> int:
        """Return how many pages so many blocks of each group take."""
        return pages_for(num_blocks, self.groups)

    def match(self, keys: Sequence[bytes], first: int = 0, num_coming: int = 0) -> list[int]:
        """Return the ids of the first group's blocks of the longest prefix of `keys` in the pool. Takes no reference.

        In the other groups, the pool must have those of its blocks that tokens behind the prefix reach.

        Args:
            first: index in the sequence of the first key's block.
            num_coming: leading tokens that nobody computes here: what no token behind these reaches may be missing.
        """
        blocks: list[int] = []
        block_of = self._block_of[0]
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks if not self.tail_groups else self._usable(keys, blocks, first, num_coming)

    def _usable(self, keys: Sequence[bytes], blocks: list[int], first: int, num_coming: int) -> list[int]:
        keys = keys[: len(blocks)]
        return blocks[: num_usable(self.groups, self._block_of, keys, self.block_size, first, num_coming)]

    def match_tail(self, at: int, keys: Sequence[bytes]) -> list[int]:
        """Return the ids of a group's blocks of `keys`, all of which are in the pool. Takes no reference."""
        return [*map(self._block_of[at].__getitem__, keys)]

    def has_key(self, block: int) -> bool:
        return block in self._key_of

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, reviving cached ones."""
        for block in blocks:
            if self.refs[block] == 0:
                assert block in self._key_of, f"block {block} is free and cannot be held"
                page = self._page_of[block]
                if not self._held[page]:
                    del self._cached[page]
                self._held[page] += 1
            self.refs[block] += 1
            self.num_shared += self.refs[block] == 2

    def allocate(self, count: int, at: int = 0) -> list[int]:
        """Take the blocks of `count` pages for a group, with one reference each, evicting cached pages if none is free.

        Raises:
            NoFreeBlocks: fewer than `count` are free or cached; nothing was taken.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks requested, {self.num_free} of {self.num_blocks} free")
        blocks: list[int] = []
        group = self.groups[at]
        for _ in range(count):
            page = self._free.popleft() if self._free else self._evict()
            self._group_of[page], self._held[page] = at, group.per_page
            first = group.first_id + page * group.per_page
            for block in range(first, first + group.per_page):
                self.refs[block] = 1
                blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int], *, goes_first: bool = False) -> None:
        """Drop one reference of each block. A page without references is cached if it has a key, else free.

        The last block is released first, so that the tail of a prefix is evicted before its head.

        Args:
            goes_first: evict them before all others.
        """
        for block in reversed(blocks):
            assert self.refs[block] > 0, f"block {block} released more often than held"
            self.refs[block] -= 1
            self.num_shared -= self.refs[block] == 1
            if self.refs[block] == 0:
                page = self._page_of[block]
                self._held[page] -= 1
                if not self._held[page]:
                    if self._keyed[page]:
                        self._cached[page] = None
                        if goes_first:
                            self._cached.move_to_end(page, last=False)
                    else:
                        self._free.append(page)

    def register(
        self, block: int, key: bytes, parent: bytes | None = None, tokens: Sequence[int] = (), at: int = 0
    ) -> None:
        """Make a held block, now full and final, findable by its key. The first block registered for a key keeps it.

        Args:
            parent, tokens: for the listeners.
            at: the group's index.
        """
        assert self.refs[block] > 0, f"block {block} registered without a holder"
        if key not in self._block_of[at] and block not in self._key_of:
            self._block_of[at][key] = block
            self._key_of[block] = key
            self._keyed[self._page_of[block]] += 1
            for listener in self.listeners:
                listener.store(key, parent, tokens, at)

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep the blocks of the longest prefix of `keys` that is here from eviction, as far as `max_pinned` allows."""
        blocks, size = self.match(keys), self.block_size
        num_hits = len(blocks)
        for at, group in self.tail_groups:
            blocks += self.match_tail(at, keys[group.num_unreached(num_hits * size, size) : num_hits])
        for block in blocks:
            if block not in self.pinned and len(self.pinned) < self.max_pinned:
                self.pinned.add(block)
                self.hold([block])

    def reset(self) -> None:
        """Forget all keys and pins: held blocks stay with their holders, but are prefix hits no more."""
        pinned, self.pinned = self.pinned, set()
        self.release([*pinned])
        self._free.extend(self._cached)
        self._cached.clear()
        keys, self._block_of, self._key_of = self._block_of, [{} for _ in self.groups], {}
        self._keyed = [0] * self.num_blocks
        for at, of_group in enumerate(keys):
            for key in of_group:
                for listener in self.listeners:
                    listener.remove(key, at)

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state and that keys and blocks agree."""
        free, cached = set(self._free), set(self._cached)
        held_blocks = set(compress(range(len(self.refs)), self.refs))
        held = Counter(self._page_of[block] for block in held_blocks)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not held.keys() & (free | cached), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert self._held == [held[page] for page in range(self.num_blocks)]
        assert self.num_shared == sum(count > 1 for count in self.refs)
        assert self.pinned <= held_blocks and len(self.pinned) <= self.max_pinned, "a pinned block was released"
        assert min(self.refs) >= 0 and self.num_promised >= 0
        found = {block: key for blocks in self._block_of for key, block in blocks.items()}
        assert found == self._key_of, "keys and blocks disagree"
        keyed = {self._page_of[block] for block in self._key_of}
        assert cached <= keyed and not free & keyed, "a free block has a key"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        at = self._group_of[page]
        group = self.groups[at]
        first = group.first_id + page * group.per_page
        for block in range(first, first + group.per_page):
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[at][key]
                for listener in self.listeners:
                    listener.remove(key, at)
        self._keyed[page] = 0
        return page
