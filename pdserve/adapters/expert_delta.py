"""Deltas of adapters on experts of a mixture: added to an expert's rows whose adapters have matrices for it.

    the model's loop over experts ─► weight[expert] ─► product of its rows ─► + low-rank products of these rows, by slot

The loop is transformers', over a view of the module whose stacked weights add. So a row without an adapter gets the bits of a
step without adapters, and while no row has one, the module is as it was.

Shape legend: T rows of a step, C choices of experts for each, P = T · C pairs of both, E experts, S slots, K input features.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode

from pdserve.adapters.experts import MOST_PARTS, StackedWeight
from pdserve.engine.cpu_fusion.experts import row_functions
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.kernels import lora, native

_Add = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]  # expert, x, y
_deltas: "WeakValueDictionary[int, ExpertsDelta]" = WeakValueDictionary()


class _RowsOfExpert(NamedTuple):
    """See `lora.GroupedRows`: of those that the loop gives to an expert."""

    num_rows: int
    rows_T: torch.Tensor
    starts_S: torch.Tensor


class _ExpertRows:
    """The rows of each expert that have an adapter, by slot.

    Args:
        slots_T: of each row; -1: it has no adapter.
        experts_TC: that each row has chosen.
    """

    def __init__(self, slots_T: torch.Tensor, experts_TC: torch.Tensor, num_experts: int, num_slots: int) -> None:
        experts_P = experts_TC.T.reshape(-1)  # the loop takes an expert's rows by choice, then by row
        slots_P = slots_T.repeat(experts_TC.shape[1])
        order_P = experts_P.argsort(stable=True)
        experts_P, slots_P = experts_P[order_P], slots_P[order_P]
        self._counts_E = torch.bincount(experts_P, minlength=num_experts)
        places_P = torch.arange(len(experts_P)) - (self._counts_E.cumsum(0) - self._counts_E)[experts_P]
        has_P = slots_P >= 0
        groups_P = (experts_P * num_slots + slots_P)[has_P]
        self._rows_P = places_P[has_P][groups_P.argsort(stable=True)]
        counts_ES = torch.bincount(groups_P, minlength=num_experts * num_slots).view(num_experts, num_slots)
        self._starts_ES = torch.nn.functional.pad(counts_ES.cumsum(1), (1, 0))
        self._firsts_E = counts_ES.sum(1).cumsum(0) - self._starts_ES[:, -1]

    def of(self, expert: int) -> _RowsOfExpert | None:
        """Return those of one expert; None: none has an adapter."""
        if not int(self._starts_ES[expert, -1]):
            return None
        first = int(self._firsts_E[expert])
        return _RowsOfExpert(int(self._counts_E[expert]), self._rows_P[first:], self._starts_ES[expert])


class _Product:
    """A weight to whose products something is added, in the place of a tensor in a model's code."""

    def __init__(self, weight: Any, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.weight, self.add = weight, add

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)} of a weight to which something is added")

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{name} of a weight to which something is added")

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weight.dtype
        return dtype

    def type(self, dtype: torch.dtype) -> "_Product":
        return _Product(self.weight.to(dtype), self.add)

    to = type

    def float(self) -> "_Product":
        return self.type(torch.float32)


class _Products(TorchFunctionMode):
    """Within this context, a product with a `_Product` is that with its weight and what is added."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) > 1 and isinstance(args[1], _Product):
            x, product, *rest = args
            return product.add(x, func(x, product.weight, *rest, **kwargs))
        return func(*args, **kwargs)


def forward_with(module: Any, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *inputs: Any) -> Any:
    """Run the forward of a router, which multiplies by its weight, with what `add` adds to this product.

    Raises:
        ValueError: it does not multiply by it once.
    """
    products = list[torch.Tensor]()

    def add_once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        products.append(y)
        return add(x, y)

    with _Products():
        outputs = type(module).forward(_View(module, {"weight": _Product(module.weight, add_once)}), *inputs)
    if len(products) != 1:
        raise ValueError(f"{type(module).__name__} multiplies {len(products)} times by its weight, and not once")
    return outputs


@dataclass(frozen=True)
class _Stacked:
    """A stacked weight to whose products something is added."""

    weight: Any
    add: _Add

    def __getitem__(self, expert: Any) -> _Product:
        return _Product(self.weight[expert], partial(self.add, int(expert)))


class _View:
    """A module with other weights."""

    def __init__(self, module: torch.nn.Module, weights: "Mapping[str, _Stacked | _Product]") -> None:
        self.__dict__.update(weights)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ExpertsDelta:
    """Adds to the products of a module of experts.

    Args:
        rows: of the step.
        max_rank: of an adapter on one layer of an expert.

    Raises:
        ValueError: the module computes other products.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: Sequence[StackedWeight],
        rows: lora.Rows,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._module: Any = module
        self._loop: Any = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        self._rows, self._dtype = rows, dtype
        self._num_experts = weights[0].num_experts
        self._tables = {one.name: lora.ExpertTable(one.num_experts, rows.num_slots) for one in weights}
        self._max_rank = lora.padded(max_rank * MOST_PARTS)
        self._low_rank = lora.add if native.is_available() else lora.add_by_torch
        _deltas[id(self)] = self
        self._try_order(weights[0])

    def fill(self, slot: int, stacks: Mapping[str, lora.Stack] | None) -> None:
        """Put an adapter's matrices into a slot, by the names of weights; None: it has none."""
        for name, table in self._tables.items():
            table.set(slot, (stacks or {}).get(name))

    def switch(self, on: bool) -> None:
        """Let the module add, or not."""
        if on:
            self._module.forward = self._forward
        elif "forward" in vars(self._module):
            del self._module.forward

    def _forward(self, hidden_TK: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        y_TK: torch.Tensor = _adapted_experts(hidden_TK, top_k_index, top_k_weights, id(self))
        return y_TK

    def compute(self, hidden_TK: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        """Return the output of the module. Raises ValueError if it gets other rows than the step has."""
        if len(hidden_TK) != self._rows.num_rows or hidden_TK.dtype != self._dtype:
            raise ValueError(f"experts get {len(hidden_TK)} rows of {hidden_TK.dtype}")
        used = {name: table for name, table in self._tables.items() if any(table.stacks)}
        rows = _ExpertRows(self._rows.slots_T[: len(hidden_TK)], experts_TC, self._num_experts, self._rows.num_slots)
        adds = {name: partial(self._add, table, rows) for name, table in used.items()}
        return self._run(adds, hidden_TK, experts_TC, weights_TC)

    def _add(
        self, table: lora.ExpertTable, rows: _ExpertRows, expert: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        of_expert = rows.of(expert)
        return y if of_expert is None else self._low_rank(x, y, of_expert, table.of(expert), self._max_rank)

    def _run(self, adds: Mapping[str, _Add], *inputs: torch.Tensor) -> torch.Tensor:
        weights = {name: _Stacked(getattr(self._module, name), add) for name, add in adds.items()}
        is_fused = self._dtype in FUSED_DTYPES
        functions = row_functions(self._module, inputs[0].device) if is_fused else nullcontext()
        with native.without_recording(), functions, _Products():
            y_TK: torch.Tensor = self._loop(_View(self._module, weights), *inputs)
        return y_TK

    @torch.inference_mode()
    def _try_order(self, weight: StackedWeight) -> None:
        """Raise ValueError unless the loop gives products the rows of an expert in the order of `_ExpertRows`."""
        last, random = weight.num_experts - 1, torch.Generator().manual_seed(0)
        experts_TC = torch.tensor([[0, last], [last, 0], [last, 0]])
        hidden_TK = torch.randn((len(experts_TC), weight.features[0]), generator=random).to(self._dtype)
        tried = list[int]()

        def add(expert: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            _, rows = torch.where(experts_TC.T.eq(expert))
            if not torch.equal(x, hidden_TK[rows]):
                raise ValueError("the loop over its experts takes rows in another order")
            tried.append(expert)
            return y

        self._run({weight.name: add}, hidden_TK, experts_TC, torch.full((3, 2), 0.5, dtype=self._dtype))
        if {*tried} != {0, last}:
            raise ValueError("its experts are computed without a loop over them")


@torch.library.custom_op("pdserve::adapted_experts", mutates_args=())
def _adapted_experts(
    hidden_TK: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, delta_id: int
) -> torch.Tensor:
    return _deltas[delta_id].compute(hidden_TK, top_k_index, top_k_weights)
