"""A profile for plans that take no time."""

from pathlib import Path

import pytest

from pdserve.profile.profile import EngineFacts, Profile, TransferModel


@pytest.fixture
def tiny_profile(tmp_path: Path) -> Path:
    """A profile of round numbers, with two connectors of which one is slow."""
    engine = EngineFacts(block_bytes=4096, num_blocks=1000, max_model_len=4096)
    path = tmp_path / "profile.json"
    transfers = {"shm": TransferModel(1e-3, 1e9, 1e-3, 1e9, 2e9), "redis": TransferModel(1e-2, 1e7, 1e-2, 1e7, 1e7)}
    Profile(model="m", engine=engine, transfers=transfers).save(path)
    return path
