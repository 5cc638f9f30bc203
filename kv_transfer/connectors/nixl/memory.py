"""Memory that `nixl://` reads and writes: a pool's rows or a bounce buffer, on the host or on a GPU."""

from typing import Any, Protocol

import numpy as np
import xxhash

from pdserve.kv_transfer.blocks import copy_and_hash
from pdserve.kv_transfer.header import Row, checksum


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

    def digest(self, row: int) -> bytes:
        """Return the 8 bytes of checksum of a row. The same bytes in memory of another kind may have another one."""

    def copy(self, row: int, source: Any, source_row: int) -> bytes:
        """Copy a row of memory of the same kind, and return the digest of the copy."""


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

    def digest(self, row: int) -> bytes:
        one: Row = self.rows[row]
        return checksum(one)

    def copy(self, row: int, source: Any, source_row: int) -> bytes:
        hasher = xxhash.xxh3_64()
        copy_and_hash(self.rows[row], source.rows[source_row], hasher)
        return hasher.digest()
