"""Blocks of the pool that KV of another layout is converted into: in place, or by way of host memory if they are on a GPU."""

from typing import Any, Protocol

import torch

from pdserve.engine.memory.kv_memory import section_views
from pdserve.keys import Layout
from pdserve.kv_transfer.staging import PIECE_BYTES, Copies


class TargetBlocks(Protocol):
    """Blocks to be filled one after the other. A load begins with `mark` and `begin`, and ends with `flush`.

    Attributes:
        sections: of rows, see `section_views`.
    """

    sections: list[torch.Tensor]

    def mark(self) -> Any:
        """Return a mark behind all steps so far, which may still write to the blocks. Called by the engine's thread."""

    def begin(self, mark: Any) -> None: ...

    def row(self, block: int) -> int:
        """Return the row in which a block is filled. Blocks before it are complete."""

    def flush(self) -> None:
        """Make sure that what was filled is in the pool."""


class InPlace:
    """Blocks in host memory."""

    def __init__(self, pool: torch.Tensor, layout: Layout) -> None:
        self.sections = section_views(pool, layout)

    def mark(self) -> None:
        return None

    def begin(self, mark: None) -> None: ...

    def row(self, block: int) -> int:
        return block

    def flush(self) -> None: ...


class Staged:
    """Blocks on a GPU: whole ones are copied, some at a time, on a stream of their own. What no token fills becomes 0."""

    def __init__(self, pool: torch.Tensor, layout: Layout, copies: Copies) -> None:
        count = max(1, min(PIECE_BYTES // layout.block_bytes, len(pool)))
        self._lane, self._rows = copies.lane(count), copies.rows(count)
        self.sections = section_views(self._rows.view(pool.dtype), layout)
        self._filled: dict[int, int] = {}  # block → row
        self._mark: Any = None

    def mark(self) -> Any:
        return self._lane.mark()

    def begin(self, mark: Any) -> None:
        self._mark = mark

    def row(self, block: int) -> int:
        if block not in self._filled:
            if len(self._filled) == len(self._rows):
                self.flush()
            row = self._filled[block] = len(self._filled)
            self._rows[row] = 0
        return self._filled[block]

    def flush(self) -> None:
        blocks, self._filled = [*self._filled], {}
        if blocks:
            self._lane.write(self._rows[: len(blocks)], blocks, self._mark)
