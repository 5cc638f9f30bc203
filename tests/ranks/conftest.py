"""Fixtures of engines with several ranks, whose followers are real processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import InstanceConfig
from pdserve.engine.engine import Engine
from pdserve.ranks.leader import start_ranks
from pdserve.ranks.runners import LeadingRunner


@pytest.fixture(scope="module", autouse=True)
def single_torch_thread() -> Iterator[None]:
    """Keep the ranks of this process from changing the threads of other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def forked_followers(fork_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers come from the fork server, which saves each the seconds of importing torch."""
    monkeypatch.setattr("pdserve.ranks.followers.start_process", fork_server.start_follower)


@pytest.fixture
def ranked_engine(forked_followers: None) -> Iterator[Callable[..., Engine]]:
    """ranked_engine(path, ranks=2, num_blocks=100) → an engine with several ranks, of which there can be one at a time."""
    running: list[LeadingRunner] = []

    def close() -> None:
        for runner in running:
            runner.followers.close()
            assert runner.checkpoint.group is not None
            runner.checkpoint.group.close()
        running.clear()

    def make(path: Path, ranks: int = 2, **settings: Any) -> Engine:
        close()
        config = InstanceConfig(model=str(path), tensor_parallel_size=ranks, threads=ranks, **settings)
        running.append(start_ranks(config))
        return Engine(config, runner=running[-1])

    yield make
    close()
