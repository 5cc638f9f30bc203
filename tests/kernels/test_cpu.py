"""CPU kernel: equals the reference kernel in float32, and a row's result depends on no other row.

test_instruction_sets.py runs these tests for other instruction sets too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kernels import cpu, reference
from pdserve.kernels.batch import Kernel, Scores

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)

# (new tokens, KV tokens): decode, prefill, prefill behind a cached prefix, prefill of more than one tile of rows.
RAGGED = [(1, 1), (5, 5), (1, 700), (1, 33), (130, 200), (1, 64), (40, 300)]
WINDOWS_AND_CAPS = [(None, None), (50, None), (None, 20.0), (100, 30.0)]

pytestmark = pytest.mark.usefixtures("cpu_kernel")


def check(case: Any, window: int | None, softcap: float | None) -> None:
    """Compare with the reference, with and without AMX."""
    scale, dtype = case.q_THD.shape[2] ** -0.5, case.q_THD.dtype
    expected = case.expected(scale, window, softcap)
    cpu.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    case.poison_out_of_window(window)
    for use_amx in (False, True):
        got = cpu.attend(
            case.q_THD, case.cache_N2GBD, case.batch, Scores(scale, window, softcap, case.sinks_H), use_amx
        )
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    again = reference.attend(case.q_THD, case.cache_N2GBD, case.batch, Scores(scale, window, softcap, case.sinks_H))
    torch.testing.assert_close(again.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 32, 64, 80, 128, 256])
@pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)
def test_head_sizes(
    dtype: torch.dtype, size: int, window: int | None, softcap: float | None, make_case: Callable[..., Any]
) -> None:
    check(make_case(dtype, 4, 2, size, 16, RAGGED, cpu), window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (6, 2), (8, 2), (14, 2), (8, 1), (16, 1)])
def test_head_counts(dtype: torch.dtype, heads: int, kv_heads: int, make_case: Callable[..., Any]) -> None:
    check(make_case(dtype, heads, kv_heads, 32, 16, RAGGED, cpu), 90, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(4, 64), (4, 80), (34, 64)])
def test_sinks(dtype: torch.dtype, heads: int, size: int, make_case: Callable[..., Any]) -> None:
    for window, softcap in WINDOWS_AND_CAPS:
        case = make_case(dtype, heads, 2, size, 16, [*RAGGED, (3, 1100), (1, 1100)], cpu)
        without = case.expected(size**-0.5, window, softcap)
        assert (case.with_sinks().expected(size**-0.5, window, softcap) - without).abs().max() > 0.2
        check(case.with_sinks(), window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size", "window", "softcap"),
    [(6, 2, 64, 16, None, None), (4, 1, 128, 8, 300, 20.0), (3, 3, 20, 16, 50, None), (34, 2, 80, 100, None, None)],
)
def test_kv_in_bytes_has_the_bits_of_its_values(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    make_case: Callable[..., Any],
) -> None:
    case = make_case(dtype, heads, kv_heads, size, block_size, [*RAGGED, (3, 1100), (1, 1100)], cpu).with_sinks()
    case.k_TGD[0], case.v_TGD[1] = 0, 1e30 if dtype != torch.float16 else 6e4
    values = case.cache_N2GBD.nan_to_num()
    in_bytes, expected = reference.quantize(values), reference.quantize(values)
    cpu.write_kv(in_bytes, case.k_TGD, case.v_TGD, case.batch.slots_T)
    reference.write_kv(expected, case.k_TGD, case.v_TGD, case.batch.slots_T)
    assert torch.equal(in_bytes, expected)
    values, scores = reference.dequantize(in_bytes, dtype), Scores(size**-0.5, window, softcap, case.sinks_H)
    for use_amx in (False, True):
        got, plain = (cpu.attend(case.q_THD, cache, case.batch, scores, use_amx) for cache in (in_bytes, values))
        assert torch.equal(got, plain) and got.abs().max() > 0
    again = reference.attend(case.q_THD, in_bytes, case.batch, scores)
    plain = reference.attend(case.q_THD, values, case.batch, scores)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 32, 100])
def test_block_sizes(dtype: torch.dtype, block_size: int, make_case: Callable[..., Any]) -> None:
    check(make_case(dtype, 8, 4, 64, block_size, RAGGED, cpu), None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [[(1, n)] for n in (1, 2, 63, 64, 65, 129)]
    + [[(n, n)] for n in (2, 7, 8, 9, 31, 32, 33, 255, 256, 257)]
    + [[(2, n), (16, n)] for n in (255, 256, 257, 258, 530)],
)
def test_tile_boundaries(dtype: torch.dtype, lengths: list[tuple[int, int]], make_case: Callable[..., Any]) -> None:
    for window in (None, 1, 33):
        check(make_case(dtype, 4, 2, 32, 16, lengths, cpu), window, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_stay_finite(dtype: torch.dtype, make_case: Callable[..., Any]) -> None:
    case = make_case(dtype, 4, 2, 32, 16, [(1, 100), (20, 90), (9, 700)], cpu)
    case.q_THD.mul_(1000)
    check(case, None, None)
    check(case, None, 5.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size", "window", "softcap", "sinks"),
    [
        (6, 2, 64, 16, None, None, False),
        (8, 1, 128, 16, None, 30.0, False),
        (3, 3, 20, 16, None, None, True),
        (6, 2, 80, 8, 300, None, True),
        (14, 2, 32, 100, 100, 20.0, False),
        (2, 1, 16, 16, 2300, None, False),
        (4, 4, 64, 32, 2300, None, True),
        (16, 1, 96, 16, 300, 20.0, True),
    ],
)
def test_a_row_depends_on_its_own_history_only(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    make_case: Callable[..., Any],
) -> None:
    """Bit for bit the same in one prefill, in chunks, in decode alone and beside others, and with any number of threads."""
    tokens = 2600 if window == 2300 else 1200  # beyond the splits and windows of each kernel
    case = make_case(dtype, heads, kv_heads, size, block_size, [(tokens, tokens)], cpu)
    case = case.with_sinks() if sinks else case
    case.q_THD.mul_(20)  # scores large enough that the maximum of a row changes often
    cpu.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)

    def attend(*spans: tuple[int, int]) -> torch.Tensor:
        rows_THD: torch.Tensor = case.attend_spans(list(spans), size**-0.5, window, softcap)
        return rows_THD

    whole = attend((0, tokens))
    for first, end in ((0, 77), (77, 340), (340, 342), (342, tokens)):
        assert torch.equal(attend((first, end)), whole[first:end]), "a chunk"
    rows = [*range(0, tokens, 97), 63, 64, 511, 512, tokens - 1]
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(attend(*[(row, row + 1) for row in rows]), whole[rows]), "decode, in a batch"
            assert torch.equal(attend((5, 90), (tokens - 1, tokens), (90, 170))[85], whole[-1]), "decode beside prefill"
            assert torch.equal(attend((0, tokens)), whole)
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(attend((row, row + 1))[0], whole[row]) for row in rows[::3]), "decode, alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_counts(dtype: torch.dtype, threads: int, make_case: Callable[..., Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(make_case(dtype, 4, 2, 64, 16, [*RAGGED, (600, 1300)], cpu), None, None)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype: torch.dtype, make_case: Callable[..., Any]) -> None:
    case = make_case(dtype, 4, 2, 20, 8, RAGGED, cpu)
    expected = torch.stack(list(case.batch.caches), 1)
    reference.write_kv(expected[:, 1], case.k_TGD, case.v_TGD, case.batch.slots_T)
    cpu.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    assert torch.equal(torch.stack(list(case.batch.caches), 1).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_copies(dtype: torch.dtype, cpu_kernel: Kernel) -> None:
    pool = torch.randn(7, 2, 2, 2, 8, 20).to(dtype)
    sources, targets = torch.tensor([5, 0, 0]), torch.tensor([1, 6, 2])
    for kernel in (reference, cpu_kernel):
        copied = pool.clone()
        kernel.copy_blocks(copied, sources, targets)
        assert torch.equal(copied[targets], pool[sources]) and torch.equal(copied[[0, 3, 4, 5]], pool[[0, 3, 4, 5]])
        out = torch.empty_like(pool[:3])
        kernel.gather_blocks(pool, sources, out)
        assert torch.equal(out, pool[sources])
        kernel.scatter_blocks(copied, targets, -out)
        assert torch.equal(copied[targets], -out) and torch.equal(copied[[0, 3, 4, 5]], pool[[0, 3, 4, 5]])
        kernel.copy_blocks(copied, sources[:0], targets[:0])
