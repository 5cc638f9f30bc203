"""Settings of each rank of an instance: a device, and a share of the CPU threads."""

import socket
from dataclasses import replace

import torch

from pdserve.config import InstanceConfig
from pdserve.engine.checkpoint_loader import find_device
from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.errors import SetupError
from pdserve.kernels.attention import is_batch_invariant


def config_of_rank(config: InstanceConfig, rank: int) -> InstanceConfig:
    """Return the settings of one rank. GPUs are taken in order, from that of `--device` on.

    Raises:
        SetupError: there are fewer GPUs than ranks.
    """
    device, ranks = find_device(config.device), config.tensor_parallel_size
    if device.type == "cpu":
        return replace(config, device="cpu")
    first, count = device.index or 0, torch.cuda.device_count()
    if first + ranks > count:
        raise SetupError(
            f"--tensor-parallel-size {ranks} needs as many GPUs, from cuda:{first} on; torch finds {count}"
        )
    return replace(config, device=f"cuda:{first + rank}")


def use_threads(config: InstanceConfig) -> None:
    """Limit this process to its share of the CPU threads of its instance."""
    torch.set_num_threads(max(1, (config.threads or torch.get_num_threads()) // config.tensor_parallel_size))


def make_group(config: InstanceConfig, rank: int, port: int, listener: socket.socket | None = None) -> RankGroup:
    """Return one rank's end of the group, from its settings."""
    device = torch.device(config.device)
    ordered = is_batch_invariant(config.batch_invariant, device)
    return RankGroup(rank, config.tensor_parallel_size, device, port, listener, ordered=ordered)
