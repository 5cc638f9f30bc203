"""Staging of GPU pools through pinned host memory, since connectors only transfer host memory."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.operation import Cancellation, submit

STAGING_BYTES = 256 << 20  # per direction


def attach_pool(connector: Connector, pool: torch.Tensor, layout: Layout) -> Connector:
    """Attach a pool [num_blocks, …] to a connector, through pinned host memory if the pool is on a GPU.

    Returns:
        The attached connector to use: `connector` itself, or a `StagedConnector` around it.
    """
    if pool.device.type != "cpu":
        return StagedConnector(connector, pool, layout)
    connector.attach(PoolMemory(host_rows(pool), layout))
    return connector


def host_rows(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a tensor in host memory as uint8 rows [num_blocks, block_bytes]."""
    assert pool.device.type == "cpu" and pool.is_contiguous()
    rows: npt.NDArray[np.uint8] = _byte_rows(pool).numpy()
    return rows


def _byte_rows(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8).reshape(pool.shape[0], -1)


class StagedConnector(Connector):
    """Wraps a connector so that blocks of a GPU pool are copied through staging rows in pinned host memory.

    Half of the rows are for stores and half for loads, each direction with its own thread and CUDA stream, so that neither
    the model's computation nor the other direction waits. The number of rows bounds the bytes in flight.
    """

    scheme = "staged"

    def __init__(
        self, inner: Connector, pool: torch.Tensor, layout: Layout, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.scheme = inner.scheme  # type: ignore[misc]  # a class attribute in other connectors
        if inner.in_place:
            raise SetupError(
                f"{inner.scheme}:// reads pools in place, which is not supported for a pool on {pool.device}"
            )
        self._inner = inner
        self._pool = _byte_rows(pool)
        self._slots_per_direction = max(1, min(pool.shape[0], staging_bytes // layout.block_bytes))
        on_gpu = pool.device.type == "cuda"
        self._rows = torch.zeros(
            (2 * self._slots_per_direction, layout.block_bytes), dtype=torch.uint8, pin_memory=on_gpu
        )
        self._streams = {d: _new_stream(pool.device) for d in ("store", "load")}
        self._threads = {d: ThreadPoolExecutor(1, thread_name_prefix=f"staging-{d}") for d in ("store", "load")}
        inner.attach(PoolMemory(self._rows.numpy(), layout))

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._inner.capabilities, follows=False, cancels=True)

    def attach(self, memory: PoolMemory) -> None:
        raise AssertionError("the constructor attaches")

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        kv_written = None
        if self._pool.device.type == "cuda":
            kv_written = torch.cuda.Event()
            kv_written.record(torch.cuda.current_stream(self._pool.device))

        def transfer_chunk(
            cancellation: Cancellation, keys: Sequence[bytes], blocks: list[int], slots: list[int]
        ) -> Result:
            with self._on_stream("store") as stream:
                if stream is not None and kv_written is not None:
                    stream.wait_event(kv_written)
                self._rows[slots[0] : slots[-1] + 1].copy_(self._pool[blocks])
            return cancellation.wait(self._inner.store(keys, slots, lease_s=lease_s))

        work = partial(self._in_chunks, 0, keys, block_ids, transfer_chunk)
        return submit(self._threads["store"], work)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        def transfer_chunk(
            cancellation: Cancellation, keys: Sequence[bytes], blocks: list[int], slots: list[int]
        ) -> Result:
            result = cancellation.wait(self._inner.load(keys, slots, tickets=tickets))
            with self._on_stream("load"):
                self._pool[blocks] = self._rows[slots[0] : slots[-1] + 1].to(self._pool.device)
            return result

        work = partial(self._in_chunks, self._slots_per_direction, keys, block_ids, transfer_chunk)
        return submit(self._threads["load"], work)

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

    def _in_chunks(
        self,
        first_slot: int,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        transfer_chunk: Callable[[Cancellation, Sequence[bytes], list[int], list[int]], Result],
        cancellation: Cancellation,
    ) -> Result:
        """Transfer the blocks in chunks that fit the direction's slots, which begin at `first_slot`."""
        started = time.perf_counter()
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), self._slots_per_direction):
            if cancellation.requested:
                outcomes += [Outcome.CANCELLED] * (len(keys) - start)
                break
            blocks = list(block_ids[start : start + self._slots_per_direction])
            slots = list(range(first_slot, first_slot + len(blocks)))
            chunk_keys = keys[start : start + self._slots_per_direction]
            outcomes += transfer_chunk(cancellation, chunk_keys, blocks, slots).outcomes
        return Result(outcomes, time.perf_counter() - started)

    def _on_stream(self, direction: str) -> Any:
        """Return a context manager that runs copies on the direction's stream and waits for them on exit."""
        stream = self._streams[direction]
        return _SynchronizedStream(stream) if stream is not None else nullcontext(None)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class _SynchronizedStream:
    """Context manager that makes a CUDA stream current and synchronizes it on exit."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._context.__exit__(*error)
