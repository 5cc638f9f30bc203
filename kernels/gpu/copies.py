"""Copies of blocks between a pool on a GPU and pinned host memory, on streams of their own beside the model's computation.

    out    model's stream: …writes KV ─ mark ┐
           lane:                             └► gather into a buffer ─► copy to host rows ─► the thread goes on
    in     model's stream: …reads KV ─ mark ┐
           lane:      copy to the buffer ───┴─► scatter into the pool ─► the thread goes on

The model's stream never waits. Blocks that are loaded may have been another sequence's, whose last step may still write to
them although its tokens are known: hence the mark in both directions.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pdserve.kernels.batch import Kernel
from pdserve.kernels.gpu.memory import pin
from pdserve.kernels.gpu.rows import GPURows, OwnStream


class PoolCopies:
    """Makes the lanes of one pool, and the host memory that they copy from and to.

    Args:
        pool_N: the pool; one on the CPU takes the place of a GPU's in tests, and then needs no streams.
        kernel: its `gather_blocks` and `scatter_blocks` are used.
        cuda: what is used of `torch.cuda`; None without streams.
    """

    def __init__(self, pool_N: torch.Tensor, kernel: Kernel, cuda: Any = None) -> None:
        self._pool_N = pool_N
        self._kernel = kernel
        self._cuda = cuda or (torch.cuda if pool_N.is_cuda else None)

    def rows(self, count: int) -> torch.Tensor:
        """Return host memory for `count` blocks, uint8 [count, bytes of a block]."""
        rows = torch.zeros((count, self._pool_N[0].nbytes), dtype=torch.uint8)
        return pin(rows) if self._pool_N.is_cuda else rows

    def in_place(self) -> GPURows:
        """Return the pool's own rows, for peers that read and write them."""
        return GPURows(_bytes(self._pool_N), self._cuda)

    def lane(self, max_blocks: int) -> "Lane":
        """Return a lane for copies of up to `max_blocks` blocks."""
        return Lane(self._pool_N, self._kernel, max_blocks, self._cuda)


class Lane(OwnStream):
    """Copies in one direction, with a buffer on the GPU. One thread at a time copies."""

    def __init__(self, pool_N: torch.Tensor, kernel: Kernel, max_blocks: int, cuda: Any) -> None:
        super().__init__(pool_N.device, cuda)
        self._pool_N = pool_N
        self._kernel = kernel
        self._buffer_C = pool_N.new_empty((max_blocks, *pool_N.shape[1:]))
        self._wait(self.mark())  # the buffer's memory may be in use until then

    def read(self, blocks: Sequence[int], rows: torch.Tensor, after: Any) -> None:
        """Copy blocks into host rows, uint8 [len(blocks), bytes of a block], once `after` has happened. Waits for the end."""
        with self._synchronized():
            ids_C, buffer_C = self._ids(blocks), self._buffer_C[: len(blocks)]
            self._wait(after)
            self._kernel.gather_blocks(self._pool_N, ids_C, buffer_C)
            rows.copy_(_bytes(buffer_C), non_blocking=True)

    def write(self, rows: torch.Tensor, blocks: Sequence[int], after: Any) -> None:
        """Copy host rows into distinct blocks, once `after` has happened. Waits for the end."""
        with self._synchronized():
            ids_C, buffer_C = self._ids(blocks), self._buffer_C[: len(blocks)]
            _bytes(buffer_C).copy_(rows, non_blocking=True)
            self._wait(after)
            self._kernel.scatter_blocks(self._pool_N, ids_C, buffer_C)

    def _wait(self, event: Any) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)


def _bytes(blocks_C: torch.Tensor) -> torch.Tensor:
    return blocks_C.view(torch.uint8).reshape(len(blocks_C), -1)
