"""Whether a module may be replaced is tried on a few random numbers: what is said here of when two results are the same."""

import torch

DTYPES = (torch.bfloat16, torch.float16)  # float32 keeps transformers' arithmetic, to the last bit


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Of one dtype, and within one unit in its last place: sums in another order may round to the next number."""
    unit = torch.finfo(x.dtype).eps
    return x.dtype == y.dtype and bool(torch.isclose(x.float(), y.float(), rtol=unit, atol=2**-20).all())
