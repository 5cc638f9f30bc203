"""Functions of torch that round a row otherwise in another batch, replaced within a model's forward on a GPU.

These are linear layers, and the means and sums over the last dimension of norms and routers. The others that decoders use
treat elements alone (activations, rotary embeddings), or compute a row in one block whatever their number (softmax, layer
norm).
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pdserve.kernels.gpu.matmul import linear
from pdserve.kernels.gpu.row_sum import row_sum

_MEANS, _SUMS = (torch.Tensor.mean, torch.mean), (torch.Tensor.sum, torch.sum)
_OVER_ROWS = (((-1,), {"keepdim": True}), ((), {"dim": -1, "keepdim": True}))  # arguments as models write them


class RowFunctions(TorchFunctionMode):
    """Within this context, these functions give each row the same bits in any batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].numel():
            return linear(*args, **kwargs)
        if func in (*_MEANS, *_SUMS) and (args[1:], kwargs) in _OVER_ROWS:
            x: torch.Tensor = args[0]
            if x.is_floating_point() and x.numel():
                total = row_sum(x)
                return (total / x.shape[-1] if func in _MEANS else total).to(x.dtype)
        return func(*args, **kwargs)
