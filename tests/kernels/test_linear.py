"""Linear kernel: equals a rounded float64 product for every division of rows and columns into tiles."""

import pytest
import torch

from pdserve.kernels import elementwise, linear

if not linear.is_available():
    pytest.skip("needs a processor with AMX, and a compiler", allow_module_level=True)


@pytest.fixture(params=[1, 3, 4], autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(32, 32), (64, 96), (128, 160), (40, 1), (7, 70), (256, 33), (416, 1000)]
)
def test_equals_a_product_in_float64(in_features: int, out_features: int, bias: bool) -> None:
    torch.manual_seed(in_features)
    weight, b = (
        torch.randn(out_features, in_features).bfloat16(),
        torch.randn(out_features).bfloat16() if bias else None,
    )
    packed = linear.pack(weight)
    for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 200, 256, 257, 289, 1300):
        x = torch.randn(rows, in_features).bfloat16()
        y = linear.linear(x, packed, out_features, b)
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        # Half a unit in the last place of bfloat16, and the rounding error of a sum in float32.
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-16 * in_features**0.5)


def test_row_does_not_depend_on_the_batch() -> None:
    weight, x = torch.randn(200, 96).bfloat16(), torch.randn(700, 96).bfloat16()
    packed = linear.pack(weight)
    together = linear.linear(x, packed, 200, None)
    for count in (1, 16, 17, 33, 300):
        for first in (0, 16, 250):
            rows = slice(first, first + count)
            assert torch.equal(linear.linear(x[rows], packed, 200, None), together[rows])


def test_leading_dimensions_and_strides() -> None:
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(64, 3, 2).bfloat16().permute(2, 1, 0)
    y = linear.linear(x, linear.pack(weight), 64, None)
    assert y.shape == (2, 3, 64)
    assert torch.equal(y.flatten(0, 1), linear.linear(x.flatten(0, 1), linear.pack(weight), 64, None))


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 32), (40, 70), (416, 1000)])
def test_gated_layers_equal_their_parts(in_features: int, out_features: int, activation: str) -> None:
    torch.manual_seed(in_features)
    gate, up = (linear.pack(torch.randn(out_features, in_features).bfloat16()) for _ in range(2))
    for rows in (0, 1, 15, 17, 33, 300, 1300):
        x = torch.randn(rows, in_features).bfloat16()
        y = linear.linear(x, gate, out_features, None)
        elementwise.gate(y, linear.linear(x, up, out_features, None), activation)
        assert torch.equal(linear.gated(x, gate, up, out_features, activation), y)
