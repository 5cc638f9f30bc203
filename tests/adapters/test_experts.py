"""PEFT's names and shapes of what it adds to experts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pdserve.adapters.experts import (
    ExpertLayer,
    LowRank,
    StackedWeight,
    expert_layer,
    router,
    routers,
    stack,
    stacked_weights,
    targeted,
    untargeted,
    whole_stack,
)
from pdserve.engine.cpu_fusion import experts
from pdserve.kernels import native

EXPERTS, HIDDEN, INTERMEDIATE, RANK = 3, 64, 40, 6
MODULE = "model.layers.0.mlp.experts"
GATE_UP = StackedWeight("gate_up_proj", EXPERTS, (HIDDEN, 2 * INTERMEDIATE))
DOWN = StackedWeight("down_proj", EXPERTS, (INTERMEDIATE, HIDDEN))
MODULES = {MODULE: (GATE_UP, DOWN)}


def model_of(kind: type[torch.nn.Module], **config: Any) -> torch.nn.Module:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, **config}
    return torch.nn.ModuleDict({"experts": kind(SimpleNamespace(**sizes, hidden_act="silu"))})


def test_stacked_weights() -> None:
    """Their dimensions are in either order; NemotronH's experts have no gate."""
    assert stacked_weights(model_of(Qwen3MoeExperts)) == {"experts": (GATE_UP, DOWN)}
    sizes: Any = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    gpt_oss = torch.nn.ModuleDict({"experts": GptOssExperts(transformers.GptOssConfig(**sizes))})
    features = {name: [(one.name, one.features) for one in of] for name, of in stacked_weights(gpt_oss).items()}
    assert features == {"experts": [("gate_up_proj", GATE_UP.features), ("down_proj", DOWN.features)]}
    assert not any(one.has_parts or not one.is_transposed for one in stacked_weights(gpt_oss)["experts"]), (
        "gates and ups take turns"
    )
    config = transformers.NemotronHConfig(
        n_routed_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE
    )
    [(up, down)] = stacked_weights(torch.nn.ModuleDict({"experts": NemotronHExperts(config)})).values()
    assert (up.name, up.features, down.features) == ("up_proj", (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    assert stacked_weights(torch.nn.Linear(2, 2)) == {}


@pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_weights_are_in_the_same_order(dtype: torch.dtype) -> None:
    experts.register()
    sizes: Any = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE}
    config = transformers.Qwen3MoeConfig(**sizes | {"experts_implementation": experts.NAME})
    module = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.1)
    model = torch.nn.ModuleDict({"experts": module})
    assert experts.pack_experts(model) == 1
    assert stacked_weights(model) == {"experts": (GATE_UP, DOWN)}


@pytest.mark.parametrize(
    ("name", "targets", "found"),
    [
        (MODULE, ["mlp.experts.gate_up_proj", "down_proj"], DOWN),
        (f"{MODULE}.base_layer", ["mlp.experts.gate_up_proj", "down_proj"], GATE_UP),
        (f"{MODULE}.base_layer.base_layer", ["gate_up_proj", "down_proj"], None),
        (MODULE, ["experts.gate_up_proj"], GATE_UP),
        (f"{MODULE}.base_layer", ["gate_up_proj"], None),
        (MODULE, ["up_proj"], None),
        (MODULE, [], None),
        ("model.layers.1.mlp.experts", ["down_proj"], None),
    ],
)
def test_weights_that_names_of_peft_stand_for(name: str, targets: list[str], found: StackedWeight | None) -> None:
    assert targeted(name, targets, MODULES) == (None if found is None else (MODULE, found))


def test_targets_that_are_no_weights_of_a_mixture() -> None:
    targets = ["experts.down_proj", "gate.weight", "up_proj", f"{MODULE}.gate_up_proj"]
    assert untargeted(targets, MODULES, ()) == ["gate.weight", "up_proj"]
    assert untargeted(targets, MODULES, ["model.layers.0.mlp.gate"]) == ["up_proj"]


def test_routers() -> None:
    """They are no linear layers; another version of transformers may have another name for what is around them."""
    config: Any = transformers.MixtralConfig(num_local_experts=EXPERTS, hidden_size=HIDDEN, num_hidden_layers=1)
    model = torch.nn.ModuleDict({"gate": MixtralTopKRouter(config), "head": torch.nn.Linear(2, 3)})
    model["tokens"] = torch.nn.Embedding(4, 5)
    assert routers(torch.nn.ModuleDict({"mlp": model})) == {"mlp.gate": (HIDDEN, EXPERTS)}
    names = {"layers.0.mlp.gate": (HIDDEN, EXPERTS), "layers.1.mlp.gate": (HIDDEN, EXPERTS)}
    assert router("layers.1.mlp.gate", names) == "layers.1.mlp.gate"
    assert router("layers.1.block_sparse_moe.gate", names) == "layers.1.mlp.gate"
    assert router("layers.2.mlp.gate", names) is router("layers.1.mlp.up_proj", names) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{MODULE}.2.gate_proj", (GATE_UP, 2, 0, 2)),
        (f"{MODULE}.0.up_proj", (GATE_UP, 0, 1, 2)),
        (f"{MODULE}.7.down_proj", (DOWN, 7, 0, 1)),
        ("model.layers.0.block_sparse_moe.experts.1.w3", (GATE_UP, 1, 1, 2)),
        ("model.layers.0.block_sparse_moe.experts.1.w2", (DOWN, 1, 0, 1)),
        ("model.layers.1.mlp.experts.2.gate_proj", None),
        (f"{MODULE}.2.gate_up_proj", None),
        ("model.layers.0.mlp.gate_proj", None),
    ],
)
def test_layers_of_one_expert(name: str, found: tuple[StackedWeight, int, int, int] | None) -> None:
    assert expert_layer(name, MODULES) == (None if found is None else ExpertLayer(MODULE, *found))


def test_outputs_that_take_turns_are_of_no_layer() -> None:
    interleaved = {MODULE: (StackedWeight("gate_up_proj", EXPERTS, GATE_UP.features, True, False), DOWN)}
    assert expert_layer(f"{MODULE}.2.gate_proj", interleaved) is None
    assert expert_layer(f"{MODULE}.2.down_proj", interleaved) is not None


def test_matrices_of_a_stacked_weight() -> None:
    """By PEFT's own definition of the sum."""
    a, b = torch.randn(EXPERTS * RANK, HIDDEN), torch.randn(2 * INTERMEDIATE, EXPERTS * RANK)
    delta = GATE_UP.split(a, b, RANK, 0.5, is_old=False)
    assert delta is not None
    expected = torch.einsum("ore,eri->eoi", b.unflatten(1, (-1, EXPERTS)), a.unflatten(0, (EXPERTS, -1)))
    torch.testing.assert_close(delta.b_RN.mT @ delta.a_RK, expected)
    of = whole_stack(delta, torch.float32)
    assert of.a_XRK.shape == (EXPERTS, 8, HIDDEN), "ranks are padded to multiples of 4"
    torch.testing.assert_close(of.b_XRN.mT @ of.a_XRK, expected)
    assert of.experts_X.tolist() == [0, 1, 2] and of.scales_X.tolist() == [0.5] * 3
    assert GATE_UP.split(a, b, RANK - 1, 0.5, is_old=False) is DOWN.split(a, b, RANK, 0.5, is_old=False) is None


@pytest.mark.parametrize("out_features", [2 * INTERMEDIATE, HIDDEN])
def test_matrices_that_peft_saved_before_0_19(out_features: int) -> None:
    """It took the first dimension of each expert for that of the input: by its definition, "ore,eri->eio" is [E, N, K]."""
    a, b = torch.randn(EXPERTS * RANK, out_features), torch.randn(HIDDEN, EXPERTS * RANK)
    expected = torch.einsum("ore,eri->eio", b.unflatten(1, (-1, EXPERTS)), a.unflatten(0, (EXPERTS, -1)))
    weight = StackedWeight("gate_up_proj", EXPERTS, (HIDDEN, out_features))
    delta = weight.split(a, b, RANK, 0.5, is_old=True)
    assert delta is not None
    torch.testing.assert_close(delta.b_RN.mT @ delta.a_RK, expected)
    new = weight.split(a, b, RANK, 0.5, is_old=False)
    assert new is not None and torch.equal(new.a_RK, delta.a_RK) == (out_features != HIDDEN), "shapes show it"
    transposed = StackedWeight("gate_up_proj", EXPERTS, (out_features, HIDDEN), True, False)
    old, new = (transposed.split(a, b, RANK, 0.5, is_old) for is_old in (True, False))
    assert old is not None and new is not None
    assert torch.equal(old.a_RK, new.a_RK) and torch.equal(old.b_RN, new.b_RN)


@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 3.0)], ids=["alike", "different"])
def test_layers_of_experts_in_one_stack(scales: tuple[float, float]) -> None:
    """Expert 0 has both layers, of different ranks, and expert 2 one."""
    made = {
        ExpertLayer(MODULE, GATE_UP, expert, part, 2): LowRank(
            torch.randn(rank, HIDDEN), torch.randn(rank, INTERMEDIATE), scales[part]
        )
        for expert, part, rank in ((2, 1, 3), (0, 1, 4), (0, 0, 2))
    }
    of = stack(GATE_UP, made, torch.float32)
    assert of.experts_X.tolist() == [0, 2]
    got = of.scales_X.float()[:, None, None] * (of.b_XRN.mT @ of.a_XRK)
    expected = torch.zeros(2, 2 * INTERMEDIATE, HIDDEN)
    for layer, one in made.items():
        rows = slice(layer.part * INTERMEDIATE, (layer.part + 1) * INTERMEDIATE)
        expected[layer.expert // 2, rows] = one.scale * one.b_RN.T @ one.a_RK
    torch.testing.assert_close(got, expected)
