"""Memory that `nixl://` reads and writes: a pool's rows or a bounce buffer, on the host or on a GPU."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from pdserve.kv_transfer.blocks import copy_and_hash
from pdserve.kv_transfer.header import checksum

GROUP_BYTES = 16 << 20  # of rows that are copied or checked at once


class Memory(Protocol):
    """Rows of equal length in one run of memory.

    Attributes:
        kind: NIXL's word for where it is, DRAM or VRAM.
        device: number of the GPU; 0 on the host.
        address: of the first byte.
    """

    kind: str
    device: int
    address: int
    nbytes: int

    def __len__(self) -> int: ...

    def like(self, count: int) -> "Memory":
        """Return `count` new rows of the same length in the same place."""

    def mark(self) -> Any:
        """Return a mark behind all steps of the model so far. Called by the engine thread."""

    def wait(self, mark: Any) -> None:
        """Wait for the steps before a mark."""

    def digests(self, rows: Sequence[int]) -> list[bytes]:
        """Return the 8 bytes of checksum of each row. The same bytes in memory of another kind may have others."""

    def copy(self, rows: Sequence[int], source: Any, source_rows: Sequence[int]) -> list[bytes]:
        """Copy rows of memory of the same kind into distinct rows, and return the digests of the copies."""


class HostMemory:
    """Rows in host memory, uint8 [rows, bytes of a row]."""

    kind = "DRAM"
    device = 0

    def __init__(self, rows: Any) -> None:
        self.rows: Any = rows
        self.address: int = rows.ctypes.data
        self.nbytes: int = rows.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def like(self, count: int) -> "HostMemory":
        return HostMemory(np.empty((count, self.rows.shape[1]), np.uint8))

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    def digests(self, rows: Sequence[int]) -> list[bytes]:
        return [checksum(self.rows[row]) for row in rows]

    def copy(self, rows: Sequence[int], source: Any, source_rows: Sequence[int]) -> list[bytes]:
        hashers = [xxhash.xxh3_64() for _ in rows]
        for row, source_row, hasher in zip(rows, source_rows, hashers, strict=True):
            copy_and_hash(self.rows[row], source.rows[source_row], hasher)
        return [hasher.digest() for hasher in hashers]


Block = TypeVar("Block")


def groups(blocks: Sequence[Block], memory: Memory) -> Iterator[Sequence[Block]]:
    """Yield blocks in groups whose rows are copied or checked at once: on a GPU each time costs launches and a wait."""
    size = max(1, GROUP_BYTES * len(memory) // memory.nbytes)
    return (blocks[start : start + size] for start in range(0, len(blocks), size))
