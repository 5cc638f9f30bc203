"""Groups of blocks: what a sequence has in a pool of several groups, each with a table of its own. Plain data.

Layers of one window are a group; the group of the longest window is the first one, whose table is `SequenceKV.block_ids`.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

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

    def num_unreached(self, num_tokens: int, block_size: int) -> int:
        """Return how many leading blocks lie outside the windows of all tokens behind the first `num_tokens`."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window) // block_size


ONE_GROUP = (Group(),)


def pages_for(num_blocks: int, groups: Sequence[Group]) -> int:
    """Return how many pages so many blocks of each group take."""
    return sum(-(-num_blocks // group.per_page) for group in groups)


def blocks_in(num_pages: int, groups: Sequence[Group]) -> int:
    """Return how many blocks of each group fit into so many pages."""
    whole = math.lcm(*(group.per_page for group in groups))
    count = num_pages * whole // sum(whole // group.per_page for group in groups)
    while pages_for(count, groups) > num_pages:
        count -= 1
    return count


class Pool(Protocol):
    """What tables need of `BlockPool`."""

    block_size: int
    groups: Sequence[Group]
    refs: list[int]

    @property
    def num_free(self) -> int: ...

    def hold(self, blocks: Sequence[int]) -> None: ...

    def allocate(self, count: int, at: int = 0) -> list[int]: ...

    def release(self, blocks: Sequence[int], *, goes_first: bool = False) -> None: ...

    def match_tail(self, at: int, keys: Sequence[bytes]) -> list[int]: ...


@dataclass(eq=False)
class Table:
    """The blocks of a sequence in one group.

    Attributes:
        at: the group's index.
        ids: one per block of tokens. Those before `num_dropped` are void.
        num_dropped: leading blocks that no later token reaches.
        spare: further blocks of its pages.
    """

    at: int
    ids: BlockTable
    num_dropped: int
    spare: list[int] = field(default_factory=list)

    @property
    def held_blocks(self) -> list[int]:
        """Ids of the blocks to which the sequence holds a reference."""
        return [*self.ids[self.num_dropped :], *self.spare]

    def is_copied(self, pool: Pool, index: int, num_registered: int) -> bool:
        """Return whether others read block `index`, to which a token is about to be written, or may find it by its key."""
        return index < num_registered or (index < len(self.ids) and pool.refs[self.ids[index]] > 1)

    def shared(self, pool: Pool, stop: int) -> "Table":
        """Return the first `stop` blocks as those of another sequence, which holds them too."""
        other = Table(self.at, self.ids[:stop], min(self.num_dropped, stop))
        pool.hold(other.held_blocks)
        return other

    def num_unreached(self, pool: Pool, num_tokens: int) -> int:
        """Return how many leading blocks no token behind the first `num_tokens` reaches."""
        return pool.groups[self.at].num_unreached(num_tokens, pool.block_size)

    def num_unneeded(self, pool: Pool, num_tokens: int) -> int:
        """Return how many leading blocks neither the last of `num_tokens` tokens nor one behind their full blocks reaches."""
        return self.num_unreached(pool, min(num_tokens - 1, num_tokens // pool.block_size * pool.block_size))

    def blocks(self, first: int, stop: int, least: int = 0) -> list[tuple[int, int]]:
        """Return the blocks [first, stop) that it has, from `least` on, as (index - first, id)."""
        return [(index - first, self.ids[index]) for index in range(max(first, self.num_dropped, least), stop)]

    def drop(self, pool: Pool, num_tokens: int) -> None:
        """Release what no token behind the first `num_tokens` reaches. It is evicted before all else."""
        stop = self.num_unreached(pool, num_tokens)
        if self.num_dropped < stop <= len(self.ids):
            pool.release(self.ids[self.num_dropped : stop].tolist(), goes_first=True)
            self.num_dropped = stop

    def take(self, pool: Pool) -> int:
        """Return a block that it has not used: a spare one, or the first of another page."""
        if not self.spare:
            self.spare += pool.allocate(1, self.at)
        return self.spare.pop(0)


class Tails(list[Table]):
    """The blocks of a sequence in all groups but the first, whose windows are shorter. Empty while it has no blocks."""

    def blocks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the blocks [first, stop), as far as it has them, as (index - first, id)."""
        return [block for table in self for block in table.blocks(first, stop)]

    def prompt_blocks(self, pool: Pool, first: int, stop: int, num_tokens: int) -> list[tuple[int, int]]:
        """Return those that tokens behind a prompt of `num_tokens` reach, or tokens behind its last full block."""
        return [block for table in self for block in table.blocks(first, stop, table.num_unneeded(pool, num_tokens))]

    def lack(self, pool: Pool, num_tokens: int) -> bool:
        """Return whether it has dropped blocks that the token behind the first `num_tokens` reaches."""
        return any(table.num_unreached(pool, num_tokens) < table.num_dropped for table in self)

    def drop_soon(self, pool: Pool, first: int, num_initial: int, num_tokens: int) -> bool:
        """Return whether no token behind the first `num_tokens` reaches one of the prompt's blocks from `first` on."""
        return any(
            table.num_unreached(pool, num_tokens) > max(first, table.num_dropped, table.num_unneeded(pool, num_initial))
            for table in self
        )

    def drop(self, pool: Pool, num_tokens: int) -> None:
        """Release what no token behind the first `num_tokens` reaches. It is evicted before all else."""
        for table in self:
            table.drop(pool, num_tokens)

    def shared(self, pool: Pool, stop: int) -> "Tails":
        """Return the first `stop` blocks, if that is any, as those of another sequence, which holds them too."""
        return Tails(table.shared(pool, stop) for table in self if stop)

    def take_hits(self, pool: Pool, keys: Sequence[bytes], num_tokens: int) -> None:
        """Take over references to the blocks of `keys` that the token behind the first `num_tokens` reaches."""
        for at, group in [*enumerate(pool.groups)][1:]:
            reached = group.num_unreached(num_tokens, pool.block_size)
            found = pool.match_tail(at, keys[reached:])
            pool.hold(found)
            self.append(Table(at, array("q", [group.first_id] * min(reached, len(keys)) + found), reached))


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
        void = min(stop, table.num_dropped) - len(table.ids)
        table.ids.extend([pool.groups[table.at].first_id] * void)
        table.ids.extend([table.take(pool) for _ in range(stop - len(table.ids))])
    return num_free - pool.num_free


def num_pages(pool: Pool, tables: Sequence[Table], stop: int, index: int = 0, num_registered: int | None = None) -> int:
    """Return how many pages it takes that tables have `stop` blocks each.

    Args:
        index, num_registered: copies of shared blocks count, too: see `Table.is_copied`.
    """
    total = 0
    for table in tables:
        count = max(0, stop - max(len(table.ids), table.num_dropped))
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
