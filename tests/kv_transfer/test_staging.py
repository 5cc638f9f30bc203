"""Tests of staging with a pool on the CPU: the same copies as on a GPU, without streams."""

import threading

import torch

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome, request_cancel
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import StagedConnector

LAYOUT = Layout(
    model_fingerprint="x", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", itemsize=4
)
SHAPE = (40, 2, 2, 2, 4, 8)


class GatedMemory(MemoryConnector):
    """Loads no block before the gate is open."""

    gate = threading.Event()

    def get(self, name: str) -> Buffer | None:
        self.gate.wait(60)
        return super().get(name)


def test_a_cancelled_load_ends_after_the_block_being_moved() -> None:
    pool = torch.randn(SHAPE)
    connector = StagedConnector(GatedMemory("memory://staging-gate"), pool, LAYOUT, 3 * LAYOUT.block_bytes)
    assert connector.capabilities.cancels
    keys = [bytes([i]) * 16 for i in range(10)]
    assert connector.store(keys, range(10), lease_s=10).result(60).leading == 10
    future = connector.load(keys, range(20, 30))
    request_cancel(future)
    GatedMemory.gate.set()
    assert future.result(60).outcomes == [Outcome.CANCELLED] * 10
    connector.close()


def test_transfers_of_more_blocks_than_staging_rows() -> None:
    source, target = torch.randn(SHAPE), torch.zeros(SHAPE)
    rows_bytes = 3 * LAYOUT.block_bytes
    writer = StagedConnector(connect("memory://staging"), source, LAYOUT, rows_bytes)
    reader = StagedConnector(connect("memory://staging"), target, LAYOUT, rows_bytes)
    keys = [bytes([i]) * 16 for i in range(10)]
    stored = writer.store(keys, range(5, 15), lease_s=10).result(60)
    assert stored.outcomes == [Outcome.OK] * 10
    rows = [30, 2, 7, 39, 0, 11, 12, 13, 25, 26]
    loaded = reader.load([*keys, b"?" * 16], [*rows, 20]).result(60)
    assert loaded.outcomes == [Outcome.OK] * 10 + [Outcome.MISSING]
    assert torch.equal(target[rows], source[5:15])
    assert reader.match(keys).result(60) == 10
    writer.close()
    reader.close()
