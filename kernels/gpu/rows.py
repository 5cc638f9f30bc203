"""Rows of bytes in a GPU's memory, for connectors whose peers read and write them in place.

Checksums are computed where the bytes are, so that nothing passes through the host. Copies and checksums run on a stream of
their own; each call returns when it is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pdserve.kernels.noise import GOLDEN, mixed


class OwnStream:
    """Work on a GPU beside the model's, in a stream of its own.

    Args:
        device: where it works; on a CPU, which takes the place of a GPU in tests, there are no streams.
        cuda: what is used of `torch.cuda`; None without streams.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._device = device
        self._cuda = cuda or (torch.cuda if device.type == "cuda" else None)
        self._stream = None if self._cuda is None else self._cuda.Stream(device)

    def mark(self) -> Any:
        """Return an event behind all that the current stream has been told so far. For the thread that runs the model."""
        if self._cuda is None:
            return None
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def _ids(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self._device)

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Make the stream the current one of this thread, and wait for it at the end."""
        if self._cuda is None or self._stream is None:
            yield
            return
        with self._cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


class GPURows(OwnStream):
    """Rows of equal length in one run of a GPU's memory. Implements `Memory` of kv_transfer/connectors/nixl/memory.py.

    Args:
        rows: uint8 [rows, bytes of a row], contiguous.
        cuda: see `OwnStream`.
    """

    kind = "VRAM"

    def __init__(self, rows: torch.Tensor, cuda: Any = None) -> None:
        super().__init__(rows.device, cuda)
        assert rows.is_contiguous() and rows.shape[1] % 8 == 0
        self._rows = rows
        self._words = rows.view(torch.int64)
        self.device = rows.device.index or 0
        self.address = rows.data_ptr()
        self.nbytes = rows.nbytes

    def __len__(self) -> int:
        return len(self._rows)

    def like(self, count: int) -> "GPURows":
        with self._synchronized():  # memory that the model's stream has given back may still be in use there
            rows = torch.empty((count, self._rows.shape[1]), dtype=torch.uint8, device=self._device)
        return GPURows(rows, self._cuda)

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def digests(self, rows: Sequence[int]) -> list[bytes]:
        """Return the sum of the mixed words of each row, each with its place: it detects accidents, and no malice."""
        with self._synchronized():
            words = self._words.index_select(0, self._ids(rows))
            words += torch.arange(1, words.shape[1] + 1, device=words.device) * GOLDEN
            # The copy waits for the stream in which it is made, which must not be the model's.
            sums = mixed(words).sum(1).to("cpu", copy=True)
        return [total.to_bytes(8, "little", signed=True) for total in sums.tolist()]

    def copy(self, rows: Sequence[int], source: "GPURows", source_rows: Sequence[int]) -> list[bytes]:
        with self._synchronized():
            self._words.index_copy_(0, self._ids(rows), source._words.index_select(0, self._ids(source_rows)))
        return self.digests(rows)
