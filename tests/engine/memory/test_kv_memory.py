"""KV memory: copies within the pool, and between the pool and host memory."""

import pytest
import torch

from pdserve.engine.memory.kv_memory import KVMemory
from pdserve.kernels import reference


@pytest.fixture
def kv() -> KVMemory:
    """Six blocks, each filled with its number, and two in host memory."""
    numbers_N2GBD = torch.arange(6.0).view(6, 1, 1, 1, 1, 1)
    return KVMemory(numbers_N2GBD.repeat(1, 2, 2, 1, 16, 4), torch.zeros(2, 2, 2, 1, 16, 4), reference)


def values(kv: KVMemory) -> list[float]:
    """Return the value that fills each block."""
    first = kv.pool_NL2GBD.flatten(1)[:, 0]
    assert torch.equal(kv.pool_NL2GBD, first.view(6, 1, 1, 1, 1, 1).expand_as(kv.pool_NL2GBD))
    return first.tolist()


def test_block_copies_take_effect_in_order(kv: KVMemory) -> None:
    kv.copy_blocks([(0, 1), (1, 2), (5, 0), (3, 4), (2, 3)])
    assert values(kv) == [5, 0, 0, 0, 3, 5]


def test_swapped_blocks_come_back(kv: KVMemory) -> None:
    assert kv.swap([(4, 0), (2, 1)], []) > 0
    kv.pool_NL2GBD.zero_()
    kv.swap([], [(1, 0), (0, 1)])
    assert values(kv) == [2, 4, 0, 0, 0, 0]


def test_clear_tail_zeroes_only_the_unused_slots(kv: KVMemory) -> None:
    kv.clear_tail(3, 10)
    assert (kv.pool_NL2GBD[3, ..., :10, :] == 3).all() and (kv.pool_NL2GBD[3, ..., 10:, :] == 0).all()
    assert (kv.pool_NL2GBD[4] == 4).all()
