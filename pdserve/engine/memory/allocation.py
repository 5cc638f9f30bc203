"""Allocation of an engine's KV memory: as many blocks as are configured, or as the memory of the device allows."""

import math
import mmap

import torch

from pdserve.config import EngineConfig, parse_size
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.checkpoint_loader import cpu_memory_available
from pdserve.engine.memory.groups import blocks_in, pages_for
from pdserve.engine.memory.kv_memory import KVMemory, page_numbers, pool_groups
from pdserve.errors import SetupError
from pdserve.kernels.batch import Kernel
from pdserve.kernels.memory import huge_pages
from pdserve.plugins import extension

CPU_MEMORY_FRACTION = 0.25  # of free memory, the default pool size: leaves room for a second instance and a desktop


def allocate(checkpoint: Checkpoint, config: EngineConfig, kernel: Kernel, step_bytes: int) -> KVMemory:
    """Return the KV memory of an engine. All ranks of an instance get as many blocks as fit on each of them.

    Args:
        step_bytes: memory of the device that steps need; 0 on CPUs, where it is not measured.

    Raises:
        SetupError: fewer than 2 blocks fit, or the swap space holds no block or exceeds the free memory.
    """
    num_blocks = pool_size(checkpoint, config, step_bytes)
    if checkpoint.group is not None:
        (num_blocks,) = checkpoint.group.minimum([num_blocks])
    pool_NX = zeroed_blocks(checkpoint, num_blocks, checkpoint.device)
    host_NX = zeroed_blocks(checkpoint, _num_host_blocks(checkpoint, config), torch.device("cpu"))
    if checkpoint.device.type == "cuda":
        try:
            extension("gpu").pin(host_NX)
        except MemoryError as error:
            raise SetupError(f"--swap-space: {error}") from error
    return KVMemory(pool_NX, host_NX, kernel, checkpoint.layout, checkpoint.spec)


def zeroed_blocks(checkpoint: Checkpoint, count: int, device: torch.device) -> torch.Tensor:
    """Return new memory for `count` pages, [count, X]. On CPUs the system clears each page when it is first used."""
    shape_NX = (count, page_numbers(checkpoint.layout))
    if device.type != "cpu" or not count:
        return torch.zeros(shape_NX, dtype=checkpoint.kv_dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape_NX) * checkpoint.kv_dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    blocks_NX = torch.frombuffer(memory, dtype=checkpoint.kv_dtype).view(shape_NX)
    huge_pages(blocks_NX)
    return blocks_NX


def pool_size(checkpoint: Checkpoint, config: EngineConfig, step_bytes: int) -> int:
    """Return the pages of the pool: as configured, or as the memory allows beside that of a step.

    Raises:
        SetupError: fewer than 2 blocks fit.
    """
    block_bytes, groups = checkpoint.layout.block_bytes, pool_groups(checkpoint.layout, 0)
    if config.num_blocks is not None:
        count = config.num_blocks
        num_pages = pages_for(count, groups, config.max_num_seqs)
    else:
        useful = config.max_num_seqs * -(-checkpoint.context_length // config.block_size)
        page_bytes = page_numbers(checkpoint.layout) * checkpoint.layout.itemsize
        num_pages = _pool_bytes(checkpoint, config, step_bytes) // page_bytes
        count = min(blocks_in(num_pages, groups), useful)
        num_pages = min(num_pages, pages_for(count, groups, config.max_num_seqs))
    if count < 2:
        where = ""
        if checkpoint.device.type == "cuda":
            memory = extension("gpu").describe_memory(checkpoint.device, config.gpu_memory_utilization)
            where = f" ({memory}; a step takes {step_bytes / 2**30:.1f} GiB)"
        raise SetupError(
            f"no room for KV: a block takes {block_bytes} bytes and {count} would fit{where}; "
            "raise --kv-cache-memory or --num-blocks, or lower --max-num-batched-tokens"
        )
    return num_pages


def _pool_bytes(checkpoint: Checkpoint, config: EngineConfig, step_bytes: int) -> int:
    if config.kv_cache_memory is not None:
        return parse_size(config.kv_cache_memory)
    if checkpoint.device.type == "cpu":
        return int(cpu_memory_available() * CPU_MEMORY_FRACTION) // checkpoint.layout.ranks
    free: int = extension("gpu").pool_bytes(checkpoint.device, step_bytes, config.gpu_memory_utilization)
    return free


def _num_host_blocks(checkpoint: Checkpoint, config: EngineConfig) -> int:
    size = int(config.swap_space * 2**30) // checkpoint.layout.ranks
    block_bytes = page_numbers(checkpoint.layout) * checkpoint.layout.itemsize
    if 0 < size < block_bytes:
        raise SetupError(f"--swap-space {config.swap_space} GiB is less than one block of {block_bytes} bytes")
    if size > (free := cpu_memory_available()):
        raise SetupError(f"--swap-space {config.swap_space} GiB is more than the {free / 2**30:.1f} GiB that are free")
    return size // block_bytes
