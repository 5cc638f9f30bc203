"""The ranks of one instance, and their sums and gathers of tensors, by torch.distributed with NCCL or, on CPUs, gloo."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

START_S = 600.0  # for the slowest rank to load its weights, which may come from a slow disk
HANG_S = 30.0  # a rank that waits longer for another one in a step fails, and with it the instance
LOOPBACK = "127.0.0.1"


class RankLost(Exception):
    """Another rank has ended, or hangs."""


def listen() -> socket.socket:
    """Return a socket on loopback over which the ranks of an instance find each other."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


class RankGroup:
    """One rank's end of the connections between the ranks. All ranks call the same methods in the same order.

    Args:
        rank: 0 to `ranks` - 1. Rank 0 schedules and samples.
        device: of this rank's tensors.
        port: of the listener.
        listener: the listener itself, on rank 0, which serves it.
        ordered: sum in the order of the ranks, so that a row has the same bits in any batch. For two ranks it always has.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        port: int,
        listener: socket.socket | None = None,
        *,
        ordered: bool = True,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._device = device
        self._port = port
        self._listener = listener
        self._ordered = ordered

    def connect(self) -> None:
        """Connect to the other ranks, and wait until they do. Called once the weights are loaded."""
        # All ranks are on one machine, and none is to listen on its network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
            LOOPBACK,
            self._port,
            self.ranks,
            is_master=self._listener is not None,
            timeout=timedelta(seconds=START_S),
            wait_for_workers=False,
            master_listen_fd=None if self._listener is None else self._listener.detach(),
        )
        self._store.set(f"loaded-{self.rank}", "")
        self._store.wait([f"loaded-{rank}" for rank in range(self.ranks)])
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=HANG_S),
            device_id=self._device if on_gpu else None,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks. `x` may be overwritten.

        Raises:
            RankLost: after `HANG_S` at the latest. So do the other methods.
        """
        x = x.contiguous()
        with _reporting_loss():
            if self.ranks > 2 and self._ordered:
                parts = [torch.empty_like(x) for _ in range(self.ranks)]
                dist.all_gather(parts, x)
                return torch.stack(parts).float().sum(0).to(x.dtype)
            dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return, on rank 0, the tensors of all ranks side by side in their last dimension; elsewhere the rank's own."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)] if self.rank == 0 else None
        with _reporting_loss():
            dist.gather(x, parts)
        return x if parts is None else torch.cat(parts, -1)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of each of the values over all ranks."""
        lowest = torch.tensor(values, dtype=torch.long, device=self._device)
        with _reporting_loss():
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
        return [int(value) for value in lowest.tolist()]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _reporting_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch.distributed, whatever the backend
        raise RankLost(f"a rank does not take part in a step: {str(error).splitlines()[0]}") from error
