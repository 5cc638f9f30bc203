"""Cases of test_triton_kernels.py, run in a new process. Shapes are small: the interpreter is 200 times slower than torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kernels import reference
from pdserve.kernels.attention import select_kernel
from pdserve.kernels.batch import Kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

DECODE = [(1, 1), (1, 17), (1, 70)]
MIXED = [(1, 33), (9, 9), (5, 40), (1, 8)]
LONG = [(1, 600), (1, 20)]  # long enough to be split
TILES = [(150, 170)]  # more rows than one tile


@pytest.fixture
def kernel() -> Kernel:
    return select_kernel("triton", DEVICE)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "block_size", "lengths", "window", "softcap"),
    [
        (torch.float32, 4, 4, 32, 16, MIXED, None, None),
        (torch.float32, 8, 2, 64, 8, MIXED, 20, None),
        (torch.float32, 4, 1, 80, 16, MIXED, None, 20.0),
        (torch.float32, 8, 4, 128, 32, DECODE, 16, 30.0),
        (torch.float32, 8, 1, 256, 16, DECODE, None, None),
        (torch.float32, 4, 2, 32, 16, LONG, None, None),
        (torch.float32, 4, 2, 32, 16, LONG, 550, 20.0),
        (torch.float32, 4, 2, 32, 16, TILES, None, None),
        (torch.float32, 4, 2, 32, 16, TILES, 30, 20.0),
        (torch.float16, 8, 2, 64, 16, MIXED, None, None),
        (torch.bfloat16, 8, 4, 128, 16, MIXED, None, None),
        (torch.bfloat16, 4, 2, 64, 16, LONG, 550, 20.0),
    ],
)
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    lengths: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    make_case: Callable[..., Any],
    kernel: Kernel,
) -> None:
    case = make_case(dtype, heads, kv_heads, size, block_size, lengths, kernel, DEVICE)
    expected = case.expected(size**-0.5, window, softcap)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    case.poison_out_of_window(window)
    got = kernel.attend(case.q_THD, case.cache_N2GBD, case.batch, size**-0.5, window, softcap)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_write_kv(make_case: Callable[..., Any], kernel: Kernel) -> None:
    case = make_case(torch.bfloat16, 4, 2, 80, 8, MIXED, kernel, DEVICE)
    expected = case.batch.pool_NL2GBD.clone()
    reference.write_kv(expected[:, 1], case.k_TGD, case.v_TGD, case.batch.slots_T)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    assert torch.equal(case.batch.pool_NL2GBD.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_copies(dtype: torch.dtype, kernel: Kernel) -> None:
    pool = torch.randn(7, 2, 2, 2, 8, 20, device=DEVICE).to(dtype)
    sources, targets = torch.tensor([5, 0, 0], device=DEVICE), torch.tensor([1, 6, 2], device=DEVICE)
    copied = pool.clone()
    kernel.copy_blocks(copied, sources, targets)
    reference.copy_blocks(pool, sources, targets)
    assert torch.equal(copied, pool)
    out = torch.empty_like(pool[:3])
    kernel.gather_blocks(pool, sources, out)
    assert torch.equal(out, pool[sources])
    kernel.scatter_blocks(pool, targets, -out)
    assert torch.equal(pool[targets], -out)


@pytest.mark.parametrize("swap_space", [0, 0.001])
def test_equals_generate_while_preempting(
    swap_space: float, equals_generate_while_preempting: Callable[..., None]
) -> None:
    """The whole engine, in a pool too small for two sequences."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]]
    settings = {"kernel": "triton", "num_blocks": 6, "block_size": 4, "max_num_batched_tokens": 8}
    equals_generate_while_preempting(prompts, 6, swap_space, **settings)
