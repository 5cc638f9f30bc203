"""States of recurrent layers on CPUs (states.cpp): short convolutions, and linear attention.

Shape legend: see batch.py; C channels, K taps of a convolution or numbers of a key, V numbers of a value, X numbers of a row.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.kernels.batch import PagedBatch
from pdserve.kernels.native import functions


@dataclass(frozen=True)
class StateRows:
    """The memory of states: one row has the states of all layers after one token of a sequence.

    Attributes:
        rows_NX: float32.
        offsets: of each layer, and kind of state, where it begins in a row.
    """

    rows_NX: torch.Tensor
    offsets: Mapping[tuple[int, str], int]


class StateArguments(ctypes.Structure):
    """`States` in states.cpp, which explains them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "tables", "starts", "kv_lens")),
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
    y_TC = torch.empty_like(x_TC)
    bias = None if bias_C is None else bias_C.data_ptr()
    states, addresses = _arguments(batch, layer, "convolution"), [x.data_ptr() for x in (y_TC, x_TC, weight_CK)]
    functions().pdserve_convolve(ctypes.byref(states), *addresses, bias, *weight_CK.shape)
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
    arguments = LinearAttentionArguments(
        *(x.data_ptr() for x in (y_THV, q_TGK, k_TGK, v_THV, decay)),
        None if beta_TH is None else beta_TH.data_ptr(),
        *(heads, q_TGK.shape[1], q_TGK.shape[2], values, decay.dim() - 2),
    )
    states = _arguments(batch, layer, "recurrence")
    functions().pdserve_linear_attention(ctypes.byref(states), ctypes.byref(arguments))
    return y_THV


def written_rows(batch: PagedBatch) -> list[int]:
    """Return the rows with the states behind the sequences' last tokens, which a step changes in place."""
    rows = []
    for table, length in zip(batch.tails[-1].tables_SM.tolist(), batch.kv_lens, strict=True):
        rows.append(next(row for row in table[(length - 1) // batch.block_size :] if row >= 0))
    return rows


def _arguments(batch: PagedBatch, layer: int, kind: str) -> StateArguments:
    assert batch.states is not None, "the model has no states"
    rows_NX, offset = batch.states.rows_NX, batch.states.offsets[layer, kind]
    tables_SM = batch.tails[-1].tables_SM
    assert tables_SM.is_contiguous()
    return StateArguments(
        *(x.data_ptr() for x in (rows_NX, tables_SM, batch.starts, batch.kv_lens_S)),
        *(rows_NX.stride(0), offset, len(batch.query_lens), tables_SM.shape[1], batch.block_size),
        torch.get_num_threads(),
    )
