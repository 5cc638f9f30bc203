"""Host memory between a pool on a GPU and connectors, which move host memory."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats

STAGING_BYTES = 256 << 20  # per direction


def attach_pool(connector: Connector, pool: torch.Tensor, layout: Layout) -> Connector:
    """Binds a pool [num_blocks, …] to a connector, through pinned host memory if the pool is on a GPU.

    Returns:
        The connector to use from then on.
    """
    if pool.device.type != "cpu":
        return StagedConnector(connector, pool, layout)
    connector.attach(PoolMemory(host_rows(pool), layout))
    return connector


def host_rows(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor in host memory as uint8 rows [num_blocks, block_bytes], sharing its memory."""
    assert pool.device.type == "cpu" and pool.is_contiguous()
    rows: npt.NDArray[np.uint8] = _byte_rows(pool).numpy()
    return rows


def _byte_rows(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8).reshape(pool.shape[0], -1)


class StagedConnector(Connector):
    """Copies blocks through pinned rows, half of them for stores and half for loads, each with a thread and a stream
    of its own, so that neither compute nor the other direction waits. Bytes in flight are bounded by the rows.
    """

    scheme = "staged"

    def __init__(
        self, inner: Connector, pool: torch.Tensor, layout: Layout, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.scheme = inner.scheme  # type: ignore[misc]  # elsewhere it belongs to the class
        if inner.in_place:
            raise SetupError(f"{inner.scheme}:// reads pools in place and cannot do so with one on {pool.device} yet")
        self._inner = inner
        self._pool = _byte_rows(pool)
        self._half = max(1, min(pool.shape[0], staging_bytes // layout.block_bytes))
        on_gpu = pool.device.type == "cuda"
        self._rows = torch.zeros((2 * self._half, layout.block_bytes), dtype=torch.uint8, pin_memory=on_gpu)
        self._streams = {d: _new_stream(pool.device) for d in ("store", "load")}
        self._threads = {d: ThreadPoolExecutor(1, thread_name_prefix=f"staging-{d}") for d in ("store", "load")}
        inner.attach(PoolMemory(self._rows.numpy(), layout))

    def attach(self, memory: PoolMemory) -> None:
        raise AssertionError("attached when it is made")

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        written = None
        if self._pool.device.type == "cuda":
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self._pool.device))

        def move(keys: Sequence[bytes], blocks: list[int], slots: list[int]) -> Result:
            with self._on_stream("store") as stream:
                if stream is not None and written is not None:
                    stream.wait_event(written)
                self._rows[slots[0] : slots[-1] + 1].copy_(self._pool[blocks])
            return self._inner.store(keys, slots, lease_s=lease_s).result()

        return self._threads["store"].submit(self._in_pieces, 0, keys, block_ids, move)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        def move(keys: Sequence[bytes], blocks: list[int], slots: list[int]) -> Result:
            result = self._inner.load(keys, slots, tickets=tickets).result()
            with self._on_stream("load"):
                self._pool[blocks] = self._rows[slots[0] : slots[-1] + 1].to(self._pool.device)
            return result

        return self._threads["load"].submit(self._in_pieces, self._half, keys, block_ids, move)

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return self._inner.match(keys)

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._inner.release(keys, tickets=tickets)

    def stats(self) -> Stats:
        return self._inner.stats()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=True)
        self._inner.close()

    def _in_pieces(
        self,
        first_slot: int,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        move: Callable[[Sequence[bytes], list[int], list[int]], Result],
    ) -> Result:
        started = time.perf_counter()
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), self._half):
            blocks = list(block_ids[start : start + self._half])
            slots = list(range(first_slot, first_slot + len(blocks)))
            outcomes += move(keys[start : start + self._half], blocks, slots).outcomes
        return Result(outcomes, time.perf_counter() - started)

    def _on_stream(self, direction: str) -> Any:
        """A context in which copies run on the direction's stream and are finished at its end."""
        stream = self._streams[direction]
        return _Synchronized(stream) if stream is not None else nullcontext(None)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class _Synchronized:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._context.__exit__(*error)
