"""Matrix products whose rows do not depend on how many there are, for 16-bit types on CPUs.

torch, oneDNN and MKL choose a kernel, and with it an order of summation, by the number of rows, the shape and the processor.
So no product of a model in 16 bits is theirs: layers are packed for our kernels (linear_method.py, experts.py), and products
with other weights, such as those of a mixture's router, are computed by ours from the weights as they are.

torch computes some functions otherwise in the vectors of a tensor than at its end, and at the end of each thread's part. They
are computed from others.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pdserve.kernels import linear
from pdserve.kernels.linear import PackedWeight

_NAMES = ("addmm", "addmv", "addbmm", "baddbmm", "dot", "inner", "mv", "vdot")
_OTHER_PRODUCTS: set[Callable[..., Any]] = {
    *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES),
    *(torch.einsum, torch.tensordot, torch.chain_matmul, torch._grouped_mm, torch.conv1d, torch.conv2d, torch.conv3d),
    *(F.bilinear, F.grouped_mm, F.scaled_dot_product_attention),
}


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x * _sigmoid(x)


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    return (beta * x.clamp(min=0) + torch.log1p(torch.exp(-beta * x.abs()))) / beta


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    y = x.float()
    if approximate == "tanh":
        share = torch.tanh((y + 0.044715 * y.pow(3)) * math.sqrt(2 / math.pi))
    else:
        share = torch.erf(y * math.sqrt(0.5))
    return (0.5 * y * (1 + share)).to(x.dtype)


_ELEMENTWISE: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    F.gelu: _gelu,
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid), _sigmoid),
    F.silu: _silu,
    F.softplus: _softplus,
}


class RowProducts(TorchFunctionMode):
    """Within this context, `torch.nn.functional.linear` gives each row the same bits in any batch.

    Attributes:
        is_used: whether it has computed anything.
        inexact: names of torch's products that were called, whose rows may depend on the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_used = False
        self.inexact: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not isinstance(args[1], PackedWeight):
            self.is_used = True
            return linear.plain(*args, **kwargs)
        # Only GELU differs in 16 bits, too.
        if func in _ELEMENTWISE and (func is F.gelu or args[0].dtype == torch.float32):
            self.is_used = True
            return _ELEMENTWISE[func](*args, **kwargs)
        if func in _OTHER_PRODUCTS or (func in linear.MATMUL and _sums(*args[:2])):
            self.inexact.add(func.__name__)
        return func(*args, **kwargs)


def _sums(x: torch.Tensor, y: torch.Tensor | PackedWeight) -> bool:
    """Return whether a product by torch has sums of several terms. That of positions and frequencies has none."""
    return x.shape[-1] > 1 and not isinstance(y, PackedWeight)
