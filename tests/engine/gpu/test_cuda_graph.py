"""CUDA graphs, with a double of torch's allocator: what recording leaves behind."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.engine.gpu import cuda_graph


class Graph:
    def replay(self) -> None: ...


class PoolLedger:
    """Stands in for torch.cuda and its allocator, which refuses a pool whose graphs are all gone but which is not empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.open, self.workspaces, self.names = "model", set[object](), set[object](), iter(range(99))
        self.graphs: dict[object, int] = {}  # by pool
        self.fails = False
        for name in ("current_stream", "set_stream", "Stream", "stream", "graph_pool_handle", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)

    def product(self) -> torch.Tensor:
        """Use a library, which allocates a workspace at its first use on a stream, from the pool that is open."""
        if self.stream not in self.workspaces:
            self.workspaces.add(self.stream)
            self.kept = {*self.open}
        if self.fails and self.open:
            raise RuntimeError("operation not permitted")
        return torch.ones(1)

    def _current_stream(self) -> Any:
        return SimpleNamespace(name=self.stream, device_index=0)

    def _set_stream(self, stream: Any) -> None:
        self.stream = stream.name

    def _Stream(self) -> Any:
        return SimpleNamespace(name=f"stream {next(self.names)}", wait_stream=lambda other: None)

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    def _graph_pool_handle(self) -> str:
        return f"pool {next(self.names)}"

    def _CUDAGraph(self) -> "Graph":
        return Graph()

    @contextmanager
    def _graph(self, graph: Any, pool: object, stream: Any, capture_error_mode: str) -> Iterator[None]:
        if self.graphs.get(pool) == 0 and pool in self.kept:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        before, self.stream = self.stream, stream.name
        self.open.add(pool)
        yield  # an exception leaves stream and pool as they are, as in torch
        self.open.discard(pool)
        self.stream = before
        self.graphs[pool] = self.graphs.get(pool, 0) + 1
        weakref.finalize(graph, self._drop, pool)

    def _drop(self, pool: object) -> None:
        self.graphs[pool] -= 1

    def _end(self, device: int, pool: object) -> None:
        self.open.discard(pool)


def test_graphs_that_are_dropped_after_measuring_harm_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 ended all recording in a pool that had held a library's workspace."""
    ledger = PoolLedger(monkeypatch)
    for _ in range(2):
        record = cuda_graph.CudaRecorder()
        graphs = [record(ledger.product) for _ in range(3)]
        assert [*ledger.graphs.values()][-1] == 3 and not ledger.open
        del graphs, record
        gc.collect()
    assert {*ledger.graphs.values()} == {0}


def test_a_recording_that_fails_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = PoolLedger(monkeypatch)
    record = cuda_graph.CudaRecorder()
    record(ledger.product)
    ledger.fails = True
    with pytest.raises(RuntimeError, match="not permitted"):
        record(ledger.product)
    assert ledger.stream == "model" and not ledger.open
