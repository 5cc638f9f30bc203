"""Groups of blocks: what a pool holds and a hand-over moves where most layers have a window, and how memory is shared."""

import random
from collections.abc import Sequence as TokenIds
from typing import Any

import pytest

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import Group, Table, Tails, blocks_in, num_pages, num_usable, pages_for
from pdserve.engine.memory.kv_memory import page_numbers, pool_groups
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import Layout, token_array
from pdserve.kv_spec import KVGroup, KVSpec
from pdserve.request import SamplingParams

B = 16
FORMAT: dict[str, Any] = {"model_fingerprint": "m", "block_size": B, "dtype": "bfloat16", "itemsize": 2}


def layout_of(num_layers: int, every: int, heads: int, size: int, window: int) -> Layout:
    """Return the layout of a model of which each `every`-th layer attends to all tokens, and the others have a window."""
    full = tuple(range(every - 1, num_layers, every))
    others = tuple(layer for layer in range(num_layers) if layer not in full)
    return KVSpec((KVGroup(full, heads, size), KVGroup(others, heads, size, window=window))).layout(**FORMAT)


def scheduler_of(pool: BlockPool) -> Scheduler:
    return Scheduler(pool, max_num_seqs=1000, max_num_batched_tokens=1024)


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence.new(
        str(number), token_array(tokens), len(tokens), len(tokens), SamplingParams(max_tokens=50), b"", B
    )


SHAPES = {
    "gemma-3, 26 layers": (layout_of(26, 6, 1, 256, 512), 0.28, 3.4),
    "gemma-3, 48 layers": (layout_of(48, 6, 8, 256, 512), 0.28, 3.4),
    "gemma-3, 62 layers": (layout_of(62, 6, 16, 128, 512), 0.28, 3.4),
    "gpt-oss, 24 layers": (layout_of(24, 2, 8, 64, 128), 0.53, 1.85),
    "gpt-oss, 36 layers": (layout_of(36, 2, 8, 64, 128), 0.53, 1.85),
}


@pytest.mark.parametrize(("layout", "most_bytes", "least_seqs"), SHAPES.values(), ids=SHAPES)
def test_decode_holds_and_loads_of_4096_tokens_what_the_windows_reach(
    layout: Layout, most_bytes: float, least_seqs: float
) -> None:
    """Against a pool of as many bytes in which all layers keep everything."""
    num_tokens, num_full = 4096, 20
    num_pages = num_full * pages_for(num_tokens // B + 1, pool_groups(layout, 0))
    pool = BlockPool(num_pages, B, pool_groups(layout, num_pages))
    scheduler, seqs = scheduler_of(pool), list[Sequence]()
    while True:
        seq = sequence(len(seqs), [len(seqs)] * num_tokens)
        if not scheduler.reserve(seq, 0, num_tokens + 1, num_coming=num_tokens - 1):
            break
        seqs.append(seq)
    num_bytes = num_pages * page_numbers(layout) * layout.itemsize
    assert len(seqs) >= least_seqs * (num_bytes // (layout.block_bytes * (num_tokens // B + 1)))
    blocks, tails = seqs[0].kv.blocks(0, num_tokens // B), seqs[0].kv.tails.blocks(0, num_tokens // B)
    moved = len(blocks) * layout.groups[0].block_bytes + len(tails) * layout.groups[1].block_bytes
    assert moved <= most_bytes * (num_tokens // B) * layout.block_bytes
    assert len(tails) == layout.groups[1].window // B, "the blocks that the last prompt token reaches"
    pool.check_integrity()


@pytest.mark.parametrize("layout", [layout for layout, *_ in SHAPES.values()], ids=SHAPES)
def test_a_pool_of_so_many_blocks_holds_them_of_all_groups(layout: Layout) -> None:
    groups = pool_groups(layout, 0)
    for count in (2, 3, 7, 24, 100):
        pages = pages_for(count, groups)
        assert blocks_in(pages, groups) >= count and pages_for(blocks_in(pages, groups), groups) <= pages


def test_memory_moves_between_groups() -> None:
    groups = [Group(None, 3, 0), Group(32, 1, 30)]
    pool = BlockPool(10, B, groups)
    full = pool.allocate(10)
    assert len(full) == 30 and not pool.num_free
    pool.release(full)
    window = pool.allocate(10, 1)
    assert sorted(window) == [*range(30, 40)]
    pool.release([*range(30, 34)])
    assert sorted(pool.allocate(4)) == [*range(12)]
    pool.check_integrity()


@pytest.mark.parametrize(
    ("missing", "num_coming", "expected"),
    [
        ([], 0, 10),
        ([6], 0, 10),
        ([7], 0, 7),
        ([8], 0, 8),
        ([*range(7)], 0, 10),
        ([*range(8)], 0, 0),
        ([*range(10)], 0, 0),
        ([*range(7)], 175, 10),
        ([*range(8)], 175, 10),
        ([8], 175, 8),
        ([*range(8, 10)], 175, 8),
        ([*range(10)], 208, 10),
    ],
)
def test_a_hit_needs_the_blocks_that_the_next_token_reaches(missing: list[int], num_coming: int, expected: int) -> None:
    """The window of 48 tokens of token 160 begins at token 113, in block 7; that of 175 in block 8, and of 208 in 10."""
    groups, keys = [Group(None, 1, 0), Group(48, 1, 100)], [bytes([i]) for i in range(10)]
    found = [{key: i for i, key in enumerate(keys)}, {key: i for i, key in enumerate(keys) if i not in missing}]
    assert num_usable(groups, found, keys, B, num_coming=num_coming) == expected


def test_what_no_running_token_reaches_is_evicted_first() -> None:
    """Before an older prompt; the end of a window goes last, since hits need that."""
    pool = BlockPool(30, B, [Group(None, 1, 0), Group(3 * B, 1, 30)])
    scheduler, old, seq = scheduler_of(pool), sequence(0, [7] * 33), sequence(1, [*range(160)])
    for one, count in ((old, 32), (seq, 80)):
        assert scheduler.reserve(one, 0, len(one))
        one.kv.mark_computed(count)
        one.kv.register_full_blocks(pool)
        if one is old:
            old.kv.release_blocks(pool)
    seq.kv.tails.drop(pool, 80)
    assert [tail.num_dropped for tail in seq.kv.tails] == [2], "token 80 reaches 33"
    num_unused = pool.num_free - 4 - 2
    pool.release(pool.allocate(num_unused + 2))
    assert len(pool.match(old.kv.full_keys())) == 2 and len(pool.match(seq.kv.full_keys())) == 5
    seq.kv.mark_computed(79)
    seq.kv.register_full_blocks(pool)
    keys = seq.kv.full_keys()[:9]
    seq.kv.release_blocks(pool)
    pool.allocate(pool.num_free - 9 - 7)  # all but nine blocks of all tokens, and seven of the window
    assert not pool.match(old.kv.full_keys()) and len(pool.match(keys)) == 9
    pool.allocate(4)
    assert len(pool.match(keys)) == 5 and len(pool.match_tail(1, keys[6:])) == 3
    pool.check_integrity()


@pytest.mark.parametrize("window", [1, 16, 33, 34, 48])
def test_windows_reach_back_to_their_first_token(window: int) -> None:
    """Token `n` reaches the `window` tokens up to itself; a prompt's last blocks must serve its last token and its prefix."""
    group, pool = Group(window, 1, 200), BlockPool(200, B, [Group(None, 1, 0), Group(window, 1, 200)])
    table = Table(1, block_table(), 0)

    def unreached_by(token: int) -> int:
        return max(0, token - window + 1) // B

    for num_tokens in range(1, 160):
        assert group.num_unreached(num_tokens, B) == unreached_by(num_tokens)
        behind_last_hit = (num_tokens - 1) // B * B  # the last token is computed in any case
        needed = min(unreached_by(num_tokens - 1), unreached_by(behind_last_hit))
        assert table.num_unneeded(pool, num_tokens) == needed


def test_what_a_sequence_has_dropped_and_will_drop() -> None:
    """Of a prompt of 100 tokens with a window of 34, blocks from 3 on are worth storing, and the first goes at token 97."""
    pool = BlockPool(200, B, [Group(None, 1, 0), Group(34, 1, 200)])
    tails = Tails([Table(1, block_table(range(200, 210)), 2)])
    assert tails.lack(pool, 64) and not tails.lack(pool, 65)
    assert [tails.drop_soon(pool, 0, 100, at) for at in (96, 97)] == [False, True]
    assert not tails.drop_soon(pool, 4, 100, 97)


def test_blocks_of_a_page_that_are_left_take_no_page() -> None:
    pool, table = BlockPool(10, B, [Group(None, 3, 0), Group(32, 1, 30)]), Table(0, block_table([0]), 0, [1, 2])
    assert [num_pages(pool, [table], stop) for stop in (1, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


class Keys:
    """A listener of the pool."""

    def __init__(self) -> None:
        self.removed: list[tuple[bytes, int]] = []

    def store(self, key: bytes, parent: bytes | None, tokens: TokenIds[int], group: int = 0) -> None: ...

    def remove(self, key: bytes, group: int = 0) -> None:
        self.removed.append((key, group))


def test_pins_keep_all_groups_and_listeners_hear_of_them() -> None:
    pool, listener = BlockPool(40, B, [Group(None, 1, 0), Group(3 * B, 1, 40)]), Keys()
    pool.listeners.append(listener)
    scheduler, pinned, other = scheduler_of(pool), sequence(0, [7] * 80), sequence(1, [9] * 80)
    for seq in (pinned, other):
        assert scheduler.reserve(seq, 0, 80)
        seq.kv.mark_computed(80)
        seq.kv.register_full_blocks(pool)
        seq.kv.release_blocks(pool)
    pool.pin(pinned.kv.full_keys())
    pool.allocate(pool.num_free)
    assert len(pool.match(pinned.kv.full_keys())) == 5 and not pool.match(other.kv.full_keys())
    unreached = [(key, 1) for key in pinned.kv.full_keys()[:2]]
    assert sorted(listener.removed) == sorted(
        [*unreached, *((key, at) for key in other.kv.full_keys() for at in (0, 1))]
    )


def test_a_reservation_leaves_the_pages_of_a_waiting_sequence() -> None:
    """It waits for 20 of 30 pages, ten blocks of each group."""
    pool = BlockPool(30, B, [Group(None, 1, 0), Group(64 * B, 1, 30)])
    scheduler = scheduler_of(pool)
    scheduler.add(sequence(0, [2] * 160))
    assert not scheduler.reserve(sequence(1, [1] * 81), 0, 81, respect_queue=True) and not pool.num_held
    assert scheduler.reserve(sequence(2, [1] * 80), 0, 80, respect_queue=True)


@pytest.mark.parametrize("seed", range(8))
def test_random_sequences(seed: int) -> None:
    """Prompts that share prefixes are reserved, computed in chunks, forked, preempted and ended in a small pool."""
    drawn = random.Random(seed)
    per_page = drawn.choice([(1, 1), (3, 1), (2, 5)])
    num_pages = 60
    groups = [Group(None, per_page[0], 0), Group(40, per_page[1], num_pages * per_page[0])]
    pool, live = BlockPool(num_pages, B, groups), list[Sequence]()
    scheduler, written = scheduler_of(pool), dict[int, bytes]()
    for number in range(400):
        action = drawn.choice(["new", "new", "compute", "compute", "compute", "fork", "share", "end"])
        seq = drawn.choice(live) if live else None
        if action == "new" or seq is None:
            tokens = [drawn.randrange(2)] * drawn.randrange(1, 150) + [number] * drawn.randrange(40)
            seq = sequence(number, tokens)
            if scheduler.reserve(seq, (len(tokens) - 1) // B, len(tokens), num_now=drawn.choice([None, 1])):
                live.append(seq)
                check_hits(seq, pool, written)
        elif action == "compute":
            compute(seq, pool, drawn.randrange(1, 40), written)
        elif action == "fork" and seq.kv.num_computed and not seq.kv.num_promised:
            live.append(seq.fork(pool, "fork", SamplingParams(), ()))
        elif action == "end":
            live.remove(seq)
            seq.kv.release_blocks(pool)
        pool.check_integrity()
    for seq in live:
        seq.kv.release_blocks(pool)
    assert pool.num_held == pool.num_promised == 0


def check_hits(seq: Sequence, pool: BlockPool, written: dict[int, bytes]) -> None:
    """Check that each block that a sequence has found was written with its tokens, and none is missing."""
    kv = seq.kv
    keys, count = kv.full_keys(), kv.num_registered
    assert [written[block] for block in kv.blocks(0, count)] == keys[:count]
    for tail in kv.tails:
        assert tail.num_dropped <= max(0, count * B + 1 - 40) // B
        assert [written[block] for block in tail.ids[tail.num_dropped : count]] == keys[tail.num_dropped : count]


def compute(seq: Sequence, pool: BlockPool, count: int, written: dict[int, bytes]) -> None:
    """Compute some tokens of a sequence as a step would, as far as there is room."""
    kv = seq.kv
    kv.tails.drop(pool, kv.num_computed)
    count = min(count, kv.num_uncomputed)
    if kv.num_promised:
        count = kv.take_promised(pool, count)
    elif kv.blocks_needed(pool) <= pool.num_free:
        for source, target in kv.take_room(pool):
            assert pool.refs[target] == 1
            written[target] = written.get(source, b"")
    else:
        return
    if count <= 0:
        return
    tables = [kv.block_ids, *(tail.ids for tail in kv.tails)]
    for index in range(kv.num_computed // B, -(-(kv.num_computed + count) // B)):
        key = seq.kv.prefix_keys([min(len(seq), (index + 1) * B)])[0]
        for table in tables:
            assert pool.refs[table[index]] == 1, "nobody else reads what is written"
            written[table[index]] = key
    kv.mark_computed(count)
    kv.register_full_blocks(pool)
