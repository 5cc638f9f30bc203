"""Products with weights of 4 and 8 bits: the bits of the same product with the dequantized weight."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pdserve.kernels import linear, low_bit, native
from pdserve.kernels.batch import Kernel

DTYPES = [torch.bfloat16, torch.float16]
ROWS = (0, 1, 3, 6, 17, 97, 200)
# K, N and the codes that share a scale: padded in both dimensions, deeper than what is unpacked at a time, which ends amid a
# group, whole columns.
SHAPES = [(64, 96, 32), (512, 100, 128), (40, 70, 40), (2080, 33, 2080), (2048, 64, 64), (576, 40, 96)]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, cpu_kernel: Kernel) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))


def random_codes(
    shape: tuple[int, ...], group: int, bits: int, scale_dtype: torch.dtype, with_zeros: bool
) -> low_bit.Codes:
    groups = (*shape[:-1], shape[-1] // group)
    scales = (torch.randn(groups) * 10.0 ** torch.randint(-4, 1, groups)).to(scale_dtype)
    if bits < 0:  # floats
        finite = torch.randint(0, 127, shape, dtype=torch.uint8) + 128 * torch.randint(0, 2, shape, dtype=torch.uint8)
        return low_bit.Codes(finite.view(torch.float8_e4m3fn), scales, None, -bits)
    zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8) if with_zeros else None
    return low_bit.Codes(torch.randint(0, 1 << bits, shape, dtype=torch.uint8), scales, zeros, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", native.DTYPES)
@pytest.mark.parametrize("bits", [4, 8, -8])
def test_rows_have_the_bits_of_products_with_the_dequantized_weight(
    bits: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for in_features, out_features, group in SHAPES:
        for with_zeros in (False, True):
            codes = random_codes((out_features, in_features), group, bits, scale_dtype, with_zeros)
            weight, plain = low_bit.pack(codes, dtype), linear.pack(codes.dequantize(dtype))
            assert weight.nbytes < 0.75 * plain.nbytes
            bias = torch.randn(out_features).to(dtype) if with_zeros else None
            for i, rows in enumerate(ROWS):
                torch.set_num_threads((1, 3, 4)[i % 3])
                x = torch.randn(rows, in_features).to(dtype)
                got = linear.linear(x, weight, bias)
                assert torch.equal(got, linear.linear(x, plain, bias))
                assert rows == 0 or got.abs().max() > 0


def clear_what_rounds_up_to_normal(codes: low_bit.Codes) -> None:
    """Make codes 0 whose weights are below 2**-126 until they are rounded: instructions for bfloat16 read them as 0."""
    middle = 0 if codes.is_float else 1 << (codes.bits - 1)
    products = (codes.codes.float() - middle) * codes.scales.float().repeat_interleave(codes.group, -1)
    least = torch.finfo(torch.bfloat16).tiny
    rounds_up = (products.abs() < least) & (codes.dequantize(torch.bfloat16).abs() == least)
    codes.codes = codes.codes.float().masked_fill(rounds_up, middle).to(codes.codes.dtype)


# Around the limits of ranges, within which weights are rounded in fewer instructions on some processors.
@pytest.mark.parametrize("exponent", [-133, -126, -101, -100, -24, -15, -14, -6, -5, 5, 6, 7, 90, 91, 110])
@pytest.mark.parametrize("scale_dtype", native.DTYPES)
@pytest.mark.parametrize("bits", [4, 8, -8])
def test_scales_of_any_size(bits: int, scale_dtype: torch.dtype, exponent: int) -> None:
    torch.manual_seed(exponent)
    codes = random_codes((64, 128), 32, bits, torch.float32, with_zeros=False)
    mantissas = torch.rand(64, 4) + 1
    mantissas[:, 2] = 0
    codes.scales = (mantissas.double() * 2.0**exponent).to(scale_dtype)
    clear_what_rounds_up_to_normal(codes)
    for dtype in DTYPES:
        weight = codes.dequantize(dtype)
        if not weight.isfinite().all():
            continue
        # Results of about 1, if these rows can be as large as that.
        x = (torch.randn(7, 128).double() * 2.0 ** min(-exponent, 100)).clamp(-60000, 60000).to(dtype)
        packed, plain = low_bit.pack(codes, dtype), linear.pack(weight)
        for rows in (1, 2, 4, 7):
            assert torch.equal(
                linear.linear(x[:rows], packed).nan_to_num(), linear.linear(x[:rows], plain).nan_to_num()
            )


@pytest.mark.parametrize("bits", low_bit.BITS)
def test_several_products_at_once_equal_each(bits: int) -> None:
    codes = random_codes((3, 70, 96), 32, bits, torch.float16, with_zeros=True)
    x = torch.randn(3, 5, 96).bfloat16()
    weight: Any = low_bit.pack(codes, torch.bfloat16)
    together = linear.linear(x, weight)
    for i in range(3):
        assert torch.equal(F.linear(x[i], weight[i]), together[i])
    transposed: Any = low_bit.pack(codes, torch.bfloat16, transposed=True)
    assert transposed.shape == (3, 96, 70)
    assert torch.equal(torch.bmm(x, transposed), together)


def test_codes_out_of_order_are_summed_in_theirs() -> None:
    codes = random_codes((70, 96), 32, 4, torch.float16, with_zeros=True)
    order, x = torch.randperm(96), torch.randn(5, 96).bfloat16()
    ordered: Any = dataclasses.replace(codes, order=order)
    assert torch.equal(ordered.dequantize(torch.bfloat16)[:, order], codes.dequantize(torch.bfloat16))
    got = F.linear(x, low_bit.pack(ordered, torch.bfloat16))  # type: ignore[arg-type]
    assert torch.equal(got, linear.linear(x[:, order], linear.pack(codes.dequantize(torch.bfloat16))))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.004), (4, 0.07)])
def test_quantized_weights_are_near_the_weights(bits: int, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256).bfloat16()
    codes = low_bit.quantize(weight, bits, 32)
    assert codes.scales.shape == (64, 8)
    assert codes.codes.min() <= (bits == 8) and codes.codes.max() == 2**bits - 1, "all codes are used"
    assert (codes.dequantize(torch.float32) - weight.float()).abs().mean() < most * weight.float().abs().max()
    assert low_bit.quantize(weight, bits, 48).scales.shape == (64, 1)  # no multiple: whole columns
    assert not low_bit.quantize(torch.zeros(4, 32).half(), bits, 32).dequantize(torch.float16).any()


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("bits", low_bit.BITS)
def test_quantized_weights_need_no_rounding(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = low_bit.quantize(torch.randn(64, 256).to(dtype), bits, 32)
    scales = codes.scales.double().repeat_interleave(32, -1)
    assert torch.equal((codes.codes.double() - 2 ** (bits - 1)) * scales, codes.dequantize(dtype).double())


# With more leading bits, products begin not to be exact.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", native.DTYPES)
@pytest.mark.parametrize("bits", [4, 8, -8])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_scales_of_few_bits(bits: int, scale_dtype: torch.dtype, dtype: torch.dtype, with_zeros: bool) -> None:
    torch.manual_seed(0)
    codes = random_codes((256, 256), 256, bits, scale_dtype, with_zeros)
    x = torch.eye(256, dtype=dtype)
    for leading in range(1, 10):
        mantissas = 1 + torch.randint(0, 2 ** (leading - 1), codes.scales.shape) / 2.0 ** (leading - 1)
        codes.scales = mantissas.to(scale_dtype)
        packed, plain = low_bit.pack(codes, dtype), linear.pack(codes.dequantize(dtype))
        for rows in (1, 2, 3, 4, 256):
            for first in range(0, 256, rows if rows > 4 else 50):
                row = x[first : first + rows]
                assert torch.equal(linear.linear(row, packed), linear.linear(row, plain))
        row = torch.randn(1, 256, dtype=dtype)  # sums of unrounded products would differ
        assert torch.equal(linear.linear(row, packed), linear.linear(row, plain))


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 codes are not multiples of 32"):
        low_bit.pack(random_codes((32, 64), 16, 4, torch.float16, with_zeros=False), torch.bfloat16)
