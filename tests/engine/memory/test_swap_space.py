"""Swap space: when it is used, and which blocks are copied."""

import pytest

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import Group, Table, Tails
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.memory.swap_space import SwapSpace
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams

COSTS = Costs(prefill=(0.0, 1e-3, 0.0), swap=(0.0, 1e-3))  # a token takes as long to compute as a block to copy
BLOCK = 4


def computed(pool: BlockPool, tokens: int) -> Sequence:
    seq = Sequence.new("r", token_array(range(tokens)), tokens, tokens, SamplingParams(), b"root", BLOCK)
    seq.kv.take_blocks(0, [], pool.allocate(pool.blocks_for(tokens)))
    seq.kv.mark_computed(tokens)
    return seq


@pytest.mark.parametrize(("num_host", "blocks", "pays"), [(3, 3, True), (2, 3, False), (3, 0, False), (20, 7, False)])
def test_it_pays_if_the_blocks_fit_and_copying_both_ways_is_faster(num_host: int, blocks: int, pays: bool) -> None:
    seq = computed(BlockPool(8, BLOCK), 12)
    assert SwapSpace(BlockPool(num_host, BLOCK)).pays(seq, blocks, COSTS) == pays
    assert not SwapSpace(None).pays(seq, blocks, COSTS)


def test_blocks_that_the_pool_still_has_are_not_copied_back() -> None:
    pool, host = BlockPool(8, BLOCK), BlockPool(4, BLOCK)
    space, seq = SwapSpace(host), computed(pool, 10)
    seq.kv.register_full_blocks(pool)
    held, keys = seq.kv.held_blocks, seq.kv.full_keys()
    swapped, out = space.swap_out(seq, 3)
    assert [block for block, _ in out] == held and host.num_held == 3
    seq.preempt(pool, swapped, is_stored=True)
    assert seq.kv.num_computed == 0 and not seq.kv.needs_refetch
    hits = pool.match(keys[:1])
    pool.hold(hits)
    seq.kv.take_blocks(0, hits, pool.allocate(2))
    back = space.swap_in(seq)
    assert back == list(zip(seq.kv.held_blocks[1:], swapped.host_blocks[1:], strict=True))
    assert seq.kv.num_computed == 10 and seq.kv.swapped is None and host.num_held == 0


def test_blocks_of_further_groups_that_the_pool_still_has_are_not_copied_back() -> None:
    groups = [Group(None, 1, 0), Group(2 * BLOCK, 1, 8)]
    pool, host = BlockPool(8, BLOCK, groups), BlockPool(8, BLOCK, groups)
    space, seq = SwapSpace(host), computed(pool, 10)
    seq.kv.tails = Tails([Table(1, block_table(pool.allocate(3, 1)), 0)])
    seq.kv.register_full_blocks(pool)
    keys = seq.kv.full_keys()
    swapped, _ = space.swap_out(seq, 3)
    seq.preempt(pool, swapped, is_stored=True)
    hits = pool.match(keys[:1])
    pool.hold(hits)
    seq.kv.take_blocks(0, hits, pool.allocate(2))
    seq.kv.tails.take_hits(pool, keys[:1], BLOCK, seq.kv.tokens)
    (tail,) = seq.kv.tails
    tail.ids.extend(pool.allocate(2, 1))
    back = space.swap_in(seq)
    [(_, of_tail)] = swapped.tails
    expected = [*zip(seq.kv.block_ids[1:], swapped.host_blocks[1:], strict=True)]
    assert back == [*expected, *zip(tail.ids[1:], of_tail[1:], strict=True)]


def test_the_room_of_a_sequence_that_ends_is_released() -> None:
    pool, host = BlockPool(8, BLOCK), BlockPool(4, BLOCK)
    space, seq = SwapSpace(host), computed(pool, 8)
    swapped, _ = space.swap_out(seq, 2)
    seq.preempt(pool, swapped, is_stored=False)
    space.discard(seq)
    assert host.num_held == 0 and pool.num_held == 0 and seq.kv.swapped is None
