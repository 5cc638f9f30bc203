"""Experts of a mixture: packed in place where that computes the same, and each row apart from the others."""

import logging
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pdserve.engine.cpu_fusion import experts
from pdserve.engine.cpu_fusion.row_products import RowProducts
from pdserve.kernels import native
from pdserve.kernels.linear import PackedWeight

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")

EXPERTS, TOKENS = 3, 40


def mixture(hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> Any:
    experts.register()
    sizes: Any = {"num_experts": EXPERTS, "hidden_size": hidden_size, "moe_intermediate_size": intermediate_size}
    config = transformers.Qwen3MoeConfig(**sizes)
    config._experts_implementation = experts.NAME
    module = Qwen3MoeExperts(config)
    for weight in module.parameters():
        weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Of experts and their router in float32, with sizes for which libraries choose between kernels."""
    torch.manual_seed(0)
    module, gate = mixture(2048, 2048, dtype), torch.randn(EXPERTS, 2048)
    assert experts.pack_experts(module) == 1 and not list(module.parameters())

    def forward(x_TN: torch.Tensor) -> torch.Tensor:
        with RowProducts():
            weights_TE = F.linear(x_TN.float(), gate).softmax(-1)
        chosen = weights_TE.topk(2)
        y_TN: torch.Tensor = module(x_TN, chosen.indices, chosen.values.to(dtype))
        return torch.cat((y_TN.float(), weights_TE), -1)

    x_TN = torch.randn(TOKENS, 2048).to(dtype)
    together = forward(x_TN)
    for count in (1, 2, 7, 36):
        for first in range(0, TOKENS, count):
            assert torch.equal(forward(x_TN[first : first + count]), together[first : first + count])
    assert experts.inexact_products(module) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_packed_experts_equal_the_plain_ones(dtype: torch.dtype) -> None:
    module = mixture(96, 40, dtype)
    x_TN, index = torch.randn(TOKENS, 96).to(dtype), torch.randint(EXPERTS, (TOKENS, 1))
    expected = module(x_TN, index, torch.ones(TOKENS, 1, dtype=dtype))
    assert experts.pack_experts(module) == 1
    assert isinstance(module.gate_up_proj, PackedWeight) and isinstance(module.down_proj, PackedWeight)
    got = module(x_TN, index, torch.ones(TOKENS, 1, dtype=dtype))
    torch.testing.assert_close(got, expected, rtol=2**-5, atol=2**-5)


@torch.inference_mode()
def test_experts_of_llama4_are_packed() -> None:
    config = transformers.Llama4TextConfig(hidden_size=64, intermediate_size=96, num_local_experts=EXPERTS)
    module = Llama4TextExperts(config).bfloat16().requires_grad_(False)
    for weight in module.parameters():
        weight.data.normal_(0, 0.1)
    x = torch.randn(EXPERTS * 5, 64).bfloat16()
    expected = module(x)
    assert experts.pack_experts(module) == 1 and not list(module.parameters())
    torch.testing.assert_close(module(x), expected, rtol=2**-5, atol=2**-5)


class Odd(torch.nn.Module):
    """Experts whose weights are used as nothing that is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, 32, 32).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("enk,tk->tn", self.weight, x)


@torch.inference_mode()
def test_other_experts_keep_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Sequential(Odd())
    x = torch.randn(4, 32).bfloat16()
    expected = module(x)
    with caplog.at_level(logging.WARNING):
        assert experts.pack_experts(module) == 0
    assert "the weights of Odd are not packed" in caplog.text
    assert len(list(module.parameters())) == 1 and torch.equal(module(x), expected)
    with RowProducts() as products:
        module(x)
    assert products.inexact == {"einsum"}


def test_rows_by_torch_are_noticed() -> None:
    x, frequencies = torch.randn(3, 8), torch.randn(1, 4)
    with RowProducts() as products:
        x[:, :1] @ frequencies  # one term: nothing to sum
        F.linear(x, torch.randn(2, 8))
        assert products.is_used and not products.inexact
        x @ x.T
        torch.addmm(torch.zeros(3), x, x.T)
    assert products.inexact == {"matmul", "addmm"}
