"""Linear layers in 16 bits over weights that are packed once, and products of plain weights, each row apart from the others.

By linear.cpp in bfloat16 on Intel AMX, by products.cpp else. A row has the same bits for any number of rows and of threads.
Shape legend: K input features, N output features, B products that are computed together.
"""

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from pdserve.kernels import memory, native
from pdserve.kernels.elementwise import ACTIVATIONS

TILE_K, UNIT_N, _RUN = 32, 32, 16  # K and N are padded with zeros to multiples of the first two; a run is 16 rows
_PAIRING = ("amx", "avx512bf16")  # instructions that multiply pairs along K
MATMUL = tuple(getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("matmul", "mm", "bmm"))


@cache
def has_amx() -> bool:
    """Return whether compiler, processor and operating system all support AMX. native.py logs if only the processor does."""
    return native.is_available() and bool(native.library().pdserve_amx())


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Return whether products in this dtype read pairs of weights along K."""
    return dtype == torch.bfloat16 and native.instructions() in _PAIRING


class PackedWeight:
    """A 16-bit weight [N, K] or [B, N, K] in the order of the kernels.

    In a model's code it takes the place of the tensor in `torch.nn.functional.linear(x, weight)`, if `is_transposed` in
    `x @ weight` and `torch.bmm(x, weight)`, and of a tensor whose first dimension is indexed. Any other use raises TypeError.

    Attributes:
        data: [(N + padding) · (K + padding)], or [B, …].
        is_transposed: the weight was given as [K, N] or [B, K, N].
        features: K and N.
        order: [K], the inputs in the order in which they are summed; None: as they come.
    """

    order: torch.Tensor | None = None

    def __init__(self, data: torch.Tensor, shape: tuple[int, ...], is_transposed: bool) -> None:
        self.data = data
        self.shape = shape
        self.is_transposed = is_transposed
        self.features = (shape[-2], shape[-1]) if is_transposed else (shape[-1], shape[-2])
        self.dtype = data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> "PackedWeight":
        if len(self.shape) != 3 or getattr(index, "ndim", 0) > 0:
            raise TypeError("a packed weight is indexed by one number")
        return self.item(int(index))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return what is read in each product."""
        return [self.data]

    def item(self, index: int) -> "PackedWeight":
        """Return one [N, K] of [B, N, K]."""
        return PackedWeight(self.data[index], self.shape[1:], self.is_transposed)

    def multiply(self, y: torch.Tensor, x: torch.Tensor, bias_N: torch.Tensor | None, rows: int, batch: int) -> None:
        """Write x · weightᵀ + bias to y. Both are contiguous, [B, rows, K] and [B, rows, N], and K is padded."""
        _multiply(self, y, x, bias_N, rows, batch)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        x, weight, *rest = args
        bias = rest[0] if rest else (kwargs or {}).get("bias")
        known = MATMUL if isinstance(weight, cls) and weight.is_transposed else (F.linear,)
        if func not in known or isinstance(x, cls) or x.dtype != weight.dtype or x.dim() < len(weight.shape):
            raise TypeError(f"{getattr(func, '__name__', func)} of a packed weight")
        return linear(x, weight, bias)


@torch.inference_mode()
def pack(weight: torch.Tensor, *, transposed: bool = False) -> PackedWeight:
    """Return a copy of a 16-bit weight [N, K] or [B, N, K] in the order of the kernels, in huge pages where there are any.

    Args:
        transposed: the weight is [K, N] or [B, K, N].
    """
    rows = weight.mT if transposed else weight
    padding = (0, -rows.shape[-1] % TILE_K, 0, -rows.shape[-2] % UNIT_N)
    rows = (F.pad(rows, padding) if any(padding) else rows).contiguous()
    packed = torch.empty(rows.shape, dtype=rows.dtype).flatten(-2)
    memory.huge_pages(packed)
    pairs = multiplies_pairs(rows.dtype)
    runs, in_features = rows[..., 0].numel() // _RUN, rows.shape[-1]
    native.library().pdserve_pack(packed.data_ptr(), rows.data_ptr(), runs, in_features, pairs, torch.get_num_threads())
    return PackedWeight(packed, tuple(weight.shape), transposed)


def linear(x: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias, summed in float32 and rounded once.

    Args:
        x: [..., K], or [B, ..., K] if the weight is [B, N, K].
    """
    bias_N = _checked_bias(bias_N, weight.features[1], x.dtype)
    y, x = _operands(x, weight)
    batch = weight.shape[0] if len(weight.shape) == 3 else 1
    assert batch == 1 or x.shape[0] == batch
    weight.multiply(y, x, bias_N, x.numel() // x.shape[-1] // batch, batch)
    return y


def gated(x: torch.Tensor, gate: PackedWeight, up: PackedWeight, activation: str) -> torch.Tensor:
    """Return activation(x · gateᵀ) · (x · upᵀ), [..., K] → [..., N] in bfloat16 on AMX.

    Equals `linear` of each and `elementwise.gate` bit for bit, but intermediate results stay in the processor's caches.
    """
    assert has_amx() and up.dtype == x.dtype == torch.bfloat16 and up.shape == gate.shape and len(up.shape) == 2
    assert type(gate) is type(up) is PackedWeight
    y, x = _operands(x, gate)
    _multiply(gate, y, x, None, x.numel() // x.shape[-1], 1, up, ACTIVATIONS.index(activation))
    return y


def plain(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias of one dtype, [..., K] → [..., N], summed in float32; for weights that cannot be packed."""
    x, weight_NK = x.contiguous(), weight_NK.contiguous()
    out_features, in_features = weight_NK.shape
    bias_N = _checked_bias(bias_N, out_features, x.dtype)
    assert x.dtype == weight_NK.dtype and x.shape[-1] == in_features
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype)
    sizes = x.numel() // in_features, in_features, out_features, torch.get_num_threads()
    operands = native.addresses(y, x, weight_NK, bias_N)
    native.functions().pdserve_plain(native.DTYPES.index(x.dtype), *operands, *sizes)
    return y


def _checked_bias(bias_N: torch.Tensor | None, out_features: int, dtype: torch.dtype) -> torch.Tensor | None:
    assert bias_N is None or (bias_N.shape == (out_features,) and bias_N.dtype == dtype)
    return None if bias_N is None else bias_N.contiguous()


def _operands(x: torch.Tensor, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the product, and x with K padded."""
    in_features, out_features = weight.features
    assert x.dtype == weight.dtype and x.shape[-1] == in_features
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype)
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    return y, F.pad(x, (0, padding)) if (padding := -in_features % TILE_K) else x.contiguous()


def _multiply(
    weight: PackedWeight,
    y: torch.Tensor,
    x: torch.Tensor,
    bias_N: torch.Tensor | None,
    rows: int,
    batch: int,
    up: PackedWeight | None = None,
    activation: int = 0,
) -> None:
    operands = native.addresses(y, x, weight.data, bias_N)
    sizes = (rows, x.shape[-1], y.shape[-1], batch, torch.get_num_threads())
    if x.dtype == torch.bfloat16 and has_amx():
        of_up = native.addresses(None if up is None else up.data)
        native.functions().pdserve_linear(*operands, *sizes, *of_up, activation)
    else:
        native.functions().pdserve_packed(native.DTYPES.index(x.dtype), *operands, *sizes)
