"""Cases of test_flash.py, run in a new process: flash-attn as doubles in torch that check how it is called.

The doubles compute attention in float32, and assert the dtypes, strides and page sizes that the real functions require.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.kernels import reference
from pdserve.kernels.attention import KernelUnavailable, select_kernel
from pdserve.kernels.batch import KVFormat, PagedBatch, Scores
from pdserve.kernels.gpu import flash
from pdserve.kernels.gpu.flash import Choice, FlashKernel

CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: tuple[int, int], softcap: float
) -> torch.Tensor:
    """Attention [T, H, D] of the last T of L tokens, under a causal mask aligned at the bottom right."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, of = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    visible = of <= at
    if window != (-1, -1):
        assert window[1] == 0
        visible &= of >= at - window[0]
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    assert q.dtype in HALF and q.dtype == k.dtype == v.dtype and causal
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    for starts, longest, rows in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        assert starts[0] == 0 and starts[-1] == len(rows) and starts.diff().max() == longest
    spans = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    return torch.cat([attention(q[a:b], k[c:d], v[c:d], softmax_scale, window_size, softcap) for a, b, c, d in spans])


def with_kvcache(page_multiple: int, table_name: str, returns: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Return the double of `flash_attn_with_kvcache` of one version."""

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        **table: torch.Tensor,
    ) -> Any:
        (tables,) = (table[table_name],)
        assert q.dtype in HALF and q.dtype == k_cache.dtype == v_cache.dtype and causal and q.shape[1] == 1
        assert tables.dtype == cache_seqlens.dtype == torch.int32 and tables.is_contiguous()
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape[1] % page_multiple == 0, "the page rule"
        assert k_cache.stride() == v_cache.stride()
        out = [
            attention(
                q[s],
                k_cache[tables[s].long()].flatten(0, 1)[:length],
                v_cache[tables[s].long()].flatten(0, 1)[:length],
                softmax_scale,
                window_size,
                softcap,
            )
            for s, length in enumerate(cache_seqlens.tolist())
        ]
        return returns(torch.stack(out))

    return flash_attn_with_kvcache


DOUBLES = {
    "flash_attn": SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=with_kvcache(256, "block_table", lambda out: out),
    ),
    "flash_attn_interface": SimpleNamespace(
        flash_attn_varlen_func=lambda *arguments, **named: (flash_attn_varlen_func(*arguments, **named), None),
        flash_attn_with_kvcache=with_kvcache(1, "page_table", lambda out: (out, None)),
    ),
    "flash_attn.cute": SimpleNamespace(
        flash_attn_varlen_func=lambda *arguments, window_size, **named: (
            flash_attn_varlen_func(
                *arguments, window_size=(-1, -1) if window_size == (None, None) else window_size, **named
            ),
            None,
        )
    ),
}


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kernels.gpu.flash.importlib.import_module", DOUBLES.__getitem__)


@pytest.mark.parametrize("int32", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("prefill", "decode", "block_size"),
    [
        ("flash-attn-2", "triton", 16),
        ("flash-attn-2", "flash-attn-2", 256),
        ("flash-attn-3", "flash-attn-3", 16),
        ("flash-attn-4", "triton", 8),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (12, 20.0)])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 17), (1, 70)], id="decode"),
        pytest.param([(1, 33), (9, 9), (5, 40), (1, 8)], id="mixed"),
        pytest.param([(20, 25)], id="prefill", marks=pytest.mark.slow),
    ],
)
def test_equals_the_reference(
    prefill: str,
    decode: str,
    block_size: int,
    window: int | None,
    softcap: float | None,
    lengths: list[tuple[int, int]],
    int32: bool,
    make_case: Callable[..., Any],
) -> None:
    kernel = FlashKernel(Choice(prefill, decode))
    case = make_case(torch.float16, 4, 2, 32, block_size, lengths, kernel)
    scale = 32**-0.5
    expected = case.expected(scale, window, softcap)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    batch: PagedBatch = case.batch
    if int32:
        for name in ("slots_T", "tables_SM", "kv_lens_S"):
            object.__setattr__(batch, name, getattr(batch, name).int())
    for _ in range(2):  # two layers
        got = kernel.attend(case.q_THD, case.cache_N2GBD, batch, Scores(scale, window, softcap))
        torch.testing.assert_close(got.float(), expected, rtol=3e-3, atol=3e-3)


BF16 = KVFormat(torch.bfloat16, frozenset({128}), 16)
ALL = frozenset(flash.MODULES)


@pytest.mark.parametrize(
    ("installed", "capability", "kv", "prefill", "decode"),
    [
        (ALL, (9, 0), BF16, "flash-attn-3", "flash-attn-3"),
        (ALL - {"flash-attn-3"}, (9, 0), BF16, "flash-attn-4", "triton"),
        ({"flash-attn-2"}, (9, 0), BF16, "flash-attn-2", "triton"),
        ({"flash-attn-2"}, (8, 0), KVFormat(torch.float16, frozenset({256}), 256), "flash-attn-2", "flash-attn-2"),
        ({"flash-attn-4", "flash-attn-2"}, (8, 6), BF16, "flash-attn-2", "triton"),
        (ALL, (10, 0), BF16, "flash-attn-4", "triton"),
        (ALL, (7, 5), BF16, "triton", "triton"),
        (ALL, (9, 0), KVFormat(torch.float32, frozenset({128}), 16), "triton", "triton"),
        (ALL, (9, 0), KVFormat(torch.bfloat16, frozenset({512}), 16), "triton", "triton"),
        (ALL - {"flash-attn-3"}, (9, 0), KVFormat(torch.bfloat16, frozenset({80}), 16), "flash-attn-4", "triton"),
        (set(), (9, 0), BF16, "triton", "triton"),
    ],
)
def test_back_ends_are_chosen_by_capability(
    installed: set[str], capability: tuple[int, int], kv: KVFormat, prefill: str, decode: str
) -> None:
    chosen = flash.choose(installed, capability, kv)
    assert (chosen.prefill, chosen.decode) == (prefill, decode)
    assert len(chosen.reasons) >= (prefill == "triton")


def test_flash_is_the_default_on_gpus_unless_rows_must_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(flash, "installed", lambda: {"flash-attn-2"})
    monkeypatch.setattr(flash, "capability", lambda device: (9, 0))
    with caplog.at_level("INFO"):
        assert select_kernel("auto", gpu, "auto", BF16).NAME == "flash-attn-2+triton"
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cuda: prefill by flash-attn-2, decode by triton"
    ]
    assert select_kernel("triton", gpu, "auto", BF16).NAME == "triton"
    assert select_kernel("auto", gpu, "on", BF16).NAME == "triton-invariant"
    assert select_kernel("auto", gpu, "auto", KVFormat(torch.float32, frozenset({64}), 16)).NAME == "triton"
    with pytest.raises(KernelUnavailable, match="not with --batch-invariant on"):
        select_kernel("flash", gpu, "on", BF16)
    monkeypatch.setattr(flash, "installed", set)
    with pytest.raises(
        KernelUnavailable, match="can compute neither phase: flash-attn-3 is not installed; flash-attn-4"
    ):
        select_kernel("flash", gpu, "auto", BF16)
    assert select_kernel("auto", gpu, "auto", BF16).NAME == "triton"


def test_grids_of_long_sequences_are_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses more than 65535 programs on the second and the third axis."""
    grids = list[tuple[int, ...]]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(flash, "_gather_kv", Kernel())
    lengths, one = torch.tensor([70000, 3]), torch.zeros(2, dtype=torch.long)
    tables_SM, starts = torch.zeros((2, 70000), dtype=torch.long), torch.arange(3) * 2
    cache_N2GBD = torch.zeros(1, 2, 1, 1, 8)
    batch = PagedBatch([cache_N2GBD], one, tables_SM, [2, 2], lengths.tolist(), lengths, starts, reference)
    flash.gather_kv(cache_N2GBD, batch)
    assert grids == [(70000, 2, 1)]
