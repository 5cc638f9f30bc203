"""Equality test between a fused layer and the module that it may replace."""

import torch

FUSED_DTYPES = (torch.bfloat16, torch.float16)  # float32 keeps the arithmetic of transformers, bit for bit


def nearly_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype differ by at most one unit in the last place.

    A sum in another order may round to the next number.
    """
    unit = torch.finfo(x.dtype).eps
    return x.dtype == y.dtype and bool(torch.isclose(x.float(), y.float(), rtol=unit, atol=2**-20).all())
