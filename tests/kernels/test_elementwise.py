"""Element-wise kernels: equal to torch and to the modules of transformers."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import gelu, silu
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pdserve.kernels import elementwise

pytestmark = pytest.mark.usefixtures("cpu_kernel")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, BF16, FP16]
TORCH_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1000), (2, 5, 7, 128), (1, 33), (700, 256)])
@torch.inference_mode()
def test_rms_norm_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(shape[-1]).to(dtype)
    x = torch.randn(shape).to(dtype)
    expected = norm(x)
    # Another order of summation can move the normalised value by a unit; its product with the weight is rounded again.
    units = {torch.float32: 2**-20, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(elementwise.rms_norm(x, norm.weight, 1e-6), expected, rtol=units, atol=units / 64)
    transposed = x.transpose(0, -2).contiguous().transpose(0, -2)
    torch.testing.assert_close(
        elementwise.rms_norm(transposed, norm.weight, 1e-6), expected, rtol=units, atol=units / 64
    )


@pytest.mark.parametrize(("dtype", "table"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)])
@pytest.mark.parametrize(("tokens", "size", "rotated"), [(1, 64, 64), (5, 20, 20), (3, 64, 24), (700, 128, 128)])
@torch.inference_mode()
def test_rotary_equals_transformers(
    tokens: int, size: int, rotated: int, dtype: torch.dtype, table: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, tokens, 4, size).to(dtype), torch.randn(1, 2, tokens, size).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(1, tokens, rotated).to(table), torch.randn(1, tokens, rotated).to(table)
    expected_rotated = modeling_llama.apply_rotary_pos_emb(
        q[..., :rotated], k[..., :rotated], cos, sin, unsqueeze_dim=2
    )
    for got, new, old in zip(elementwise.rotary(q, k, cos, sin), expected_rotated, (q, k), strict=True):
        expected = torch.cat((new.to(dtype), old[..., rotated:]), dim=-1)
        assert got.dtype == dtype and got.shape == old.shape
        # One unit in the last place of the sum, and one of the float32 products.
        torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=2**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1000), (1, 33), (700, 256), (7,)])
def test_gate_equals_torch(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (5 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    expected = TORCH_ACTIVATIONS[activation](gate) * up
    elementwise.gate(gate, up, activation)
    # The activation may differ by one unit, and the product is rounded once more.
    torch.testing.assert_close(gate, expected, rtol=1.5 * torch.finfo(dtype).eps, atol=2**-20)


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
def test_gate_of_extreme_values(activation: str) -> None:
    gate = torch.tensor([0, -0.0, 1e-30, -1e-30, 80, -80, 1e4, -1e4, 1e38, -1e38, torch.inf], dtype=torch.bfloat16)
    expected = TORCH_ACTIVATIONS[activation](gate)
    elementwise.gate(gate, torch.ones_like(gate), activation)
    torch.testing.assert_close(gate, expected, rtol=2**-7, atol=2**-20)
    gate = torch.full((40,), torch.nan, dtype=torch.bfloat16)
    elementwise.gate(gate, torch.ones_like(gate), activation)
    assert gate.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (40, 1024), (40, 2055), (1, 151_936)])
def test_argmax_is_the_first_of_the_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).mul(2).round().to(dtype)  # many are equal
    largest = x == x.amax(dim=1, keepdim=True)
    first = largest.int().cumsum(dim=1).eq(1).logical_and(largest).nonzero()[:, 1]
    assert torch.equal(elementwise.argmax(x), first)
    assert torch.equal(elementwise.argmax(x.T.contiguous().T), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [0, 1, 1023, 1024, 2047, 2054])
def test_argmax_finds_any_index(index: int, dtype: torch.dtype) -> None:
    x = torch.full((1, 2055), -torch.inf, dtype=dtype)
    assert elementwise.argmax(x).tolist() == [0]
    x[0, index] = -5
    assert elementwise.argmax(x).tolist() == [index]
    x[0, (index + 1) % 2055] = torch.nan
    assert elementwise.argmax(x).tolist() == [index]
