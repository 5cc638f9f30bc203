"""Deltas of experts: what merged weights give, for each row apart from the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pdserve.adapters.expert_delta import ExpertsDelta, forward_with
from pdserve.adapters.experts import LowRank, stacked_weights, whole_stack
from pdserve.engine.cpu_fusion import experts
from pdserve.kernels import lora, native

EXPERTS, HIDDEN, INTERMEDIATE, CHOICES, TOKENS = 5, 64, 96, 2, 30
RANKS = (4, 10, 16)  # of three slots; a fourth stays empty
KINDS: dict[str, tuple[type[torch.nn.Module], Any]] = {
    "qwen3_moe": (
        Qwen3MoeExperts,
        transformers.Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE),
    ),
    "mixtral": (
        MixtralExperts,
        transformers.MixtralConfig(num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE),
    ),
    "gpt_oss": (
        GptOssExperts,
        transformers.GptOssConfig(num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE),
    ),
    "nemotron_h": (
        NemotronHExperts,
        transformers.NemotronHConfig(n_routed_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE),
    ),
}


class Mixture:
    """A module of experts with three adapters."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        experts.register()
        make, config = KINDS[kind]
        config._experts_implementation = experts.NAME if dtype != torch.float32 else "eager"
        self.module: Any = make(config).requires_grad_(False)
        for parameter in self.module.parameters():
            parameter.normal_(0, 0.2)
        model = torch.nn.ModuleDict({"experts": self.module.to(dtype)})
        [self.weights] = stacked_weights(model).values()
        self.plain = {one.name: getattr(self.module, one.name).data.clone() for one in self.weights}
        if dtype != torch.float32:
            experts.pack_experts(model)
        self.rows = lora.Rows(len(RANKS) + 1, 64)
        self.delta = ExpertsDelta(self.module, self.weights, self.rows, max(RANKS), dtype)
        self.merged = list[dict[str, torch.Tensor]]()
        for slot, rank in enumerate(RANKS):
            deltas = {
                one.name: LowRank(
                    torch.randn(EXPERTS, rank, one.features[0]), torch.randn(EXPERTS, rank, one.features[1]), 0.3
                )
                for one in self.weights[slot // 2 :]  # the last has none for the first weight
            }
            self.delta.fill(slot, {name: whole_stack(one, dtype) for name, one in deltas.items()})
            sums = {name: one.scale * (one.b_RN.mT @ one.a_RK) for name, one in deltas.items()}
            is_transposed = self.module.is_transposed
            self.merged.append({name: (one.mT if is_transposed else one) for name, one in sums.items()})

    @contextmanager
    def added(self, slots: list[int]) -> Iterator[None]:
        self.rows.set(slots)
        self.delta.switch(True)
        yield
        self.delta.switch(False)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts_TC = torch.stack([torch.randperm(EXPERTS - 1)[:CHOICES] for _ in range(TOKENS)])  # nobody asks the last
    return torch.randn(TOKENS, HIDDEN).to(dtype), experts_TC, torch.rand(TOKENS, CHOICES).to(dtype)


SLOTS = [-1, 0, 1, 2, 3, 0, 0, 2, -1, 1] * 3


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_mixed_rows_equal_merged_weights(kind: str) -> None:
    mixture = Mixture(kind, torch.float32)
    hidden_TK, experts_TC, weights_TC = inputs(torch.float32)
    plain = mixture.module(hidden_TK, experts_TC, weights_TC)
    with mixture.added(SLOTS):
        got = mixture.module(hidden_TK, experts_TC, weights_TC)
    for slot in range(-1, 4):
        rows = [i for i, one in enumerate(SLOTS) if one == slot]
        merged = mixture.merged[slot] if 0 <= slot < len(RANKS) else {}
        for name, weight in mixture.plain.items():
            getattr(mixture.module, name).data = weight + merged.get(name, 0)
        expected = mixture.module(hidden_TK, experts_TC, weights_TC)
        assert not merged or (expected - plain)[rows].abs().max() > 1
        torch.testing.assert_close(got[rows], expected[rows], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    """Nor has it other bits without an adapter than on a module without adapters."""
    mixture = Mixture(kind, dtype)
    tensors = inputs(dtype)
    plain = mixture.module(*tensors)
    with mixture.added(SLOTS):
        together = mixture.module(*tensors)
    for slots in (SLOTS, SLOTS[::-1]):
        for count in (1, 7, 16):
            for first in range(0, TOKENS, count):
                part = slice(first, first + count)
                with mixture.added(slots[part]):
                    got = mixture.module(*(one[part] for one in tensors))
                same = torch.tensor([one == other for one, other in zip(slots[part], SLOTS[part], strict=True)])
                assert torch.equal(got[same], together[part][same])
    bare = torch.tensor([one in (-1, 3) for one in SLOTS])
    assert torch.equal(together[bare], plain[bare]) and not torch.equal(together[~bare], plain[~bare])
    assert torch.equal(mixture.module(*tensors), plain)


@torch.inference_mode()
def test_rows_of_another_step() -> None:
    mixture = Mixture("qwen3_moe", torch.float32)
    with mixture.added([0, 1]), pytest.raises(ValueError, match="experts get 30 rows"):
        mixture.module(*inputs(torch.float32))


class Twice(MixtralTopKRouter):
    """A router that adds two products."""

    def forward(self, hidden_TK: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden_TK, self.weight) + torch.nn.functional.linear(hidden_TK, self.weight)


class Unused(MixtralTopKRouter):
    """A router without a product."""

    def forward(self, hidden_TK: torch.Tensor) -> torch.Tensor:
        return hidden_TK


class Turned(MixtralTopKRouter):
    """A router that multiplies by its transposed weight."""

    def forward(self, hidden_TK: torch.Tensor) -> torch.Tensor:
        return hidden_TK @ self.weight.t()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Twice, ValueError, "Twice multiplies 2 times by its weight, and not once"),
        (Unused, ValueError, "Unused multiplies 0 times by its weight, and not once"),
        (Turned, TypeError, "^t of a weight to which something is added"),
    ],
)
def test_other_routers_are_refused(kind: Any, error: type[Exception], message: str) -> None:
    router, hidden_TK = kind(KINDS["mixtral"][1]), torch.randn(3, HIDDEN)
    router.weight.requires_grad_(False).normal_()
    with pytest.raises(error, match=message):
        forward_with(router, lambda x, y: y, hidden_TK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [MixtralTopKRouter, GptOssTopKRouter, DeepseekV3TopkRouter])
@torch.inference_mode()
def test_routers_with_something_added_are_those_of_a_merged_weight(kind: Any, dtype: torch.dtype) -> None:
    """Some compute in float32. Scores come first in what they return."""
    config: Any = transformers.DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=8, n_group=2, topk_group=1)
    config = (
        config
        if kind is DeepseekV3TopkRouter
        else SimpleNamespace(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2)
    )
    router = kind(config).requires_grad_(False)
    for one in router.state_dict().values():
        one.normal_()
    router, delta_EK, hidden_TK = router.to(dtype), torch.randn(8, HIDDEN), torch.randn(TOKENS, HIDDEN).to(dtype)
    plain = router(hidden_TK)[0]
    got = forward_with(router, lambda x, y: (y.float() + x.float() @ delta_EK.T).to(y.dtype), hidden_TK)[0]
    router.float().weight.data += delta_EK
    expected = router(hidden_TK.float())[0]
    torch.testing.assert_close(got.float(), expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    assert not torch.equal(got, plain)


class Backwards(Qwen3MoeExperts):
    """Experts whose loop takes rows in another order."""

    def forward(self, hidden_TK: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        for expert in experts_TC.unique():
            torch.nn.functional.linear(hidden_TK[experts_TC.eq(expert).any(-1)].flip(0), self.gate_up_proj[expert])
        return hidden_TK

    forward.__wrapped__ = forward  # type: ignore[attr-defined]


class Otherwise(Qwen3MoeExperts):
    """Experts that are no product of theirs."""

    def forward(self, hidden_TK: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        return hidden_TK

    forward.__wrapped__ = forward  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "message"), [(Backwards, "in another order"), (Otherwise, "without a loop")])
def test_other_loops_are_refused(kind: Any, message: str) -> None:
    module = kind(KINDS["qwen3_moe"][1])
    [weights] = stacked_weights(torch.nn.ModuleDict({"experts": module})).values()
    with pytest.raises(ValueError, match=message):
        ExpertsDelta(module, weights, lora.Rows(1, 8), 4, torch.float32)
