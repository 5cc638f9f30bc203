"""Rows of bytes in a GPU's memory, for connectors whose peers read and write them in place.

Checksums are computed where the bytes are, so that nothing passes through the host. Copies and checksums run on a stream of
their own; each call returns when it is done.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers. Products and sums are meant to wrap around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class GPURows:
    """Rows of equal length in one run of a GPU's memory. Implements `Memory` of kv_transfer/connectors/nixl/memory.py.

    Args:
        rows: uint8 [rows, bytes of a row], contiguous; on the CPU it takes the place of a GPU's in tests.
        cuda: what is used of `torch.cuda`; None without streams.
    """

    kind = "VRAM"

    def __init__(self, rows: torch.Tensor, cuda: Any = None) -> None:
        assert rows.is_contiguous() and rows.shape[1] % 8 == 0
        self._rows = rows
        self._words = rows.view(torch.int64)
        self._cuda = cuda or (torch.cuda if rows.is_cuda else None)
        self._stream = None if self._cuda is None else self._cuda.Stream(rows.device)
        self.device = rows.device.index or 0
        self.address = rows.data_ptr()
        self.nbytes = rows.nbytes

    def __len__(self) -> int:
        return len(self._rows)

    def like(self, count: int) -> "GPURows":
        with self._synchronized():  # memory that the model's stream has given back may still be in use there
            rows = torch.empty((count, self._rows.shape[1]), dtype=torch.uint8, device=self._rows.device)
        return GPURows(rows, self._cuda)

    def mark(self) -> Any:
        if self._cuda is None:
            return None
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._rows.device))
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def digests(self, rows: Sequence[int]) -> list[bytes]:
        """Return the sum of the mixed words of each row, each with its place: it detects accidents, and no malice."""
        with self._synchronized():
            words = self._words.index_select(0, self._ids(rows))
            words += torch.arange(1, words.shape[1] + 1, device=words.device) * _GOLDEN
            words = (words ^ _shift_right(words, 30)) * _MIX_1
            words = (words ^ _shift_right(words, 27)) * _MIX_2
            # The copy waits for the stream in which it is made, which must not be the model's.
            sums = (words ^ _shift_right(words, 31)).sum(1).to("cpu", copy=True)
        return [total.to_bytes(8, "little", signed=True) for total in sums.tolist()]

    def copy(self, rows: Sequence[int], source: "GPURows", source_rows: Sequence[int]) -> list[bytes]:
        with self._synchronized():
            self._words.index_copy_(0, self._ids(rows), source._words.index_select(0, self._ids(source_rows)))
        return self.digests(rows)

    def _ids(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self._rows.device)

    def _synchronized(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._cuda is None else Synchronized(self._stream, self._cuda)


class Synchronized:
    """Context manager that makes a stream the current one of this thread, and waits for it at the end."""

    def __init__(self, stream: Any, cuda: Any) -> None:
        self._stream = stream
        self._context = cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._context.__exit__(*error)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own operator keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
