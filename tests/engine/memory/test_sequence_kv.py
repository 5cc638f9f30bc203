"""KV of a sequence: block keys, progress, and what is written to, shared or given up."""

import pytest

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import SwappedKV
from pdserve.engine.memory.sequence_kv import SequenceKV
from pdserve.keys import KeyChain, token_array

BLOCK = 4


def new_kv(prompt: int) -> SequenceKV:
    return SequenceKV(token_array(range(prompt)), BLOCK, prompt, KeyChain(b"root"))


def test_keys_cover_full_blocks_and_grow_with_the_tokens() -> None:
    kv = new_kv(10)
    first = list(kv.full_keys())
    assert len(first) == 2
    kv.tokens.extend([10, 11])
    assert kv.full_keys()[:2] == first and len(kv.full_keys()) == 3


def test_dropped_blocks_are_not_held() -> None:
    kv = new_kv(12)
    kv.take_blocks(1, [6], [7])
    assert kv.held_blocks == kv.blocks(1, 3) == [6, 7]
    with pytest.raises(AssertionError, match="was dropped"):
        kv.blocks(0, 2)


def loaded(num_tokens: int, prompt: int) -> tuple[BlockPool, SequenceKV]:
    """Return a sequence with blocks for its prompt and one more token, of which `num_tokens` have KV."""
    pool, kv = BlockPool(8, BLOCK), new_kv(prompt)
    kv.take_blocks(0, [], pool.allocate(pool.blocks_for(prompt + 1)))
    kv.mark_loaded(num_tokens)
    kv.register_full_blocks(pool)
    return pool, kv


def test_reopened_prompt_computes_its_last_token_again() -> None:
    pool, kv = loaded(6, prompt=6)
    kv.reopen_prompt()
    assert (kv.num_computed, kv.num_loaded, kv.num_registered, kv.num_uncomputed) == (5, 5, 1, 1)
    assert kv.copy_on_write(pool) == [] and pool.num_held == len(kv.block_ids) == 2


def test_reopened_prompt_copies_a_full_last_block_that_is_registered() -> None:
    """Another sequence may find it by its key and read it: it must not be written to."""
    pool, kv = loaded(8, prompt=8)
    first, full, spare = kv.block_ids
    kv.reopen_prompt()
    assert (kv.num_computed, kv.num_loaded, kv.num_uncomputed, kv.blocks_needed(pool)) == (7, 7, 1, 1)
    (copied,) = kv.copy_on_write(pool)
    assert copied == (full, kv.block_ids[1]) and full not in kv.block_ids and kv.num_registered == 1
    assert kv.copy_on_write(pool) == [] and pool.num_held == 3 and kv.block_ids[2] == spare
    kv.mark_computed(1)
    kv.register_full_blocks(pool)
    assert pool.match(kv.full_keys()) == [first, full]
    pool.check_integrity()


def test_reopened_prompt_computes_its_last_token_in_a_block_that_nobody_finds() -> None:
    pool, kv = BlockPool(8, BLOCK), new_kv(8)
    kv.take_blocks(0, [], pool.allocate(3))
    kv.mark_loaded(8)
    kv.reopen_prompt()
    kv.register_full_blocks(pool)
    assert kv.copy_on_write(pool) == [] and kv.num_registered == 1


def test_blocks_before_the_first_one_are_neither_held_nor_counted() -> None:
    pool, kv = BlockPool(8, BLOCK), new_kv(18)
    kv.take_blocks(2, pool.allocate(1), pool.allocate(2))
    assert (kv.num_computed, kv.num_registered, pool.num_held) == (12, 3, 3)
    kv.mark_loaded(18)
    assert (kv.num_unneeded, kv.num_local_hit, kv.num_loaded) == (8, 4, 6)
    kv.reopen_prompt()
    assert (kv.num_unneeded, kv.num_local_hit, kv.num_loaded) == (8, 4, 5)
    kv.register_full_blocks(pool)
    assert pool.match(kv.full_keys()[3:]) == kv.blocks(3, 4), "the hit, block 2, would be registered already"


def test_blocks_that_are_given_up_count_as_nothing() -> None:
    pool, kv = BlockPool(8, BLOCK), new_kv(18)
    kv.take_blocks(2, pool.allocate(1), pool.allocate(2))
    kv.give_up_blocks(pool)
    kv.mark_loaded(0)
    assert (kv.num_unneeded, kv.num_local_hit, kv.num_loaded) == (0, 0, 0)
    assert (kv.num_computed, kv.num_dropped, len(kv.block_ids), pool.num_held) == (0, 0, 0, 0)


def test_tokens_count_as_loaded_or_hit_only_at_first_admission() -> None:
    pool, kv = BlockPool(8, BLOCK), new_kv(12)
    (hit,) = pool.allocate(1)
    kv.take_blocks(0, [hit], pool.allocate(2))
    kv.mark_loaded(8)
    assert (kv.num_local_hit, kv.num_loaded, kv.num_computed) == (4, 4, 8)
    kv.preempt(pool, None, is_stored=True)
    assert kv.needs_refetch
    kv.end_refetch()
    assert not kv.needs_refetch
    kv.take_blocks(0, [], pool.allocate(3))
    kv.mark_loaded(12)
    assert (kv.num_local_hit, kv.num_loaded, kv.num_computed) == (4, 4, 12)


def test_uncacheable_blocks_are_not_registered() -> None:
    pool, kv = BlockPool(8, BLOCK), new_kv(8)
    kv.take_blocks(0, [], pool.allocate(2))
    kv.forbid_caching()
    kv.mark_computed(8)
    other = new_kv(8)
    other.share(kv, pool)
    for one in (kv, other):
        one.register_full_blocks(pool)
    assert pool.match(kv.full_keys()) == []


def test_a_fork_copies_only_what_it_writes_to_and_has_no_swapped_kv() -> None:
    pool, kv = loaded(6, prompt=6)
    kv.swapped = SwappedKV(0, 4, [1])
    fork = kv.fork(pool, kv.tokens[:])
    assert fork.swapped is None and fork.block_ids == kv.block_ids and fork.blocks_needed(pool) == 1
    (copied,) = fork.copy_on_write(pool)
    assert copied == (kv.block_ids[1], fork.block_ids[1]) and fork.block_ids[0] == kv.block_ids[0]
    assert fork.copy_on_write(pool) == []
    fork.release_blocks(pool)
    kv.release_blocks(pool)
    assert pool.num_held == 0
