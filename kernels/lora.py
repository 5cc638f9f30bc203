"""Low-rank products of adapters, for rows with different adapters in one call: lora.cpp, and the torch reference.

Shape legend: T rows of a step, K input features, N output features, R rank of an adapter, S slots.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.kernels import native

RANK_UNIT = 4  # ranks are padded with zeros to multiples of this
_SLOT_WORDS = 4  # of `Slot` in lora.cpp: addresses of A and B, rank, scale as a double


@dataclass(frozen=True)
class Matrices:
    """An adapter's matrices for one layer.

    Attributes:
        a_RK, b_RN: A, and B transposed, contiguous, with R a multiple of `RANK_UNIT`.
        scale: factor of their product.
    """

    a_RK: torch.Tensor
    b_RN: torch.Tensor
    scale: float


def padded(rank: int) -> int:
    """Return a rank with its padding."""
    return -(-rank // RANK_UNIT) * RANK_UNIT


def matrices(a_RK: torch.Tensor, b_RN: torch.Tensor, scale: float, dtype: torch.dtype) -> Matrices:
    """Return matrices as the kernels read them: in the dtype of the layer, and padded."""
    padding = (0, 0, 0, -len(a_RK) % RANK_UNIT)
    a_RK, b_RN = (torch.nn.functional.pad(one.to(dtype), padding).contiguous() for one in (a_RK, b_RN))
    return Matrices(a_RK, b_RN, scale)


class Rows:
    """The rows of a step that have an adapter, by slot. Its tensors stay where they are: recorded steps read them there.

    Args:
        num_slots: adapters that one step may have.
        max_rows: rows that one step may have.

    Attributes:
        num_rows: of the step, with and without an adapter.
    """

    def __init__(self, num_slots: int, max_rows: int) -> None:
        self.num_slots, self.num_rows = num_slots, 0
        self.rows_T = torch.zeros(max_rows, dtype=torch.long)
        self.starts_S = torch.zeros(num_slots + 1, dtype=torch.long)  # and the end of the last one

    def set(self, slots: Sequence[int]) -> None:
        """Set the slot of each row of the step; -1: it has no adapter."""
        self.num_rows = len(slots)
        slots_T = torch.tensor(slots, dtype=torch.long)
        order_T = slots_T.argsort(stable=True)
        num_plain = int((slots_T < 0).sum())
        rows_T = order_T[num_plain:]
        self.rows_T[: len(rows_T)] = rows_T
        self.starts_S[1:] = torch.bincount(slots_T[rows_T], minlength=self.num_slots).cumsum(0)


class Table:
    """The matrices of one layer by slot; None: the adapter in that slot adds nothing to the layer."""

    def __init__(self, num_slots: int) -> None:
        self.matrices: list[Matrices | None] = [None] * num_slots
        self.words_S4 = torch.zeros((num_slots, _SLOT_WORDS), dtype=torch.long)  # as lora.cpp reads it

    def set(self, slot: int, of: Matrices | None) -> None:
        """Put an adapter's matrices into a slot."""
        self.matrices[slot] = of
        words = [0] * _SLOT_WORDS
        if of is not None:
            (scale,) = struct.unpack("<q", struct.pack("<d", of.scale))
            words = [of.a_RK.data_ptr(), of.b_RN.data_ptr(), len(of.a_RK), scale]
        self.words_S4[slot] = torch.tensor(words, dtype=torch.long)


def add(x: torch.Tensor, y: torch.Tensor, rows: Rows, table: Table, max_rank: int) -> torch.Tensor:
    """Add each row's low-rank product to y in place, and return y.

    Args:
        x: [..., K], of the dtype of y, [..., N], and of all matrices.
        max_rank: of the adapters in all slots, at any time, padded.
    """
    assert x.dtype == y.dtype and y.is_contiguous()
    x, threads = x.contiguous(), torch.get_num_threads()
    in_features, out_features = x.shape[-1], y.shape[-1]
    num_rows = x.numel() // in_features
    assert num_rows == rows.num_rows, "the layer gets other rows than the step has"
    stride = -(-in_features // native.library().pdserve_shrink_chunk()) * max_rank
    h = torch.empty(num_rows * stride, dtype=torch.float32)
    dtype, num_slots = native.DTYPES.index(x.dtype), len(table.matrices)
    of_rows, starts, words = native.addresses(rows.rows_T, rows.starts_S, table.words_S4)
    grouped, call = (of_rows, starts, num_slots, words), native.functions()
    call.pdserve_shrink(dtype, *native.addresses(h, x), *grouped, in_features, max_rank, threads)
    call.pdserve_expand(dtype, *native.addresses(y, h), stride, *grouped, out_features, threads)
    return y


def add_by_torch(x: torch.Tensor, y: torch.Tensor, rows: Rows, table: Table, max_rank: int) -> torch.Tensor:
    """Return what `add` does, within rounding: the reference, for machines without a compiler."""
    x_TK, y_TN = x.flatten(0, -2), y.flatten(0, -2)
    starts = rows.starts_S.tolist()
    for of, first, end in zip(table.matrices, starts, starts[1:], strict=False):
        if of is not None and first < end:
            rows_R = rows.rows_T[first:end]
            h_RR = x_TK[rows_R].float() @ of.a_RK.float().T * of.scale
            y_TN[rows_R] = (y_TN[rows_R].float() + h_RR @ of.b_RN.float()).to(y.dtype)
    return y
