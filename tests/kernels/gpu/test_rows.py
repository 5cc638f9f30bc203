"""Rows in a GPU's memory: on which stream each operator runs, with a fake `torch.cuda` and tensors on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.kernels.gpu.rows import GPURows

VIEWS = ("aten::view", "aten::select", "aten::slice", "aten::detach", "aten::alias", "aten::expand")


class FakeCuda:
    """Has a current stream. Threads that move KV must do nothing on the model's."""

    def __init__(self) -> None:
        self.current = "model"

    def Stream(self, device: torch.device) -> "FakeCuda":
        return self

    def synchronize(self) -> None: ...

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.current = "side"
        yield
        self.current = "model"


class Recorder(TorchDispatchMode):
    """Records the stream of each operator that allocates, computes, or waits."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda = cuda
        self.streams: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in VIEWS:
            self.streams[func._schema.name] = self.cuda.current
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("use", "operator"),
    [
        (lambda rows: rows.digests([1]), "aten::_to_copy"),  # waits for the stream in which it runs
        (lambda rows: rows.like(2), "aten::empty"),  # memory of the stream in which it runs
        (lambda rows: rows.copy([0], rows, [1]), "aten::index_copy_"),
    ],
)
def test_nothing_runs_on_the_models_stream(use: Callable[[GPURows], object], operator: str) -> None:
    cuda = FakeCuda()
    rows = GPURows(torch.arange(128, dtype=torch.uint8).view(2, 64), cuda)
    with Recorder(cuda) as recorder:
        use(rows)
    assert operator in recorder.streams and {*recorder.streams.values()} == {"side"}, recorder.streams


def test_rows_for_copies_have_the_shape_of_these() -> None:
    rows = GPURows(torch.zeros(2, 64, dtype=torch.uint8))
    copies = rows.like(5)
    assert len(copies) == 5 and copies.nbytes == 320 and rows.copy([1, 0], copies, [3, 4]) == copies.digests([3, 4])
