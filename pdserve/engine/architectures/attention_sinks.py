"""Attention sinks (gpt-oss): a learned logit of each query head, which takes weight from the tokens and has no value."""

import torch

from pdserve.engine.architectures.adapters import Source


def has_sinks(model: torch.nn.Module) -> bool:
    """Return whether some layer has attention sinks."""
    return any(isinstance(getattr(module, "sinks", None), torch.nn.Parameter) for module in model.modules())


def adapt(model: torch.nn.Module, source: Source) -> None:
    """Convert sinks to float32 in place, as kernels take them: an adapter."""
    for module in model.modules():
        if isinstance(sinks := getattr(module, "sinks", None), torch.nn.Parameter):
            sinks.data = sinks.data.float()
