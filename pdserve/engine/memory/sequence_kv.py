"""The KV of one sequence: its blocks, which tokens have KV and where that came from, and the keys of full blocks.

A sequence holds blocks only for KV that exists or is being computed. Those that it will need later are *promised* to it: they
are counted, not allocated. What sequences with promises hold and are promised is together never more than the pool. Only
running sequences may take promised blocks, and these end without waiting for a promise; so every promise is kept in the end,
in whatever order KV comes.

Only methods of `SequenceKV` change this state; other modules call them and read the attributes.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.engine.memory.blocks import BlockPairs, BlockPool
from pdserve.engine.memory.groups import BlockTable, SwappedKV, Table, Tails, copy_on_write, extend, num_pages
from pdserve.keys import KeyChain, Tokens


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

        Hits may be spread over pages that they share with blocks of other prompts. If the pool can never hold these pages and
        the promised ones, all hits are given up.

        Returns:
            False if more than `room` pages would have to be promised beyond the spare ones; nothing was taken.
        """
        self.take_blocks(first, hits, [])
        num_tokens = max(num_coming, self.num_computed)
        self.tails.take_hits(pool, self.full_keys()[: self.num_registered], num_tokens, self.tokens)
        if (count := num_pages(pool, self._tables, num_blocks)) > room + pool.num_spare:
            never_fits = count + pool.num_pages([*self.held_blocks, *pool.pinned]) > pool.num_blocks
            self.release_blocks(pool)
            return never_fits and self.take_groups(pool, first, [], num_coming, num_blocks, num_now, room)
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
                parent = keys[i - 1] if i else None
                pool.register(self.block_ids[i], keys[i], parent, tokens)
                for tail in self.tails:
                    if tail.keeps(i):
                        pool.register(tail.ids[i], keys[i], parent, tokens, tail.at)
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
