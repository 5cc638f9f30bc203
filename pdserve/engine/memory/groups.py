"""Groups of blocks: what a sequence has in a pool of several groups, each with a table of its own. Plain data.

Layers of one window are a group; the group of the longest window is the first one, whose table is `SequenceKV.block_ids`.

The states of recurrent layers are the last group. Its window is that of a row on which only the next token depends.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeAlias

from pdserve.keys import STATE_WINDOW, Tokens

GAP = -1  # in a table of states
STATES = 5  # the newest one, those of the last two full blocks before it, and those of the first and the last message

BlockTable: TypeAlias = "array[int]"  # int64: a step copies it into its input, which takes a list fifteen times as long


@dataclass(frozen=True)
class Group:
    """The blocks of the layers of one window, in a pool.

    Attributes:
        window: tokens that may attend to a token, the token itself included; None: all later ones.
        per_page: blocks of a page.
        first_id: of its blocks. Ids of different groups differ.
    """

    window: int | None = None
    per_page: int = 1
    first_id: int = 0

    @cached_property
    def is_states(self) -> bool:
        return self.window == STATE_WINDOW

    @property
    def void(self) -> int:
        """The entry of a table where there is no block."""
        return GAP if self.is_states else self.first_id

    def num_unreached(self, num_tokens: int, block_size: int) -> int:
        """Return how many leading blocks lie outside the windows of all tokens behind the first `num_tokens`."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window) // block_size


ONE_GROUP = (Group(),)


def pages_for(num_blocks: int, groups: Sequence[Group], num_seqs: int = 1) -> int:
    """Return the pages that `num_blocks` blocks of each group take; of states, those of all that `num_seqs` may have."""
    return sum(_pages_of(group, num_blocks, groups, num_seqs) for group in groups)


def pages_behind(first: int, stop: int, num_tokens: int, groups: Sequence[Group], block_size: int) -> int:
    """Return the pages of blocks [first, stop) of each group, but for those that no token behind `num_tokens` reaches."""
    total = _pages_of(groups[0], stop - first, groups, 1)
    for group in groups[1:]:
        total += _pages_of(group, stop - max(first, group.num_unreached(num_tokens, block_size)), groups, 1)
    return total


def _pages_of(group: Group, num_blocks: int, groups: Sequence[Group], num_seqs: int) -> int:
    num_states = STATES * num_seqs + num_blocks // groups[0].per_page
    return min(num_blocks, num_states) if group.is_states else -(-num_blocks // group.per_page)


def blocks_in(num_pages: int, groups: Sequence[Group]) -> int:
    """Return the blocks of each group that one sequence can have in `num_pages` pages."""
    whole = math.lcm(*(group.per_page for group in groups))
    count = num_pages * whole // sum(whole // group.per_page for group in groups if not group.is_states)
    while pages_for(count, groups) > num_pages:
        count -= 1
    return count


class Pool(Protocol):
    """What tables need of `BlockPool`."""

    block_size: int
    groups: Sequence[Group]
    refs: list[int]
    message_ends: frozenset[int]

    @property
    def num_free(self) -> int: ...

    def hold(self, blocks: Sequence[int]) -> None: ...

    def allocate(self, count: int, at: int = 0) -> list[int]: ...

    def release(self, blocks: Sequence[int], *, goes_first: bool = False) -> None: ...

    def match_tail(self, at: int, keys: Sequence[bytes]) -> list[int]: ...

    def has_key(self, block: int) -> bool: ...


@dataclass(eq=False)
class Table:
    """The blocks of a sequence in one group.

    Attributes:
        at: the group's index.
        ids: one per block of tokens. Those before `num_dropped` are void.
        num_dropped: leading blocks that no later token reaches.
        spare: further blocks of its pages.
        kept: indices of those of the prompt that are needed behind messages, where other prompts may go on.
    """

    at: int
    ids: BlockTable
    num_dropped: int
    spare: list[int] = field(default_factory=list)
    kept: frozenset[int] = frozenset()

    @classmethod
    def of(cls, pool: Pool, at: int, ids: BlockTable, num_dropped: int, tokens: Tokens) -> "Table":
        """Return the table of a sequence that goes on from `ids`."""
        kept, size = set[int](), pool.block_size
        for end in _message_ends(pool, at, tokens):
            kept.update(range(pool.groups[at].num_unreached(end * size, size), end))
        return cls(at, ids, num_dropped, kept=frozenset(kept))

    @property
    def held_blocks(self) -> list[int]:
        """Ids of the blocks to which the sequence holds a reference."""
        return [*self.ids[self.num_dropped :], *self.spare]

    def is_copied(self, pool: Pool, index: int, num_registered: int) -> bool:
        """Return whether others read block `index`, to which a token is about to be written, or may find it by its key."""
        return index < num_registered or (index < len(self.ids) and pool.refs[self.ids[index]] > 1)

    def keeps(self, index: int) -> bool:
        """Return whether block `index`, once it is full, may be found by its key."""
        return index >= self.num_dropped

    def num_new(self, pool: Pool, stop: int) -> int:
        """Return how many blocks it takes for `stop` entries, spare ones included."""
        return max(0, stop - max(len(self.ids), self.num_dropped))

    def extend(self, pool: Pool, stop: int) -> None:
        """Take blocks for `stop` entries."""
        self.ids.extend([pool.groups[self.at].void] * (min(stop, self.num_dropped) - len(self.ids)))
        self.ids.extend([self.take(pool) for _ in range(stop - len(self.ids))])

    def shared(self, pool: Pool, stop: int) -> "Table":
        """Return the first `stop` blocks as those of another sequence, which holds them too."""
        other = replace(self, ids=self.ids[:stop], num_dropped=min(self.num_dropped, stop), spare=[])
        pool.hold(other.held_blocks)
        return other

    def num_unreached(self, pool: Pool, num_tokens: int) -> int:
        """Return how many leading blocks no token behind the first `num_tokens` reaches."""
        return pool.groups[self.at].num_unreached(num_tokens, pool.block_size)

    def num_unneeded(self, pool: Pool, num_tokens: int) -> int:
        """Return how many leading blocks no token behind the last hit of a prompt of `num_tokens` reaches."""
        return self.num_unreached(pool, (num_tokens - 1) // pool.block_size * pool.block_size)

    def blocks(self, first: int, stop: int, least: int = 0) -> list[tuple[int, int]]:
        """Return the blocks [first, stop) that it has, from `least` on, as (index - first, id)."""
        return [(index - first, self.ids[index]) for index in range(max(first, self.num_dropped, least), stop)]

    def prompt_blocks(
        self, pool: Pool, first: int, stop: int, num_tokens: int, *, multi_turn: bool
    ) -> list[tuple[int, int]]:
        """Return those that tokens behind a prompt of `num_tokens` reach, or tokens behind its last full block.

        And, if another turn may follow, those that others may find.
        """
        return self._worth_storing(first, stop, self.num_unneeded(pool, num_tokens), keeps=multi_turn)

    def _worth_storing(self, first: int, stop: int, least: int, *, keeps: bool) -> list[tuple[int, int]]:
        """Return the blocks [first, stop) from `least` on, and those that are kept behind messages, if wanted."""
        return [
            one
            for one in self.blocks(first, stop)
            if first + one[0] >= least or (keeps and first + one[0] in self.kept)
        ]

    def answer_blocks(
        self, pool: Pool, first: int, stop: int, num_initial: int, *, is_end: bool
    ) -> list[tuple[int, int]]:
        """Return those that another turn may need. `is_end`: the answer is complete, and no later block of it is full."""
        return self._worth_storing(first, stop, self.num_unneeded(pool, num_initial), keeps=True)

    def lacks(self, pool: Pool, num_tokens: int) -> bool:
        """Return whether it has dropped blocks that the token behind the first `num_tokens` reaches."""
        return self.num_unreached(pool, num_tokens) < self.num_dropped

    def drops_soon(self, pool: Pool, first: int, num_initial: int, num_tokens: int) -> bool:
        """Return whether no token behind the first `num_tokens` reaches one of the prompt's blocks from `first` on."""
        first, stop = max(first, self.num_dropped), self.num_unreached(pool, num_tokens)
        return stop > max(first, self.num_unneeded(pool, num_initial)) or any(first <= at < stop for at in self.kept)

    def drop(self, pool: Pool, num_tokens: int) -> None:
        """Release what no token behind the first `num_tokens` reaches. It is evicted before all else, unless it is kept."""
        stop = self.num_unreached(pool, num_tokens)
        if self.num_dropped < stop <= len(self.ids):
            first, kept = self.num_dropped, self.kept
            for keeps in (True, False) if kept else (False,):
                blocks = [self.ids[index] for index in range(first, stop) if (index in kept) == keeps]
                pool.release(blocks, goes_first=not keeps)
            self.num_dropped = stop

    def to_swap(self, pool: Pool, num_tokens: int, stop: int) -> tuple[int, list[int]]:
        """Return the first block to be copied to host memory, and those up to `stop`, of a sequence with `num_tokens`."""
        return self.num_dropped, self.ids[self.num_dropped : stop].tolist()

    def to_restore(self, first: int, stop: int) -> list[int]:
        """Return the blocks [first, stop) into which those in host memory are copied."""
        return self.ids[first:stop].tolist()

    def take(self, pool: Pool) -> int:
        """Return a block that it has not used: a spare one, or the first of another page."""
        if not self.spare:
            self.spare += pool.allocate(1, self.at)
        return self.spare.pop(0)


@dataclass(eq=False)
class StateTable(Table):
    """The states of a sequence: the block of a number of tokens has the state behind its last token.

    The block of the newest state becomes that of the next one, and its old place a gap. Blocks of other states are kept.

    Attributes:
        first_kept: index of the last block that a repeated prompt may hit. From there on, all are kept.
    """

    first_kept: int = 0

    @classmethod
    def of(cls, pool: Pool, at: int, ids: BlockTable, num_dropped: int, tokens: Tokens) -> "StateTable":
        """Return the table of a sequence that goes on from `ids`. The last of its tokens is computed in any case."""
        kept = frozenset(end - 1 for end in _message_ends(pool, at, tokens))
        return cls(at, ids, num_dropped, kept=kept, first_kept=_last_hit(tokens, pool.block_size))

    @property
    def held_blocks(self) -> list[int]:
        return [block for block in super().held_blocks if block != GAP]

    def is_copied(self, pool: Pool, index: int, num_registered: int) -> bool:
        has_block = index < len(self.ids) and self.ids[index] != GAP
        return index < num_registered or (has_block and pool.refs[self.ids[index]] > 1)

    def keeps(self, index: int) -> bool:
        return index >= self.num_dropped and self.ids[index] != GAP and self._stays(index)

    def _stays(self, index: int) -> bool:
        return index >= self.first_kept or index in self.kept

    def _moves(self, pool: Pool) -> bool:
        """Return whether the last block moves along."""
        last = len(self.ids) - 1
        if last < self.num_dropped or self._stays(last):
            return False
        return pool.refs[self.ids[last]] == 1 and not pool.has_key(self.ids[last])

    def num_new(self, pool: Pool, stop: int) -> int:
        first = max(len(self.ids), self.num_dropped)
        if stop <= first:
            return 0
        num_staying = sum(first <= index < min(stop - 1, self.first_kept) for index in self.kept)
        num_staying += max(0, stop - 1 - max(first, self.first_kept))
        return num_staying + 1 - self._moves(pool)

    def extend(self, pool: Pool, stop: int) -> None:
        self.ids.extend([GAP] * (min(stop, self.num_dropped) - len(self.ids)))
        while (index := len(self.ids)) < stop:
            if self._moves(pool):
                self.ids.append(self.ids[-1])
                self.ids[index - 1] = GAP
            else:
                self.ids.append(self.take(pool))

    def blocks(self, first: int, stop: int, least: int = 0) -> list[tuple[int, int]]:
        return [(place, block) for place, block in super().blocks(first, stop, least) if block != GAP]

    def prompt_blocks(
        self, pool: Pool, first: int, stop: int, num_tokens: int, *, multi_turn: bool
    ) -> list[tuple[int, int]]:
        """Return the state behind the prompt and, if another turn may follow, those that others may find."""
        last = self.num_unreached(pool, num_tokens)
        blocks = self.blocks(first, stop)
        return [one for one in blocks if first + one[0] >= last or (multi_turn and self._stays(first + one[0]))]

    def answer_blocks(
        self, pool: Pool, first: int, stop: int, num_initial: int, *, is_end: bool
    ) -> list[tuple[int, int]]:
        """Return the state behind the last full block, at the end, and those behind messages of the prompt."""
        return self._worth_storing(first, stop, stop - 1 if is_end else stop, keeps=True)

    def lacks(self, pool: Pool, num_tokens: int) -> bool:
        reached = self.num_unreached(pool, num_tokens)
        return reached < self.num_dropped or (num_tokens > 0 and self.ids[reached] == GAP)

    def drops_soon(self, pool: Pool, first: int, num_initial: int, num_tokens: int) -> bool:
        first, stop = max(first, self.num_dropped), num_tokens // pool.block_size - 1
        return any(first <= at < stop and self.ids[at] != GAP for at in self.kept)

    def drop(self, pool: Pool, num_tokens: int) -> None:
        """Release the states before that of the last full block, which another turn may need.

        Those of an answer are evicted before all else.
        """
        stop = num_tokens // pool.block_size - 1
        if self.num_dropped < stop <= len(self.ids):
            for index, block in enumerate(self.ids[self.num_dropped : stop], self.num_dropped):
                if block != GAP:
                    pool.release([block], goes_first=index > self.first_kept)
            self.num_dropped = stop

    def to_swap(self, pool: Pool, num_tokens: int, stop: int) -> tuple[int, list[int]]:
        """Return the state behind the last of `num_tokens`."""
        reached = self.num_unreached(pool, num_tokens)
        return reached, self.to_restore(reached, stop)[:1]

    def to_restore(self, first: int, stop: int) -> list[int]:
        return [block for block in self.ids[first:] if block != GAP]


def _last_hit(tokens: Tokens, block_size: int) -> int:
    """Return the index of the last block that may be a hit: the last token is computed in any case."""
    return max(0, (len(tokens) - 1) // block_size - 1)


def _message_ends(pool: Pool, at: int, tokens: Tokens) -> list[int]:
    """Return of how many blocks of tokens a group keeps what the next token needs: those that end messages.

    They are no closer together than that is worth in blocks of the first group, but for the last one that is not right
    before the prompt's end.
    """
    size, group, last, ends = pool.block_size, pool.groups[at], _last_hit(tokens, pool.block_size), set[int]()
    for token in pool.message_ends:
        place = -1
        while (place := _index(tokens, token, place + 1)) >= 0 and place < last * size:
            ends.add((place + 1) // size)
    least = max(1, (group.window or 0) // size) * pool.groups[0].per_page // group.per_page
    found, newest = list[int](), max((end for end in ends if end < last - 1), default=0)
    for end in sorted(ends - {0}):
        if not found or end - found[-1] >= least or end == newest:
            found.append(end)
    return found


def _index(tokens: Tokens, token: int, start: int) -> int:
    """Return the index of a token from `start` on; -1: it is not there."""
    try:
        return tokens.index(token, start)
    except ValueError:
        return -1


class Tails(list[Table]):
    """The blocks of a sequence in all groups but the first, whose windows are shorter. Empty while it has no blocks."""

    def blocks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the blocks [first, stop), as far as it has them, as (index - first, id)."""
        return [block for table in self for block in table.blocks(first, stop)]

    def prompt_blocks(
        self, pool: Pool, first: int, stop: int, num_tokens: int, *, multi_turn: bool
    ) -> list[tuple[int, int]]:
        """Return those of a prompt that others load, see `Table.prompt_blocks`."""
        tables = (table.prompt_blocks(pool, first, stop, num_tokens, multi_turn=multi_turn) for table in self)
        return [block for blocks in tables for block in blocks]

    def answer_blocks(
        self, pool: Pool, first: int, stop: int, num_initial: int, *, is_end: bool
    ) -> list[tuple[int, int]]:
        """Return those of prompt and answer that another turn loads, see `Table.answer_blocks`."""
        tables = (table.answer_blocks(pool, first, stop, num_initial, is_end=is_end) for table in self)
        return [block for blocks in tables for block in blocks]

    def lack(self, pool: Pool, num_tokens: int) -> bool:
        """Return whether it has dropped blocks that the token behind the first `num_tokens` reaches."""
        return any(table.lacks(pool, num_tokens) for table in self)

    def drop_soon(self, pool: Pool, first: int, num_initial: int, num_tokens: int) -> bool:
        """Return whether no token behind the first `num_tokens` reaches one of the prompt's blocks from `first` on."""
        return any(table.drops_soon(pool, first, num_initial, num_tokens) for table in self)

    def drop(self, pool: Pool, num_tokens: int) -> None:
        """Release what no token behind the first `num_tokens` reaches. It is evicted before all else."""
        for table in self:
            table.drop(pool, num_tokens)

    def shared(self, pool: Pool, stop: int) -> "Tails":
        """Return the first `stop` blocks, if that is any, as those of another sequence, which holds them too."""
        return Tails(table.shared(pool, stop) for table in self if stop)

    def take_hits(self, pool: Pool, keys: Sequence[bytes], num_tokens: int, tokens: Tokens) -> None:
        """Take over references to the blocks of `keys` that the token behind the first `num_tokens` of `tokens` reaches."""
        for at, group in [*enumerate(pool.groups)][1:]:
            reached = group.num_unreached(num_tokens, pool.block_size)
            found = pool.match_tail(at, keys[reached:])
            pool.hold(found)
            ids = array("q", [group.void] * min(reached, len(keys)) + found)
            self.append((StateTable if group.is_states else Table).of(pool, at, ids, reached, tokens))


def stored_tails(pool: Pool, tokens: Tokens, *, multi_turn: bool) -> list[tuple[int, int]]:
    """Return what is stored of further groups of a prompt that is computed from its start: (index, an id of the group)."""
    stop, found = -(-len(tokens) // pool.block_size), list[tuple[int, int]]()
    for at, group in [*enumerate(pool.groups)][1:]:
        ids = array("q", [group.first_id] * stop)
        table = (StateTable if group.is_states else Table).of(pool, at, ids, 0, tokens)
        found += table.prompt_blocks(pool, 0, stop, len(tokens), multi_turn=multi_turn)
    return found


@dataclass(frozen=True)
class SwappedKV:
    """Copy in host memory of a preempted sequence's KV.

    Attributes:
        first_block: index in the sequence of the first block that was copied.
        num_tokens: leading tokens of the sequence that have KV.
        host_blocks: block ids in the host pool, of the sequence's blocks from `first_block` on.
        tails: the same of its further groups, each with the index of its first block.
    """

    first_block: int
    num_tokens: int
    host_blocks: list[int]
    tails: list[tuple[int, list[int]]] = field(default_factory=list)


def extend(pool: Pool, tables: Sequence[Table], stop: int) -> int:
    """Let tables have `stop` blocks each. Return how many pages that took."""
    num_free = pool.num_free
    for table in tables:
        table.extend(pool, stop)
    return num_free - pool.num_free


def num_pages(pool: Pool, tables: Sequence[Table], stop: int, index: int = 0, num_registered: int | None = None) -> int:
    """Return how many pages it takes that tables have `stop` blocks each.

    Args:
        index, num_registered: copies of shared blocks count, too: see `Table.is_copied`.
    """
    total = 0
    for table in tables:
        count = table.num_new(pool, stop)
        count += num_registered is not None and table.is_copied(pool, index, num_registered)
        total += -(-max(0, count - len(table.spare)) // pool.groups[table.at].per_page)
    return total


def copy_on_write(pool: Pool, tables: Sequence[Table], index: int, num_registered: int) -> list[tuple[int, int]]:
    """Replace the blocks `index` that others read or may find. Return which blocks are to be copied, and to where."""
    pairs = list[tuple[int, int]]()
    for table in tables:
        if table.is_copied(pool, index, num_registered):
            source, target = table.ids[index], table.take(pool)
            pool.release([source])
            table.ids[index] = target
            pairs.append((source, target))
    return pairs


def num_usable(
    groups: Sequence[Group],
    found: Sequence[dict[bytes, int]],
    keys: Sequence[bytes],
    block_size: int,
    first: int = 0,
    num_coming: int = 0,
) -> int:
    """Return of how many leading `keys` all groups but the first have the blocks that the tokens behind them reach.

    Args:
        found: of each group, its blocks by key.
        first: index in the sequence of the first key's block.
        num_coming: leading tokens that nobody computes here: only what tokens behind these reach is needed.
    """
    usable, starts = 0, [0] * len(groups)
    least = [group.num_unreached(num_coming, block_size) for group in groups]
    for i, key in enumerate(keys):
        is_usable = True
        for at in range(1, len(groups)):
            if key not in found[at]:
                starts[at] = i + 1
            reached = max(least[at], groups[at].num_unreached((first + i + 1) * block_size, block_size))
            is_usable &= first + starts[at] <= reached
        usable = i + 1 if is_usable else usable
    return usable
