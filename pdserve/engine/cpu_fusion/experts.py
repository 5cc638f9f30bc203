"""Experts of a mixture as one torch operator, for 16-bit types on CPUs, and on GPUs with --batch-invariant.

transformers' grouped products choose a kernel by the number of rows of each expert (see row_products.py), and its loop over
the experts depends on values of tensors, which recorded steps (step_graph.py) cannot repeat. So the loop runs within an
operator.
"""

from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pdserve.engine.cpu_fusion.row_products import RowProducts

NAME = "pdserve_rows"
_modules: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()


def register() -> None:
    """Register `experts_implementation=NAME` with transformers. Idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _forward(
    module: torch.nn.Module, hidden_TN: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    _modules[id(module)] = module
    output_TN: torch.Tensor = _experts(hidden_TN, top_k_index, top_k_weights, id(module))
    return output_TN


def _row_functions(device: torch.device) -> TorchFunctionMode:
    if device.type == "cpu":
        return RowProducts()
    from pdserve.kernels.gpu.row_functions import RowFunctions

    return RowFunctions()


@torch.library.custom_op("pdserve::experts", mutates_args=())
def _experts(
    hidden_TN: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, module_id: int
) -> torch.Tensor:
    module = _modules[module_id]
    loop_over_experts = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    with _row_functions(hidden_TN.device):
        output_TN: torch.Tensor = loop_over_experts(module, hidden_TN, top_k_index, top_k_weights)
    return output_TN
