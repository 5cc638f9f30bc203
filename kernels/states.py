"""States of recurrent layers on CPUs (states.cpp): short convolutions, and linear attention.

Shape legend: see batch.py; C channels, K taps of a convolution or numbers of a key, V numbers of a value, X numbers of a row.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from pdserve.kernels.batch import PagedBatch
from pdserve.kernels.native import addresses, functions


@dataclass(frozen=True)
class StateRows:
    """The memory of states: one row has the states of all layers after one token of a sequence.

    Attributes:
        rows_NX: float32.
        offsets: of each layer, and kind of state, where it begins in a row.
    """

    rows_NX: torch.Tensor
    offsets: Mapping[tuple[int, str], int]

    def arguments(self, layer: int, kind: str, tokens: "Tokens", block_size: int) -> "StateArguments":
        """Return where kernels find the states of a layer for some tokens."""
        tables_SM, rows_NX = tokens.tables_SM, self.rows_NX
        assert tables_SM.is_contiguous()
        return StateArguments(
            *addresses(rows_NX, tables_SM, tokens.starts_S, tokens.stops_S, tokens.kept_starts, tokens.kv_lens_S),
            *(rows_NX.stride(0), self.offsets[layer, kind], *tables_SM.shape, block_size, torch.get_num_threads()),
        )


@dataclass(frozen=True)
class Tokens:
    """New tokens of each sequence, rows [start, stop) of a batch: int64 tensors.

    Attributes:
        tables_SM: its blocks with states.
        kv_lens_S: its tokens up to the last of these.
        kept_starts: [S + 1] of rows, of which sequence s keeps that many from number s to the next; None: all.
    """

    tables_SM: torch.Tensor
    starts_S: torch.Tensor
    stops_S: torch.Tensor
    kv_lens_S: torch.Tensor
    kept_starts: torch.Tensor | None = None


@dataclass
class DraftedRows:
    """Inputs of recurrent layers in a step with drafts, with which states are advanced over the accepted ones.

    Attributes:
        num_rows: leading rows, with all drafts among them.
        runs: of each layer and kind of state, the function that computes some of these rows again, and keeps the states.
    """

    num_rows: int
    runs: "list[Callable[[Tokens], None]]" = field(default_factory=list)

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return these rows of tensors. Copies, if there are more: a long prompt's would take much memory."""
        return [x if len(x) == self.num_rows else x[: self.num_rows].clone() for x in tensors]


class StateArguments(ctypes.Structure):
    """`States` in states.cpp, which explains them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "tables", "starts", "stops", "kept", "kv_lens")),
        *((name, ctypes.c_int64) for name in ("stride", "offset", "S", "M", "B", "threads")),
    )


class LinearAttentionArguments(ctypes.Structure):
    """`Attention` in states.cpp, which explains them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "q", "k", "v", "decay", "beta")),
        *((name, ctypes.c_int64) for name in ("H", "G", "K", "V", "decays")),
    )


def convolve(
    x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, batch: PagedBatch, layer: int
) -> torch.Tensor:
    """Return the causal convolution of each channel over its own sequence, float32 [T, C]. Changes the layer's states."""
    x_TC, weight_CK = x_TC.float().contiguous(), weight_CK.float().contiguous()
    bias_C = None if bias_C is None else bias_C.float().contiguous()

    def run(states: StateArguments, y_TC: torch.Tensor, x_TC: torch.Tensor) -> None:
        operands = addresses(y_TC, x_TC, weight_CK, bias_C)
        functions().pdserve_convolve(ctypes.byref(states), *operands, *weight_CK.shape)

    y_TC = torch.empty_like(x_TC)
    _run(run, batch, layer, "convolution", [y_TC, x_TC])
    return y_TC


def linear_attention(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay: torch.Tensor,
    beta_TH: torch.Tensor | None,
    batch: PagedBatch,
    layer: int,
) -> torch.Tensor:
    """Return S·q of each token and head, float32 [T, H, V], after S = decay · S + k ⊗ v. Changes the layer's states.

    Args:
        decay: of each head [T, H], of each of its keys [T, H, K], or of each number of a state [T, H, K, V].
        beta_TH: use the delta rule: v is replaced by beta · (v - (decay · S)·k).
    """
    q_TGK, k_TGK, v_THV, decay = (x.float().contiguous() for x in (q_TGK, k_TGK, v_THV, decay))
    beta_TH = None if beta_TH is None else beta_TH.float().contiguous()
    y_THV = torch.empty_like(v_THV)
    _, heads, values = v_THV.shape
    sizes = heads, q_TGK.shape[1], q_TGK.shape[2], values, decay.dim() - 2

    def run(states: StateArguments, *tensors: torch.Tensor) -> None:
        operands = addresses(*tensors, *([None] if beta_TH is None else []))
        arguments = LinearAttentionArguments(*operands, *sizes)
        functions().pdserve_linear_attention(ctypes.byref(states), ctypes.byref(arguments))

    tensors = [y_THV, q_TGK, k_TGK, v_THV, decay]
    _run(run, batch, layer, "recurrence", tensors if beta_TH is None else [*tensors, beta_TH])
    return y_THV


def with_drafts(batch: PagedBatch, drafts: Sequence[int]) -> PagedBatch:
    """Return a batch that leaves states behind the first token of sequences with drafts, and keeps what those go on with.

    Args:
        drafts: of each row of `batch`, how many rows behind it are drafts of its sequence.
    """
    counts, kv_lens = list(batch.query_lens), list(batch.kv_lens)
    for row, count in enumerate(drafts):
        if count:
            counts[row : row + count + 1] = [count + 1] + [0] * count
            kv_lens[row] += count
    starts = torch.tensor([0, *accumulate(counts)])
    tail = replace(batch.tails[-1], query_lens=counts, kv_lens=kv_lens, kv_lens_S=torch.tensor(kv_lens), starts=starts)
    num_rows = max(int(starts[row + 1]) for row, count in enumerate(drafts) if count)
    return replace(batch, tails=(*batch.tails[:-1], tail), drafted=DraftedRows(num_rows))


def keep_accepted(batch: PagedBatch, accepted: Sequence[int]) -> None:
    """Let the states of a batch of `with_drafts`, which was computed, go on with the drafts that were accepted.

    Args:
        accepted: of each row of `batch`, how many rows behind it are such.
    """
    rows = [row for row, count in enumerate(accepted) if count]
    if not rows or batch.drafted is None:
        return
    counts_S, rows_S = torch.tensor([accepted[row] for row in rows]), torch.tensor(rows)
    starts_S, kv_lens_S = batch.starts[rows_S] + 1, torch.tensor([batch.kv_lens[row] for row in rows]) + counts_S
    tokens = Tokens(batch.tails[-1].tables_SM[rows_S], starts_S, starts_S + counts_S, kv_lens_S)
    for run in batch.drafted.runs:
        run(tokens)


def written_rows(batch: PagedBatch) -> list[int]:
    """Return the rows of states that a step changes in place, and those to which drafts would go on."""
    rows = []
    for table, length in zip(batch.tails[-1].tables_SM.tolist(), batch.kv_lens, strict=True):
        rows.append(next(row for row in table[(length - 1) // batch.block_size :] if row >= 0))
    return rows


def _run(
    function: Callable[..., None], batch: PagedBatch, layer: int, kind: str, tensors: Sequence[torch.Tensor]
) -> None:
    """Call a function with the states of a layer, and with what it reads and writes of each row of the batch."""
    assert batch.states is not None, "the model has no states"
    tail, states, size = batch.tails[-1], batch.states, batch.block_size
    tokens = Tokens(tail.tables_SM, tail.starts, tail.starts[1:], tail.kv_lens_S, batch.starts)
    function(states.arguments(layer, kind, tokens, size), *tensors)
    if batch.drafted is not None:
        kept = batch.drafted.keep(tensors)
        batch.drafted.runs.append(lambda drafts: function(states.arguments(layer, kind, drafts, size), *kept))
