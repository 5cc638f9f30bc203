"""Linear kernels: equal to a rounded float64 product for every division into tiles, each row apart from the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pdserve.kernels import elementwise, linear, native
from pdserve.kernels.batch import Kernel

DTYPES = [torch.bfloat16, torch.float16]
ROWS = (0, 1, 2, 5, 6, 7, 15, 16, 17, 32, 33, 65, 97, 200, 257, 289, 1300)
SHAPES = [(32, 32), (64, 96), (128, 160), (40, 1), (7, 70), (256, 33), (416, 1000)]
LARGE_SHAPES = [(2048, 2048), (2080, 2500)]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, cpu_kernel: Kernel) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))


def cancelling(rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and a weight whose products are 0 but for rounding, so that another order of summation gives other numbers."""
    x, weight = torch.randn(rows, in_features // 2), torch.randn(out_features, in_features // 2)
    return torch.cat([x, x], 1).to(dtype), torch.cat([weight, -weight], 1).to(dtype)


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Half a unit in the last place, and the rounding error of a sum in float32.
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(y.dtype).eps, atol=2**-16 * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_packed_products_equal_those_in_float64(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(in_features)
    weight, b = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype) if bias else None
    packed = linear.pack(weight)
    for i, rows in enumerate(ROWS):
        torch.set_num_threads((1, 3, 4)[i % 3])
        x = torch.randn(rows, in_features).to(dtype)
        assert_product(linear.linear(x, packed, b), x, weight, b)


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_plain_products_equal_those_in_float64(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(in_features)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    for rows in (0, 1, 2, 3, 97, 200):
        x = torch.randn(rows, in_features).to(dtype)
        assert_product(linear.plain(x, weight, bias), x, weight, bias)
        assert_product(linear.plain(x, weight), x, weight, None)


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize(("in_features", "out_features"), [(96, 200), *LARGE_SHAPES])
def test_row_does_not_depend_on_the_batch(in_features: int, out_features: int, kind: str, dtype: torch.dtype) -> None:
    if kind == "packed" and dtype == torch.float32:
        return  # is not packed
    torch.manual_seed(in_features)
    x, weight = cancelling(100, in_features, out_features, dtype)
    packed = linear.pack(weight) if kind == "packed" else None
    product: Callable[[torch.Tensor], torch.Tensor] = lambda x: (  # noqa: E731
        linear.plain(x, weight) if packed is None else linear.linear(x, packed)
    )
    together = product(x)
    assert together.abs().max() > 0, "rounding decides the result"
    for i, count in enumerate((1, 2, 6, 7, 16, 17, 33, 97)):
        torch.set_num_threads(1 + i % 4)
        for first in (0, 3, 43):
            assert torch.equal(product(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_products_at_once_equal_each(dtype: torch.dtype) -> None:
    weights, x = torch.randn(5, 70, 100).to(dtype), torch.randn(5, 37, 100).to(dtype)
    packed: Any = linear.pack(weights)
    assert packed.shape == (5, 70, 100) and len(packed) == 5
    together = linear.linear(x, packed)
    assert together.shape == (5, 37, 70)
    for i in range(5):
        assert torch.equal(F.linear(x[i], packed[torch.tensor(i)]), together[i])
        assert torch.equal(linear.linear(x[i], linear.pack(weights[i])), together[i])
    transposed: Any = linear.pack(weights.mT.contiguous(), transposed=True)
    assert transposed.shape == (5, 100, 70)
    assert torch.equal(torch.bmm(x, transposed), together)
    assert torch.equal(x[1] @ transposed[1], together[1])


def test_packed_weights_are_taken_for_nothing_else() -> None:
    packed: Any = linear.pack(torch.randn(2, 64, 64).bfloat16())
    x = torch.randn(3, 64).bfloat16()
    for misuse in (
        lambda: x @ packed[0],  # packed for linear layers, in which K is the last dimension
        lambda: F.linear(x, packed),  # without the dimension of the products
        lambda: F.linear(x.float(), packed[0]),
        lambda: torch.add(x, packed[0]),
        lambda: packed[torch.tensor([0, 1])],
        lambda: packed[0][0],
    ):
        with pytest.raises(TypeError, match=r"packed weight|unsupported operand"):
            misuse()


def test_leading_dimensions_and_strides() -> None:
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(64, 3, 2).bfloat16().permute(2, 1, 0)
    y = linear.linear(x, linear.pack(weight))
    assert y.shape == (2, 3, 64)
    assert torch.equal(y.flatten(0, 1), linear.linear(x.flatten(0, 1), linear.pack(weight)))
    assert torch.equal(linear.plain(x, weight).flatten(0, 1), linear.plain(x.flatten(0, 1), weight.T.contiguous().T))


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 32), (40, 70), (416, 1000)])
def test_gated_layers_equal_their_parts(in_features: int, out_features: int, activation: str) -> None:
    if not linear.has_amx():
        pytest.skip("needs a processor with AMX")
    torch.manual_seed(in_features)
    gate, up = (linear.pack(torch.randn(out_features, in_features).bfloat16()) for _ in range(2))
    for i, rows in enumerate((0, 1, 15, 17, 33, 300, 1300)):
        torch.set_num_threads((1, 3, 4)[i % 3])
        x = torch.randn(rows, in_features).bfloat16()
        y = linear.linear(x, gate)
        elementwise.gate(y, linear.linear(x, up), activation)
        assert torch.equal(linear.gated(x, gate, up, activation), y)
