"""Stores that begin while a step computes: how often they are told, and when decode is."""

import pytest

from pdserve.kv_transfer.connector import GrowingStore
from pdserve.prefill.layer_stores import LayerStores


class Store(GrowingStore):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def advance(self, num_bytes: int) -> None:
        self.told.append(num_bytes)


@pytest.mark.parametrize(("range_bytes", "told"), [(1, [*range(1, 9)]), (3, [3, 6, 8]), (4, [4, 8]), (100, [8])])
def test_stores_advance_by_ranges_and_end_with_the_last_layer(range_bytes: int, told: list[int]) -> None:
    stores = [Store(), Store()]
    layers = LayerStores(stores, range(1, 9), range_bytes, lambda: None, lambda: 0.0)
    for layer in range(8):
        layers(layer)
    assert [store.told for store in stores] == [told, told]


def test_decode_is_told_once_shortly_before_the_expected_end() -> None:
    now, announced = [0.0], list[int]()
    layers = LayerStores([Store()], range(1, 11), 1, lambda: announced.append(layer), lambda: now[0])
    for layer in range(10):
        now[0] += 0.03
        layers(layer)
    assert announced == [6], "when three layers of 0.03 s are left"
