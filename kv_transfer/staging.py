"""A pool's bytes as host memory, which is what connectors move."""

import numpy as np
import numpy.typing as npt
import torch


def host_rows(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The pool as uint8 rows [num_blocks, block_bytes], sharing its memory.

    Raises:
        ValueError: the pool is not in host memory.
    """
    if pool.device.type != "cpu":
        raise ValueError(f"a pool on {pool.device} needs staging")
    rows: npt.NDArray[np.uint8] = pool.view(torch.uint8).reshape(pool.shape[0], -1).numpy()
    return rows
