"""KV memory: copies within the pool, and between the pool and host memory."""

import pytest
import torch

from pdserve.engine.memory.kv_memory import KVMemory
from pdserve.kernels import reference
from pdserve.kv_spec import KVGroup, KVSpec


@pytest.fixture
def kv() -> KVMemory:
    """Six blocks, each filled with its number, and two in host memory."""
    spec = KVSpec((KVGroup((0, 2), 1, 4), KVGroup((1,), 2, 8)))
    layout = spec.layout(model_fingerprint="", block_size=16, dtype="float32", itemsize=4)
    size = layout.block_numbers
    return KVMemory(torch.arange(6.0)[:, None].repeat(1, size), torch.zeros(2, size), reference, layout, spec)


def values(kv: KVMemory) -> list[float]:
    """Return the value that fills each block."""
    first = kv.pool_NX[:, 0]
    assert torch.equal(kv.pool_NX, first[:, None].expand_as(kv.pool_NX))
    return first.tolist()


def test_block_copies_take_effect_in_order(kv: KVMemory) -> None:
    kv.copy_blocks([(0, 1), (1, 2), (5, 0), (3, 4), (2, 3)])
    assert values(kv) == [5, 0, 0, 0, 3, 5]


def test_swapped_blocks_come_back(kv: KVMemory) -> None:
    assert kv.swap([(4, 0), (2, 1)], []) > 0
    kv.pool_NX.zero_()
    kv.swap([], [(1, 0), (0, 1)])
    assert values(kv) == [2, 4, 0, 0, 0, 0]


def test_clear_tail_zeroes_only_the_unused_slots(kv: KVMemory) -> None:
    kv.clear_tail(3, 10)
    assert [tuple(section.shape) for section in kv.sections] == [(6, 2, 2, 1, 16, 4), (6, 1, 2, 2, 16, 8)]
    for section in kv.sections:
        assert (section[3, ..., :10, :] == 3).all() and (section[3, ..., 10:, :] == 0).all()
        assert (section[4] == 4).all()


def test_layers_share_no_memory_and_leave_none_unused(kv: KVMemory) -> None:
    kv.pool_NX.zero_()
    for layer, cache_N2GBD in enumerate(kv.caches, 1):
        cache_N2GBD += layer
    assert [int((kv.pool_NX == layer).sum()) for layer in (1, 2, 3)] == [cache.numel() for cache in kv.caches]
    assert (kv.pool_NX > 0).all()
