"""Tests of staging with a pool on the CPU: the same copies as on a GPU, without streams."""

import torch

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import StagedConnector

LAYOUT = Layout(
    model_fingerprint="x", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", itemsize=4
)
SHAPE = (40, 2, 2, 2, 4, 8)


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
