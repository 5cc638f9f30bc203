"""A model in 16 bits, rounded to weights of 4 or 8 bits as it is loaded.

Each group of 32 weights along K shares a scale, as in llama.cpp's Q4_0 and Q8_0. The output layer has 8 bits in any case.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from pdserve.kernels.low_bit import quantize

log = logging.getLogger(__name__)

GROUP = 32
BITS = {"int4": 4, "int8": 8}
HEAD_BITS = 8


@torch.inference_mode()
def round_weights(model: torch.nn.Module, name: str) -> int:
    """Replace the weights of linear layers and experts in place by rounded ones, which have `codes`.

    Args:
        name: one of `BITS`.

    Returns:
        The number of weights replaced.
    """
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    count = 0
    for module, key, transposed in list(_weights(model)):
        parameter = getattr(module, key)
        if module is head:  # it may be the input embedding's, which stays as it is
            parameter = torch.nn.Parameter(parameter.data.clone(), requires_grad=False)
            setattr(module, key, parameter)
        bits = HEAD_BITS if module is head else BITS[name]
        codes = quantize(parameter.data, bits, GROUP, transposed=transposed)
        rounded = codes.dequantize(parameter.dtype)
        parameter.data.copy_(rounded.mT if transposed else rounded)
        parameter.codes = codes
        count += 1
    log.info("%d weights are rounded to %s", count, name)
    return count


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, bool]]:
    """Yield the module and the name of each weight of a product, and whether it is [K, N]."""
    for module in model.modules():
        if type(module) in (torch.nn.Linear, Conv1D):
            yield module, "weight", type(module) is Conv1D
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield module, name, bool(getattr(module, "is_transposed", False))
