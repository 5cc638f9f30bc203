"""Settings of each rank of an instance: a device, and a share of the CPU threads."""

import os
import socket
from dataclasses import replace

import torch

from pdserve.config import InstanceConfig
from pdserve.engine.checkpoint_loader import find_device
from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.errors import SetupError
from pdserve.kernels.attention import is_batch_invariant

VISIBLE = "CUDA_VISIBLE_DEVICES"


def config_of_leader(config: InstanceConfig) -> InstanceConfig:
    """Return the settings of rank 0, with its device. GPUs are taken in order, from that of `--device` on.

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
    return replace(config, device=f"cuda:{first}")


def config_of_follower(config: InstanceConfig, rank: int) -> InstanceConfig:
    """Return the settings of another rank from those of rank 0, and make its GPU the first that its process sees.

    Each new thread begins on the first GPU, and would otherwise take memory of rank 0's. Called before CUDA starts.
    """
    kind, _, number = config.device.partition(":")
    if kind != "cuda":
        return config
    first = int(number)
    names = os.environ.get(VISIBLE, ",".join(map(str, range(first + config.tensor_parallel_size)))).split(",")
    own = names.pop(first + rank)
    os.environ[VISIBLE] = ",".join((own, *names))  # NCCL reaches the others
    return replace(config, device="cuda:0")


def use_threads(config: InstanceConfig) -> None:
    """Limit this process to its share of the CPU threads of its instance."""
    torch.set_num_threads(max(1, (config.threads or torch.get_num_threads()) // config.tensor_parallel_size))


def make_group(config: InstanceConfig, rank: int, port: int, listener: socket.socket | None = None) -> RankGroup:
    """Return one rank's end of the group, from its settings."""
    device = torch.device(config.device)
    ordered = is_batch_invariant(config.batch_invariant, device)
    return RankGroup(rank, config.tensor_parallel_size, device, port, listener, ordered=ordered)
