"""Experts of a mixture as one torch operator, for 16-bit types on CPUs, and on GPUs with --batch-invariant.

transformers' grouped products choose a kernel by the number of rows of each expert (see row_products.py), and its loop over
the experts depends on values of tensors, which recorded steps (step_graph.py) cannot repeat. So the loop runs within an
operator. On CPUs, the experts' weights are packed in place of the plain ones.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pdserve.engine.cpu_fusion.linear_method import packed_weight
from pdserve.engine.cpu_fusion.row_products import RowProducts
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.kernels import linear, memory, native
from pdserve.plugins import extension

log = logging.getLogger(__name__)

NAME = "pdserve_rows"
_TEST_ROWS = 3  # of each expert that is tried
_REFUSALS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    AssertionError,
)  # of arguments that do not fit
_modules: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
_row_products: WeakKeyDictionary[torch.nn.Module, RowProducts] = WeakKeyDictionary()


def register() -> None:
    """Register `experts_implementation=NAME` with transformers. Idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def inexact_products(model: torch.nn.Module) -> set[str]:
    """Return the products of torch that experts have called so far, whose rows may depend on the batch."""
    return {name for module in model.modules() if module in _row_products for name in _row_products[module].inexact}


@torch.inference_mode()
def pack_experts(model: torch.nn.Module) -> int:
    """Replace in place the stacked 16-bit weights of experts, [E, N, K] or [E, K, N], by packed ones.

    Candidates are found by trial: models differ in which dimension is summed. Others keep their weights, and are slower.

    Returns:
        The number of modules changed.
    """
    packed: list[torch.nn.Module] = []
    for module in model.modules():
        parameters = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3 and parameter.dtype in FUSED_DTYPES
        }
        if not parameters:
            continue
        if any(_pack(module, parameters, transposed) for transposed in (False, True)):
            packed.append(module)
        else:
            log.warning(
                "the weights of %s are not packed, which is slower: it computes other products", type(module).__name__
            )
    for module in packed:  # after all are allocated: neighbours share pages
        _row_products.pop(module, None)  # the trial called torch's products with the plain weights
        for value in vars(module).values():
            if isinstance(value, linear.PackedWeight):
                for tensor in value.tensors():
                    memory.huge_pages(tensor, written=True)
    return len(packed)


def _pack(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], transposed: bool) -> bool:
    """Pack the weights of a module. Returns False, with its weights as before, unless it computes the same with them."""
    first = next(iter(parameters.values()))
    hidden_size = first.shape[1 if transposed else 2]
    trial = _trial(module, len(first), hidden_size, first.dtype)
    try:
        expected = module(*trial)
    except _REFUSALS:
        return False
    try:
        packed = {name: packed_weight(parameter, transposed=transposed) for name, parameter in parameters.items()}
    except ValueError:  # codes along the other dimension
        return False
    for name, weight in packed.items():
        delattr(module, name)
        setattr(module, name, weight)
    try:
        got = module(*trial)
        error = (got - expected).float().abs().max()
        if got.shape == expected.shape and error <= 8 * torch.finfo(first.dtype).eps * expected.float().abs().max():
            return True
    except _REFUSALS:
        pass
    for name, parameter in parameters.items():
        delattr(module, name)
        module.register_parameter(name, parameter)
    return False


def _trial(module: torch.nn.Module, num_experts: int, hidden_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return arguments of a module: rows for the first and the last expert with weights, or as many rows for each expert."""
    random = torch.Generator().manual_seed(0)
    if not hasattr(type(module).forward, "__wrapped__"):
        return (torch.randn((num_experts * _TEST_ROWS, hidden_size), generator=random).to(dtype),)
    hidden_TN = torch.randn((_TEST_ROWS, hidden_size), generator=random).to(dtype)
    experts_T2 = torch.tensor([[0, num_experts - 1]]).expand(_TEST_ROWS, -1)
    return hidden_TN, experts_T2, torch.full((_TEST_ROWS, 2), 0.5, dtype=dtype)


def _forward(
    module: torch.nn.Module, hidden_TN: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    _modules[id(module)] = module
    output_TN: torch.Tensor = _experts(hidden_TN, top_k_index, top_k_weights, id(module))
    return output_TN


def row_functions(module: torch.nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which 16-bit products of a module give each row the same bits in any batch."""
    if device.type == "cpu":
        return _row_products.setdefault(module, RowProducts()) if native.is_available() else nullcontext()
    functions: AbstractContextManager[Any] = extension("gpu").row_functions()
    return functions


@torch.library.custom_op("pdserve::experts", mutates_args=())
def _experts(
    hidden_TN: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, module_id: int
) -> torch.Tensor:
    module = _modules[module_id]
    loop_over_experts: Any = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    with native.without_recording(), row_functions(module, hidden_TN.device):
        output_TN: torch.Tensor = loop_over_experts(module, hidden_TN, top_k_index, top_k_weights)
    return output_TN
