"""Paged attention by flash-attn (Dao 2023, Shah et al. 2024), where it is installed.

Each phase has the first back end that can compute it (`choose`), the last of which is the Triton kernel:
    - Prefill gathers the KV of its sequences into rows, with one Triton kernel, and calls `flash_attn_varlen_func`, whose
      pages would have to be larger than our blocks. Its causal mask is aligned at the bottom right, as ours is.
    - Decode reads the pool in place: flash-attn 3 accepts pages of any size and strided views of the pool, flash-attn 2
      pages of multiples of 256 tokens. Either can be recorded. FlashInfer plans each step on the host, so that its steps
      cannot be: an eager step of a small model took 20 ms on an H200, a recorded one 2.6.

Contract-tested with doubles of these functions in torch; never run on a GPU. Shape legend: see batch.py.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve.kernels.batch import Capabilities, KVFormat, PagedBatch, Scores
from pdserve.kernels.gpu import triton_kernels
from pdserve.kernels.gpu.launch import device_of

TRITON = triton_kernels.NAME
PREFILL = ("flash-attn-3", "flash-attn-4", "flash-attn-2")  # in order of preference
DECODE = ("flash-attn-3", "flash-attn-2")
MODULES = {
    "flash-attn-2": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
}
MIN_CAPABILITY = {"flash-attn-2": (8, 0), "flash-attn-3": (9, 0), "flash-attn-4": (9, 0)}
MAX_CAPABILITY = {"flash-attn-3": (9, 9)}
MAX_HEAD_DIM = {"flash-attn-2": 256, "flash-attn-3": 256, "flash-attn-4": 128}
PAGE_MULTIPLE = 256  # tokens, of flash-attn 2


@dataclass(frozen=True)
class Choice:
    """Back ends by phase, and why the preferred ones were not chosen."""

    prefill: str
    decode: str
    reasons: tuple[str, ...] = ()


def installed() -> frozenset[str]:
    """Return the names of the back ends that this environment can import."""
    present = {name for name, module in MODULES.items() if _is_importable(module)}
    if not _is_importable("flash_attn_2_cuda"):
        present.discard("flash-attn-2")  # flash-attn 4 alone has the folder, too
    return frozenset(present)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def choose(installed: Iterable[str], capability: tuple[int, int], kv: KVFormat) -> Choice:
    """Return the back end of each phase."""
    reasons: dict[str, None] = {}

    def first(phase: str, names: tuple[str, ...]) -> str:
        for name in names:
            if (obstacle := _obstacle(name, phase, frozenset(installed), capability, kv)) is None:
                return name
            reasons[f"{name} {obstacle}"] = None
        return TRITON

    prefill, decode = first("prefill", PREFILL), first("decode", DECODE)
    return Choice(prefill, decode, tuple(reasons))


def _obstacle(
    name: str, phase: str, installed: frozenset[str], capability: tuple[int, int], kv: KVFormat
) -> str | None:
    """Return why a back end cannot compute a phase, or None if it can."""
    if name not in installed:
        return "is not installed"
    if not MIN_CAPABILITY[name] <= capability <= MAX_CAPABILITY.get(name, capability):
        return "does not support compute capability {}.{}".format(*capability)
    if kv.sinks:
        return "is not called with attention sinks"
    if kv.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {str(kv.dtype).removeprefix('torch.')}"
    for size in sorted(kv.head_dims):
        if size > MAX_HEAD_DIM[name] or size % 8:
            return f"does not support heads of {size} elements"
    if name == "flash-attn-2" and phase == "decode" and kv.block_size % PAGE_MULTIPLE:
        return f"decodes over blocks of multiples of {PAGE_MULTIPLE} tokens only, not of {kv.block_size}"
    return None


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is not there
        return False


class FlashKernel:
    """The kernel of a choice of back ends. A `Kernel` of batch.py."""

    CAPABILITIES = Capabilities(is_capturable=True)

    def __init__(self, chosen: Choice) -> None:
        self.NAME = "+".join(dict.fromkeys((chosen.prefill, chosen.decode)))
        self.write_kv = triton_kernels.write_kv
        self.copy_blocks = triton_kernels.copy_blocks
        self.gather_blocks = triton_kernels.gather_blocks
        self.scatter_blocks = triton_kernels.scatter_blocks
        self._prefill = triton_kernels.attend if chosen.prefill == TRITON else _Varlen(chosen.prefill)
        self._decode: Callable[..., torch.Tensor] = triton_kernels.attend
        if chosen.decode != TRITON:
            self._decode = _KVCache(chosen.decode)

    def attend(self, q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, scores: Scores) -> torch.Tensor:
        """Return the attention of every new token over its own sequence, [T, H, D]."""
        assert scores.sinks_H is None, "with sinks, Triton's kernel is selected"
        decoding, others = batch.phases
        count = len(decoding.query_lens)
        parts = []
        if count:
            parts.append(self._decode(q_THD[:count], cache_N2GBD, decoding, scores))
        if others.query_lens:
            parts.append(self._prefill(q_THD[count:], cache_N2GBD, others, scores))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Varlen:
    """Prefill by `flash_attn_varlen_func`, over KV gathered into rows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = importlib.import_module(MODULES[name]).flash_attn_varlen_func

    def __call__(
        self, q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        kv_starts = batch.kv_starts
        k_LGD, v_LGD = gather_kv(cache_N2GBD, batch)
        unlimited = (None, None) if self._name == "flash-attn-4" else (-1, -1)
        out = self._function(
            q_THD if q_THD.stride(2) == 1 else q_THD.contiguous(),
            k_LGD,
            v_LGD,
            cu_seqlens_q=batch.starts.int(),
            cu_seqlens_k=kv_starts,
            max_seqlen_q=max(batch.query_lens),
            max_seqlen_k=max(batch.kv_lens),
            softmax_scale=scores.scale,
            causal=True,
            window_size=unlimited if scores.window is None else (scores.window - 1, 0),
            softcap=scores.softcap or 0.0,
        )
        return _first(out)


class _KVCache:
    """Decode by `flash_attn_with_kvcache` over the pool."""

    def __init__(self, name: str) -> None:
        self._function = importlib.import_module(MODULES[name]).flash_attn_with_kvcache
        self._table = "block_table" if name == "flash-attn-2" else "page_table"

    def __call__(
        self, q_SHD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        k_NBGD, v_NBGD = (cache_N2GBD[:, half].transpose(1, 2) for half in (0, 1))
        out = self._function(
            (q_SHD if q_SHD.stride(2) == 1 else q_SHD.contiguous())[:, None],
            k_NBGD,
            v_NBGD,
            cache_seqlens=batch.kv_lens_S.int(),
            **{self._table: batch.tables_SM.int().contiguous()},
            softmax_scale=scores.scale,
            causal=True,
            window_size=(-1, -1) if scores.window is None else (scores.window - 1, 0),
            softcap=scores.softcap or 0.0,
        )
        return _first(out)[:, 0]


def _first(out: Any) -> torch.Tensor:
    """Return the output of a function that may also return the logarithm of the sum of exponentials."""
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


@triton.jit(do_not_specialize=["tables", "kv_starts", "table_length"])  # which change from step to step
def _gather_kv(
    k,
    v,
    cache,
    tables,
    kv_starts,
    table_length,
    stride_block,
    stride_half,
    stride_head,
    G: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    m, s, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(kv_starts + s).to(tl.int64)
    kv_len = tl.load(kv_starts + s + 1) - start
    if m * B >= kv_len:
        return
    block = tl.load(tables + s * table_length + m).to(tl.int64)
    b, d = tl.arange(0, B_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    source = cache + block * stride_block + g * stride_head + b * D + d
    target = ((start + m * B + b) * G + g) * D + d
    valid = (b < B) & (m * B + b < kv_len) & (d < D)
    tl.store(k + target, tl.load(source, mask=valid), mask=valid)
    tl.store(v + target, tl.load(source + stride_half, mask=valid), mask=valid)


def gather_kv(cache_N2GBD: torch.Tensor, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of all sequences, one after the other, each [L, G, D] with L the sum of their tokens with KV."""
    _, _, kv_heads, block_size, size = cache_N2GBD.shape
    k_LGD, v_LGD = cache_N2GBD.new_empty((2, sum(batch.kv_lens), kv_heads, size))
    tables_SM = batch.tables_SM.contiguous()
    with device_of(cache_N2GBD):
        # Blocks come first: the length of the other axes is limited to 65535.
        _gather_kv[(triton.cdiv(max(batch.kv_lens), block_size), len(batch.kv_lens), kv_heads)](
            k_LGD,
            v_LGD,
            cache_N2GBD,
            tables_SM,
            batch.kv_starts,
            tables_SM.shape[1],
            *cache_N2GBD.stride()[:3],
            G=kv_heads,
            B=block_size,
            B_PAD=triton.next_power_of_2(block_size),
            D=size,
            D_PAD=triton.next_power_of_2(size),
            num_warps=4,
        )
    return k_LGD, v_LGD
