"""Low-rank products of adapters, for rows with different adapters in one call: lora.cpp, and the torch reference.

Shape legend: T rows of a step, K input features, N output features, R rank of an adapter, S slots; E experts, X of them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pdserve.kernels import memory, native

RANK_UNIT = 4  # ranks are padded with zeros to multiples of this
_LINE = 64  # bytes of a cache line
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


class GroupedRows(Protocol):
    """Rows that have an adapter, by slot.

    Attributes:
        num_rows: with and without an adapter.
        rows_T: those with one; those of slot s are from starts_S[s] to starts_S[s + 1].
    """

    @property
    def num_rows(self) -> int: ...
    @property
    def rows_T(self) -> torch.Tensor: ...
    @property
    def starts_S(self) -> torch.Tensor: ...


class Rows:
    """The rows of a step that have an adapter, by slot. Its tensors stay where they are: recorded steps read them there.

    Args:
        num_slots: adapters that one step may have.
        max_rows: rows that one step may have.

    Attributes:
        num_rows: of the step, with and without an adapter.
        slots_T: the slot of each row; -1: it has no adapter.
    """

    def __init__(self, num_slots: int, max_rows: int) -> None:
        self.num_slots, self.num_rows = num_slots, 0
        self.slots_T = torch.full((max_rows,), -1)
        self.rows_T = torch.zeros(max_rows, dtype=torch.long)
        self.starts_S = torch.zeros(num_slots + 1, dtype=torch.long)  # and the end of the last one
        self._latest: Sequence[int] = ()

    def set(self, slots: Sequence[int]) -> None:
        """Set the slot of each row of the step; -1: it has no adapter."""
        if slots == self._latest:  # as in most steps of sequences that decode
            return
        self.num_rows, self._latest = len(slots), [*slots]
        slots_T = torch.tensor(slots, dtype=torch.long)
        self.slots_T[: len(slots)] = slots_T
        order_T = slots_T.argsort(stable=True)
        num_plain = int((slots_T < 0).sum())
        rows_T = order_T[num_plain:]
        self.rows_T[: len(rows_T)] = rows_T
        self.starts_S[1:] = torch.bincount(slots_T[rows_T], minlength=self.num_slots).cumsum(0)


class SlotMatrices(Protocol):
    """The matrices of one layer by slot, as `Table` has them."""

    @property
    def matrices(self) -> "Sequence[Matrices | None]": ...
    @property
    def words_S4(self) -> torch.Tensor: ...


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


@dataclass(frozen=True)
class Stack:
    """An adapter's matrices for one layer of some experts.

    Attributes:
        experts_X: their numbers.
        a_XRK, b_XRN, scales_X: see `Matrices`.
    """

    experts_X: torch.Tensor
    a_XRK: torch.Tensor
    b_XRN: torch.Tensor
    scales_X: torch.Tensor

    def of(self, expert: int) -> Matrices | None:
        """Return the matrices of one expert; None: it has none."""
        for at in (self.experts_X == expert).nonzero()[:, 0]:
            return Matrices(self.a_XRK[at], self.b_XRN[at], float(self.scales_X[at]))
        return None


def stack(experts: Sequence[int], a_XRK: torch.Tensor, b_XRN: torch.Tensor, scales: Sequence[float]) -> Stack:
    """Return matrices of some experts, padded, in the dtype in which they are."""
    padding = (0, 0, 0, -a_XRK.shape[1] % RANK_UNIT)
    a_XRK, b_XRN = (torch.nn.functional.pad(one, padding).contiguous() for one in (a_XRK, b_XRN))
    return Stack(torch.tensor(experts), a_XRK, b_XRN, torch.tensor(scales, dtype=torch.double))


Layers = dict[str, Matrices | dict[str, Stack]]


def together(layers: Layers) -> Layers:
    """Return the matrices of an adapter's layers in one piece of memory, in huge pages where there are any.

    Each step of its sequences reads all of it, and finding small pages takes a part of the time.
    """
    of_layers = [[one] if isinstance(one, Matrices) else [*one.values()] for one in layers.values()]
    tensors = [tensor for each in of_layers for one in each for tensor in _both(one)]
    sizes = [-(-one.nbytes // _LINE) * _LINE for one in tensors]
    piece = torch.empty(sum(sizes), dtype=torch.uint8)
    memory.huge_pages(piece)
    parts = iter(piece.split(sizes))

    def moved(one: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = next(parts)[: one.nbytes].view(one.dtype).view(one.shape)
        return part.copy_(one)

    def of(one: Matrices | dict[str, Stack]) -> Matrices | dict[str, Stack]:
        if isinstance(one, Matrices):
            return replace(one, a_RK=moved(one.a_RK), b_RN=moved(one.b_RN))
        return {name: replace(each, a_XRK=moved(each.a_XRK), b_XRN=moved(each.b_XRN)) for name, each in one.items()}

    return {name: of(one) for name, one in layers.items()}


def _both(one: Matrices | Stack) -> tuple[torch.Tensor, torch.Tensor]:
    return (one.a_RK, one.b_RN) if isinstance(one, Matrices) else (one.a_XRK, one.b_XRN)


@dataclass(frozen=True)
class _OfExpert:
    """See `SlotMatrices`."""

    words_S4: torch.Tensor
    expert: int
    stacks: Sequence[Stack | None]

    @property
    def matrices(self) -> list[Matrices | None]:
        return [None if one is None else one.of(self.expert) for one in self.stacks]


class ExpertTable:
    """The matrices of one layer of all experts, by expert and slot."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.stacks: list[Stack | None] = [None] * num_slots
        self._words_ES4 = torch.zeros((num_experts, num_slots, _SLOT_WORDS), dtype=torch.long)

    def set(self, slot: int, of: Stack | None) -> None:
        """Put an adapter's matrices into a slot."""
        self.stacks[slot] = of
        self._words_ES4[:, slot] = 0
        if of is not None:
            at_X = torch.arange(len(of.experts_X))
            addresses = [one.data_ptr() + at_X * one[0].nbytes for one in (of.a_XRK, of.b_XRN)]
            ranks_X = torch.full_like(at_X, of.a_XRK.shape[1])
            self._words_ES4[of.experts_X, slot] = torch.stack([*addresses, ranks_X, of.scales_X.view(torch.long)], 1)

    def of(self, expert: int) -> SlotMatrices:
        """Return the matrices of one expert."""
        return _OfExpert(self._words_ES4[expert], expert, self.stacks)


def add(x: torch.Tensor, y: torch.Tensor, rows: GroupedRows, table: SlotMatrices, max_rank: int) -> torch.Tensor:
    """Add each row's low-rank product to y in place, and return y.

    Args:
        x: [..., K], of the dtype of y, [..., N], and of all matrices.
        max_rank: of the adapters in all slots, at any time, padded.
    """
    assert x.dtype == y.dtype and y.is_contiguous()
    x = x.contiguous()
    in_features, out_features = x.shape[-1], y.shape[-1]
    num_rows = x.numel() // in_features
    assert num_rows == rows.num_rows, "the layer gets other rows than the step has"
    chunks = -(-in_features // native.library().pdserve_shrink_chunk())
    h = torch.empty(num_rows * chunks * max_rank, dtype=torch.float32)
    grouped = *native.addresses(rows.rows_T, rows.starts_S), len(table.words_S4), table.words_S4.data_ptr()
    sizes = in_features, out_features, max_rank, torch.get_num_threads()
    operands = native.DTYPES.index(x.dtype), *native.addresses(y, h, x), *grouped
    native.functions().pdserve_add_low_rank(*operands, *sizes)
    return y


def add_by_torch(
    x: torch.Tensor, y: torch.Tensor, rows: GroupedRows, table: SlotMatrices, max_rank: int
) -> torch.Tensor:
    """Return what `add` does, within rounding: the reference, for machines without a compiler."""
    x_TK, y_TN = x.flatten(0, -2), y.flatten(0, -2)
    starts = rows.starts_S.tolist()
    for of, first, end in zip(table.matrices, starts, starts[1:], strict=False):
        if of is not None and first < end:
            rows_R = rows.rows_T[first:end]
            h_RR = x_TK[rows_R].float() @ of.a_RK.float().T * of.scale
            y_TN[rows_R] = (y_TN[rows_R].float() + h_RR @ of.b_RN.float()).to(y.dtype)
    return y
