"""Block pool: integrity under random operations, and order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.memory.blocks import BlockPool, NoFreeBlocks


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def test_eviction_takes_the_oldest_sequence_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate(first + second):
        pool.register(block, key(i))
    pool.release(second)
    pool.release(first)
    pool.allocate(1)
    assert pool.match([key(2), key(3)]) == second[:1], "the tail of the sequence released first is gone"
    assert pool.match([key(0), key(1)]) == first


def test_hit_is_shared_and_not_allocated_again() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.register(blocks[0], key(0))
    hits = pool.match([key(0), key(1)])
    assert hits == blocks[:1]
    pool.hold(hits)
    assert pool.num_shared == 1
    pool.release(blocks)
    assert pool.num_held == 1 and pool.num_shared == 0
    with pytest.raises(NoFreeBlocks, match="3 blocks requested, 2 of 3 free"):
        pool.allocate(3)
    pool.check_integrity()


def test_releasing_more_often_than_holding_fails() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_pinned_blocks_are_not_evicted_before_a_reset() -> None:
    pool = BlockPool(5, 16)
    pool.max_pinned = 2
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.register(block, key(i))
    pool.pin([key(0), key(9), key(1)])
    assert pool.pinned == {blocks[0]}, "a prefix, as far as it is here"
    pool.pin([key(i) for i in range(4)])
    assert pool.pinned == {*blocks[:2]}, "no more than max_pinned"
    pool.release(blocks[1:])
    assert (pool.num_held, pool.num_free) == (0, 3), "a pinned block counts as neither"
    pool.release(pool.allocate(3))
    assert pool.match([key(i) for i in range(4)]) == blocks[:2]
    pool.reset()
    assert pool.match([key(0)]) == [] and pool.num_held == 1, "its holder keeps it, and nobody finds it"
    pool.release(blocks[:1])
    assert len(pool.allocate(5)) == 5


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares, registrations and releases against a model of the holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.holders: list[list[int]] = []
        self.next_key = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            assert self.pool.num_free == free
        else:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not set(blocks) & {b for held in self.holders for b in held}, "allocated while held"
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holders))
        for block in held:
            self.pool.register(block, key(self.next_key))
            self.next_key += 1

    @precondition(lambda self: self.next_key > 0)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.next_key - 1))
        hits = self.pool.match([key(i) for i in range(start, self.next_key)])
        self.pool.hold(hits)
        self.holders.append(hits)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @rule()
    def evict_all(self) -> None:
        self.pool.release(self.pool.allocate(self.pool.num_free))

    @precondition(lambda self: self.next_key > 0)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pool.max_pinned = 4
        self.pool.pin([key(data.draw(st.integers(0, self.next_key - 1)))])

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert not self.pool.match([key(i) for i in range(self.next_key)][:1])
        self.next_key = 0

    @invariant()
    def intact(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_held == len({block for held in self.holders for block in held} - self.pool.pinned)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
