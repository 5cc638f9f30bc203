"""Matrix products whose rows do not depend on how many there are, for 16-bit types on CPUs.

torch and oneDNN choose another kernel, which rounds otherwise, for one row and for small products. So one row is computed as
two, which takes no longer (the weights are read once), and a small product with as many rows as the usual kernel needs.

Larger numbers of rows are rounded up, too: for each number that it meets, oneDNN compiles kernels, which take 0.4 ms and
0.6 MiB per shape of weights and are never freed.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES

_SMALL_PRODUCT = 16**3  # multiplications up to which torch does not use oneDNN
_FLOAT32_ROWS = 16  # from which torch uses one kernel in float32 (MKL: measured with 1 to 3 threads: from 8)
_LARGEST_STEP = 64  # between two numbers of rows


def round_up(rows: int) -> int:
    """Return the next number of rows of those for which kernels are compiled: all to 16, then eight of each power of two.

    Above 1,024, the multiples of 64.
    """
    step = min(_LARGEST_STEP, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def padded_rows(rows: int, weight_size: int) -> int:
    """Return the number of rows with which a product of `rows` rows is computed, for a weight of `weight_size` numbers."""
    return round_up(max(rows, 2, _SMALL_PRODUCT // weight_size + 1))


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [..., K] as [rows, K]; the added rows are 0."""
    x_RK = x.reshape(-1, x.shape[-1])
    return F.pad(x_RK, (0, 0, 0, rows - len(x_RK)))


class RowProducts(TorchFunctionMode):
    """Within this context, `torch.nn.functional.linear` gives each row the same bits in any batch. For models in 16 bits.

    For layers that are no `torch.nn.Linear`, such as the experts and routers of a mixture. Some routers are in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].numel():
            x, weight_NK, *rest = args
            rows = x.numel() // x.shape[-1]
            is_narrow = x.dtype in FUSED_DTYPES
            rows_RK = pad_rows(x, padded_rows(rows, weight_NK.numel()) if is_narrow else max(rows, _FLOAT32_ROWS))
            y_RN = func(rows_RK, weight_NK, *rest, **kwargs)[:rows]
            return y_RN.reshape(*x.shape[:-1], len(weight_NK))
        return func(*args, **kwargs)


def needs_row_products(model: torch.nn.Module) -> bool:
    """Return whether a model on the CPU has 16-bit products that `prepack` has not replaced."""
    return any(
        parameter.dim() > 1 and parameter.dtype in FUSED_DTYPES and parameter.device.type == "cpu"
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )
