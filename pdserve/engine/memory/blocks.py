"""Blocks of KV: the pool that hands them out, and those of one sequence. Plain data on block ids; `KVMemory` has the tensor.

The pool counts references, and is the prefix cache, from which it evicts. A block is in exactly one of three states:
    free     unreferenced, without a key
    cached   unreferenced, with a key: a prefix hit revives it, an allocation may evict it (least recently used first)
    held     referenced by one or more holders (sequences, transfers in flight), or pinned: never evicted until a reset

A model whose layers have several windows has several groups of blocks, which differ in bytes. Memory is given out in *pages*,
each to one group for as long as a block of it is held or cached: so memory moves between groups. Where there is one group, a
page is a block. What the pool counts (`num_blocks`, `num_free`, promises) are pages.

A sequence holds blocks only for KV that exists or is being computed. Those that it will need later are *promised* to it: they
are counted, not allocated. What sequences with promises hold and are promised is together never more than the pool. Only
running sequences may take promised blocks, and these end without waiting for a promise; so every promise is kept in the end,
in whatever order KV comes.

Of a sequence, `SequenceKV` has the blocks, which tokens have KV, where that came from, and the keys of full blocks. Only its
methods change this state; other modules call them and read the attributes.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Protocol

from pdserve.engine.memory.groups import (
    ONE_GROUP,
    BlockTable,
    Group,
    SwappedKV,
    Table,
    Tails,
    copy_on_write,
    extend,
    num_pages,
    num_usable,
    pages_for,
)
from pdserve.keys import KeyChain, Tokens

BlockPairs = list[tuple[int, int]]  # (block, block of the same pool or of another)


class NoFreeBlocks(Exception):
    """An allocation asked for more blocks than are free or cached."""


class BlockListener(Protocol):
    """Is told what the pool's blocks hold."""

    def store(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """A key became findable. `parent` is the key of the block before, if any."""

    def remove(self, key: bytes) -> None: ...


class BlockPool:
    """Reference counts, content keys and an LRU of cached pages. Every operation is constant time per block.

    Args:
        num_blocks: pages.
        groups: the one of the longest window first.

    Attributes:
        num_promised: free pages that sequences are promised, see `SequenceKV.promise`.
        num_shared: blocks with several holders.
        has_states: the last group has states of recurrent layers.
        message_ends: tokens that end a message, behind which a state is kept.
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
            parent, tokens: for the listeners, which are told of the first group.
            at: the group's index.
        """
        assert self.refs[block] > 0, f"block {block} registered without a holder"
        if key not in self._block_of[at] and block not in self._key_of:
            self._block_of[at][key] = block
            self._key_of[block] = key
            self._keyed[self._page_of[block]] += 1
            for listener in self.listeners if not at else ():
                listener.store(key, parent, tokens)

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
        keys, self._block_of, self._key_of = [*self._block_of[0]], [{} for _ in self.groups], {}
        self._keyed = [0] * self.num_blocks
        for key in keys:
            for listener in self.listeners:
                listener.remove(key)

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
                for listener in self.listeners if not at else ():
                    listener.remove(key)
        self._keyed[page] = 0
        return page


def block_table(ids: Iterable[int] = ()) -> BlockTable:
    return array("q", ids)


@dataclass(eq=False)
class SequenceKV:
    """The KV of a sequence's tokens.

    Attributes:
        tokens: of the sequence, whose output appends to them.
        num_initial: number of tokens at creation: the prompt, and the output that another instance had generated.
        chain: computes the keys.
        initial_keys: those of all blocks of the initial tokens, a partial last block included.
        block_ids: one per block of tokens. The first `num_dropped` entries are void.
        num_dropped: leading blocks released because they lie outside the attention window of every later token.
        spare: blocks of its pages that are behind those of `block_ids`; none if a page is a block.
        tails: its blocks in the further groups of the pool, while it has blocks.
        num_computed: leading tokens whose KV is in `block_ids`.
        num_promised: further pages that it will get when KV comes for them.
        num_lost: leading tokens whose KV a preemption has taken away, if it is not in host memory.
        num_registered: leading blocks that are registered in the pool by key.
        keys: content keys of the full blocks of `tokens`, derived on demand.
        cacheable: the KV is exactly what this pool would compute, so its blocks may be registered for prefix hits.
        swapped: the copy in host memory of the KV that a preemption took away, if any.
        needs_refetch: set on preemption if the KV may be in the store; once the sequence has blocks again, its owner
            looks there before anything is recomputed.
        num_preemptions: how often it was taken away.
        admitted: whether the sequence has been in the running batch.
        num_local_hit: tokens whose KV came from this pool at first admission.
        num_loaded: tokens whose KV came from the KV store at first admission.
        num_unneeded: leading tokens to which no later one attended at first admission, so that their KV came from nowhere.
        num_shared: leading tokens whose KV it took over from another sequence of its request.
    """

    tokens: Tokens
    block_size: int
    num_initial: int
    chain: KeyChain
    initial_keys: list[bytes] = field(default_factory=list)
    block_ids: BlockTable = field(default_factory=block_table)
    num_dropped: int = 0
    spare: list[int] = field(default_factory=list)
    tails: Tails = field(default_factory=Tails)
    num_promised: int = 0
    num_lost: int = 0
    num_computed: int = 0
    num_registered: int = 0
    keys: list[bytes] = field(default_factory=list)
    cacheable: bool = True
    swapped: SwappedKV | None = None
    needs_refetch: bool = False
    num_preemptions: int = 0
    admitted: bool = False
    num_local_hit: int = 0
    num_loaded: int = 0
    num_unneeded: int = 0
    num_shared: int = 0

    @property
    def held_blocks(self) -> list[int]:
        """Ids of the blocks to which the sequence holds a reference."""
        held = self.block_ids[self.num_dropped :].tolist()
        for tail in self.tails:
            held += tail.held_blocks
        return held + self.spare if self.tails else held

    def blocks(self, first: int, stop: int) -> list[int]:
        """Return the ids of its blocks [first, stop). None of them may have been dropped."""
        assert first >= self.num_dropped, f"block {first} was dropped"
        return self.block_ids[first:stop].tolist()

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 while decoding, more while prefilling or after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if at most the last token lacks KV. A beam that waits for others lacks none."""
        return len(self.tokens) - self.num_computed <= 1

    def full_keys(self) -> list[bytes]:
        """Return the keys of all full blocks of `tokens`."""
        first = (len(self.keys) + 1) * self.block_size
        if first <= len(self.tokens):
            self.keys += self.prefix_keys(range(first, len(self.tokens) + 1, self.block_size))
        return self.keys

    def prefix_keys(self, ends: Sequence[int]) -> list[bytes]:
        """Return the key of the first n tokens for each n of `ends`, which must ascend."""
        return self.chain.keys(self.tokens, ends)

    def num_local(self, pool: BlockPool, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks whose KV the sequence or the pool has; `keys` are those to look up."""
        return self.num_registered if self.block_ids else len(pool.match(keys))

    def blocks_needed(self, pool: BlockPool) -> int:
        """Return how many new pages are needed to compute all tokens, the copy of a shared block included."""
        if self.tails:
            stop, index = pool.blocks_for(len(self.tokens)), self.num_computed // self.block_size
            return num_pages(pool, self._tables, stop, index, self.num_registered)
        is_copied = self._block_to_copy(pool) is not None
        return max(0, pool.blocks_for(len(self.tokens)) - len(self.block_ids)) + is_copied

    # ---- changes of state ---------------------------------------------------------------------------------------

    def for_sibling(self, tokens: Tokens) -> "SequenceKV":
        """Return the state, without KV, of another sequence of the same tokens, of which `tokens` is a copy."""
        assert not self.block_ids and not self.admitted
        return replace(
            self, tokens=tokens, keys=[], block_ids=block_table(), chain=self.chain.copy(), spare=[], tails=Tails()
        )

    def fork(self, pool: BlockPool, tokens: Tokens) -> "SequenceKV":
        """Return the state of another sequence, which shares all KV computed so far. `tokens` is a copy of its own."""
        block_ids = self.block_ids[: pool.blocks_for(self.num_computed)]
        pool.hold(block_ids[self.num_dropped :])
        chain, keys = self.chain.copy(), [*self.keys]
        other = replace(self, tokens=tokens, keys=keys, block_ids=block_ids, num_promised=0, swapped=None, chain=chain)
        other.spare, other.tails = [], self.tails.shared(pool, len(block_ids))
        return other

    def share(self, other: "SequenceKV", pool: BlockPool) -> None:
        """Take over the KV that another sequence of the same tokens has. Later writes are copy-on-write."""
        assert not self.block_ids and len(self.tokens) == len(other.tokens)
        self.block_ids = other.block_ids[: pool.blocks_for(other.num_computed)]
        self.num_dropped, self.num_computed = min(other.num_dropped, len(self.block_ids)), other.num_computed
        pool.hold(self.held_blocks)
        self.tails = other.tails.shared(pool, len(self.block_ids))
        self.num_registered = min(other.num_registered, len(self.block_ids))
        self.keys, self.chain, self.cacheable = other.keys[:], other.chain.copy(), other.cacheable
        self.num_shared, self.num_unneeded = other.num_computed, min(other.num_unneeded, other.num_computed)
        self.num_local_hit = other.num_computed - self.num_unneeded

    def take_blocks(self, first: int, hits: list[int], fresh: list[int]) -> None:
        """Take over references to the first blocks.

        Args:
            first: index of the first block; the ones before it count as dropped.
            hits: blocks from `first` on that hold the KV of the tokens.
            fresh: blocks without KV.
        """
        assert not self.block_ids
        self.block_ids = block_table([0] * first + hits + fresh)
        self.num_dropped, self.num_registered = first, first + len(hits)
        self.num_computed = self.num_registered * self.block_size
        if not self.admitted:
            self.num_local_hit, self.num_unneeded = len(hits) * self.block_size, first * self.block_size

    def take_groups(
        self, pool: BlockPool, first: int, hits: list[int], num_coming: int, num_blocks: int, num_now: int, room: int
    ) -> bool:
        """Take over prefix hits, see `take_blocks`, and be promised `num_blocks` blocks of all groups, `num_now` of them now.

        Returns:
            False if more than `room` pages would have to be promised beyond the spare ones; nothing was taken.
        """
        self.take_blocks(first, hits, [])
        num_tokens = max(num_coming, self.num_computed)
        self.tails.take_hits(pool, self.full_keys()[: self.num_registered], num_tokens, self.tokens)
        if (count := num_pages(pool, self._tables, num_blocks)) > room + pool.num_spare:
            self.release_blocks(pool)
            return False
        self.promise(pool, count)
        self.take_promised(pool, stop=num_now)
        return True

    def grow(self, pool: BlockPool, further: int = 0) -> None:
        """Allocate the blocks that all tokens need, and `further` tokens after them."""
        self._take(pool, pool.blocks_for(len(self.tokens) + further) - len(self.block_ids))

    def take_promised(self, pool: BlockPool, num_tokens: int = 0, stop: int = 0) -> int:
        """Allocate promised blocks, up to index `stop` or for the next `num_tokens` tokens, as far as blocks are free.

        Returns:
            how many of these tokens have blocks.
        """
        stop, most = max(stop, pool.blocks_for(self.num_computed + num_tokens)), min(self.num_promised, pool.num_free)
        if self.tails:
            while stop > len(self.block_ids) and num_pages(pool, self._tables, stop) > most:
                stop -= 1
            most = stop
        self._take(pool, min(stop - len(self.block_ids), most))
        return min(num_tokens, len(self.block_ids) * self.block_size - self.num_computed)

    def promise(self, pool: BlockPool, count: int) -> None:
        """Change the number of pages that the pool keeps for this sequence by `count`, without allocating them."""
        self.num_promised += count
        pool.num_promised += count

    def copy_on_write(self, pool: BlockPool) -> BlockPairs:
        """Replace the block that the next token is written to if others read it or may find it by its key.

        Returns:
            (source, target): the block whose content must be copied, and its replacement. Empty if nothing was replaced.
        """
        if self.tails:
            at = self.num_computed // self.block_size
            pairs = copy_on_write(pool, self._tables, at, self.num_registered)
            self.num_registered = min(self.num_registered, at)
            return pairs
        index = self._block_to_copy(pool)
        if index is None:
            return []
        self.num_registered = min(self.num_registered, index)
        source, (target,) = self.block_ids[index], pool.allocate(1)
        pool.release([source])
        self.block_ids[index] = target
        return [(source, target)]

    def take_room(self, pool: BlockPool) -> BlockPairs:
        """Make room for all tokens: allocate blocks, and return which one is to be copied first, see `copy_on_write`."""
        copies = self.copy_on_write(pool)
        self.grow(pool)
        return copies

    def drop_blocks(self, pool: BlockPool, stop: int) -> None:
        """Release the blocks before index `stop`, to which no later token attends."""
        if stop > self.num_dropped:
            pool.release(self.blocks(self.num_dropped, stop))
            self.num_dropped = stop

    def release_blocks(self, pool: BlockPool) -> None:
        """Release all blocks. Of a window, the last ones are evicted last: a hit needs them."""
        pool.release(self.block_ids[self.num_dropped :].tolist())
        if self.tails:
            pool.release(self.spare)
            for tail in self.tails:
                pool.release(tail.held_blocks[::-1])
        self.promise(pool, -self.num_promised)
        self.block_ids, self.spare, self.tails = block_table(), [], Tails()
        self.num_computed = self.num_registered = self.num_dropped = 0

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Release all blocks before the first admission: the sequence is computed from its first token on."""
        self.release_blocks(pool)
        self.num_local_hit = self.num_unneeded = 0

    def forbid_caching(self) -> None:
        """Keep the blocks from being registered for prefix hits."""
        self.cacheable = False

    def admit(self, pool: BlockPool) -> BlockPairs:
        """Join the running batch with room for all tokens, see `take_room`; for a prompt, promised blocks are room, too."""
        self.admitted = True
        has_room = self.num_promised and not self.is_decoding and self.blocks_needed(pool) <= self.num_promised
        return [] if has_room else self.take_room(pool)

    def mark_computed(self, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens have KV."""
        self.num_computed += num_tokens

    def mark_loaded(self, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens have KV, found in the pool or loaded from the store."""
        self.num_computed = num_tokens
        if not self.admitted:
            self.num_loaded = max(0, num_tokens - self.num_unneeded - self.num_local_hit)
        self.admitted = True

    def reopen_prompt(self) -> None:
        """Give up the KV of the last initial token, which has no successor yet: its logits are needed."""
        assert self.num_computed == self.num_initial == len(self.tokens)
        self.num_computed -= 1
        self.num_loaded = max(0, self.num_loaded - 1)

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Make full blocks that have KV findable by key."""
        full = self.num_computed // self.block_size
        if full > self.num_registered and self.cacheable:
            keys = self.full_keys()
            for i in range(self.num_registered, full):
                tokens = self.tokens[i * self.block_size : (i + 1) * self.block_size]
                pool.register(self.block_ids[i], keys[i], keys[i - 1] if i else None, tokens)
                for tail in self.tails:
                    if tail.keeps(i):
                        pool.register(tail.ids[i], keys[i], at=tail.at)
            self.num_registered = full

    def preempt(self, pool: BlockPool, swapped: SwappedKV | None, *, is_stored: bool) -> None:
        """Release all blocks, so that others can run.

        Args:
            swapped: copy in host memory, if any.
            is_stored: the KV may be in the store.
        """
        self.swapped = swapped
        self.num_lost = self.num_computed if swapped is None else self.num_lost
        self.needs_refetch = is_stored and swapped is None
        self.release_blocks(pool)
        self.num_preemptions += 1

    def restore_swapped(self) -> SwappedKV:
        """Record that the KV in host memory has been copied back. Returns what may be released there."""
        swapped = self.discard_swapped()
        self.num_computed = max(self.num_computed, swapped.num_tokens)
        return swapped

    def discard_swapped(self) -> SwappedKV:
        """Forget the KV in host memory, and return what may be released there."""
        swapped, self.swapped = self.swapped, None
        assert swapped is not None, "there is none"
        return swapped

    def end_refetch(self) -> None:
        """Record that the store is asked for the KV, as it is once after each preemption."""
        self.needs_refetch = False

    def _take(self, pool: BlockPool, count: int) -> None:
        """Allocate `count` further blocks, if positive. They count as promised ones first."""
        if count > 0 and self.tails:
            taken = extend(pool, self._tables, len(self.block_ids) + count)
            self.promise(pool, -min(taken, self.num_promised))
        elif count > 0:
            self.block_ids.extend(pool.allocate(count))
            self.promise(pool, -min(count, self.num_promised))

    @property
    def _tables(self) -> list[Table]:
        """Its blocks in all groups. Changes of ids and spare blocks are changes of its own."""
        return [Table(0, self.block_ids, self.num_dropped, self.spare), *self.tails]

    def _block_to_copy(self, pool: BlockPool) -> int | None:
        """Return the index of the block that the next token is written to if others read it or may find it, else None."""
        index = self.num_computed // self.block_size
        if index < self.num_registered:  # of a reopened prompt
            return index
        return index if index < len(self.block_ids) and pool.refs[self.block_ids[index]] > 1 else None
