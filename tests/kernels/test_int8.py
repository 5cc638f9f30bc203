"""Products of rows and weights in 8 bits: exact sums of integers, each row apart from the others."""

import pytest
import torch

from pdserve.kernels import int8, linear
from pdserve.kernels.batch import Kernel
from pdserve.kernels.low_bit import Codes


def exact(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product as the module's text says it, in torch."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / scales.masked_fill(scales == 0, 1)).round()
    sums = (rounded.double() @ (codes.codes.double() - 128).T).float()  # integers below 2^53
    y = sums * codes.scales[:, 0].float() * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_integers(dtype: torch.dtype, cpu_kernel: Kernel) -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    try:
        for i, (in_features, out_features) in enumerate([(64, 96), (40, 70), (2080, 33), (512, 200)]):
            codes = torch.randint(0, 256, (out_features, in_features), dtype=torch.uint8)
            codes[0] = 0  # -128: sums of its products are the largest
            weight = Codes(codes, torch.rand(out_features, 1).to(dtype) / 100, None, 8)
            packed = int8.pack(weight, dtype)
            assert packed.nbytes < 0.75 * linear.pack(weight.dequantize(dtype)).nbytes
            for rows in (0, 1, 3, 7, 97, 200):
                torch.set_num_threads(1 + (rows + i) % 4)
                x = torch.randn(rows, in_features).to(dtype)
                x[:1] = 3  # all the largest
                x[1:2] = 0
                bias = torch.randn(out_features).to(dtype) if i % 2 else None
                assert torch.equal(linear.linear(x, packed, bias), exact(x, weight, bias))
    finally:
        torch.set_num_threads(threads)


def test_other_weights_are_refused() -> None:
    codes = torch.zeros((32, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="one scale for each output only"):
        int8.pack(Codes(codes, torch.ones(32, 2), None, 8), torch.bfloat16)
