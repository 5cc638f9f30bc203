"""One rank's slice of a model: a transformers model of 1/n of the heads and of the MLPs' width, with sums between the ranks.

transformers' plan (`config.base_model_tp_plan`) says for each linear layer which way it is sliced. It is used as data:

    colwise    rows of the weight: q, k, v, gate and up. Each rank has some heads, and some columns of the MLP
    rowwise    columns of the weight: o and down. Their products are summed over the ranks
    packed     several colwise layers in one weight, each of which is sliced: gate_up, and qkv
    whole      on each rank: what latent attention compresses for all heads

So the model is built from a config with 1/n of the heads and widths, each rank reads its slices of the checkpoint only, and
two kinds of layers are wrapped: rowwise ones, and norms that span all heads. The output layer is sliced by vocabulary, and
its logits are gathered on rank 0. Everything else (embeddings, norms, routers of experts) is the same on all ranks.

Source of the slices: Megatron-LM (Shoeybi et al., 2019).
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.errors import SetupError

# Fields of a config that are counts of heads or widths of MLPs.
SLICED_FIELDS = (
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# Style in the plan → how the weight is sliced. The gathering styles serve layers between which a model mixes heads, by a norm
# or because they share one weight: these are sliced all the same, and the norm is handled.
STYLES = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise",
    "packed_colwise": "packed",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "whole",
    "replicated_with_grad_allreduce": "whole",
}
# Of latent attention, which some plans leave whole. All ranks compute the latents, which all heads share.
LATENT_STYLES = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
# Names of experts' layers in checkpoints that have a weight for each expert, where the model has one for all.
EXPERT_STYLES = {name: "colwise" for name in ("gate_proj", "up_proj", "w1", "w3")} | {
    name: "rowwise" for name in ("down_proj", "w2")
}
PACKED = ("qkv_proj", "gate_up_proj")
ATTENTION_LAYERS = {"k_proj", "qkv_proj", "query_key_value", "kv_b_proj"}  # of which a model has one
KV_LAYERS = ("k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")
_TEST_ROWS = 16


class SummedLayer(torch.nn.Module):
    """A layer of which each rank computes an addend."""

    def __init__(self, part: torch.nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._group.sum(self.part(*args, **kwargs))


class GatheredLayer(torch.nn.Module):
    """A layer of which each rank computes some output features. Only rank 0 gets all."""

    def __init__(self, part: torch.nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.part(x))


class SpanningNorm(torch.nn.Module):
    """RMS norm over all heads, of which each rank has some: weight · x / √(mean(x²) + eps)."""

    def __init__(self, weight_N: torch.nn.Parameter, eps: float, group: RankGroup) -> None:
        super().__init__()
        self.weight = weight_N
        self._eps = eps  # not `eps`: fused_layers.py would take it for a norm of its own
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] → [..., N]"""
        x_float = x.float()
        squares = self._group.sum(x_float.pow(2).sum(-1, keepdim=True))
        # Heads that several ranks share count as often in the divisor as in the sum.
        return self._scaled(x, x_float, squares / (self._group.ranks * x.shape[-1]))

    def _scaled(self, x: torch.Tensor, x_float: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        return (self.weight * (x_float * torch.rsqrt(mean_square + self._eps))).to(x.dtype)

    def equals(self, norm: torch.nn.Module) -> bool:
        """Return whether a norm computes the same over the heads of one rank alone."""
        random = torch.Generator().manual_seed(0)
        x = torch.randn((_TEST_ROWS, len(self.weight)), generator=random).to(self.weight)
        expected, x_float = norm(x).float(), x.float()
        got = self._scaled(x, x_float, x_float.pow(2).mean(-1, keepdim=True)).float()
        return bool(torch.allclose(got, expected, rtol=torch.finfo(x.dtype).eps, atol=1e-6))


class Shard:
    """One rank's slice of a checkpoint.

    Args:
        path: directory of the checkpoint.
        hf_config: its config.

    Attributes:
        kv_heads: of the whole model.

    Raises:
        SetupError: the model has no plan, one with styles that are not supported, or sizes that cannot be divided.
    """

    def __init__(self, path: Path, hf_config: Any, group: RankGroup) -> None:
        self._path = path
        self._group = group
        self._architecture = (hf_config.architectures or [hf_config.model_type])[0]
        config = hf_config.get_text_config()
        if config is not hf_config:
            raise self._unsupported("its text model is part of another one")
        if getattr(config, "is_heterogeneous", False):
            raise self._unsupported("its layers differ in shape")
        self._heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._styles = self._plan(config)
        self._spanning_norms: set[str] = set()
        self.config = self._local_config(config)

    def load(self, **options: Any) -> torch.nn.Module:
        """Return the rank's model in host memory, connected to the other ranks.

        Args:
            options: of transformers' `from_pretrained`.

        Raises:
            SetupError: the model has layers that the plan does not slice as it would have to.
        """
        model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        tensors = dict(self._tensors())
        try:
            model = model_class.from_pretrained(None, config=self.config, state_dict=tensors, **options)
        except RuntimeError as error:  # sizes differ
            raise self._unsupported("its weights cannot be sliced by heads") from error
        self._group.connect()
        with torch.inference_mode():
            self._wrap_layers(model)
            self._slice_output(model)
        return model  # type: ignore[no-any-return]

    def low_rank(self, name: str, a_RK: torch.Tensor, b_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's part of a low-rank delta x · Aᵀ · B of the linear layer with a name, as views or copies."""
        layer = name.rpartition(".")[2]
        style, (in_features, out_features) = self._styles.get(layer, "whole"), (a_RK.shape[1], b_RN.shape[1])
        if style == "rowwise":
            part = self._part(layer, in_features, 0)
            return a_RK[:, part.start : part.stop], b_RN
        if style == "whole":
            return a_RK, b_RN
        parts = self._parts(layer, out_features) if style == "packed" else [self._part(layer, out_features, 0)]
        return a_RK, torch.cat([b_RN[:, part.start : part.stop] for part in parts], 1)

    def _unsupported(self, reason: str) -> SetupError:
        option = f"--tensor-parallel-size {self._group.ranks}"
        return SetupError(f"architecture {self._architecture} is not supported with {option}: {reason}")

    def _plan(self, config: Any) -> dict[str, str]:
        """Return how each kind of layer is sliced, by the last part of its name."""
        plan = getattr(config, "base_model_tp_plan", None)
        if not plan:
            raise self._unsupported("transformers has no plan for it")
        if unknown := sorted(set(plan.values()) - STYLES.keys()):
            raise self._unsupported(f"its plan has layers of the style {unknown[0]}")
        styles = {}
        for name, style in plan.items():
            layer = name.rpartition(".")[2]
            styles[layer] = "packed" if layer in PACKED else STYLES[style]
        if getattr(config, "kv_lora_rank", None):
            styles |= LATENT_STYLES
        if styles.keys().isdisjoint(ATTENTION_LAYERS):
            raise self._unsupported("its plan does not slice attention")
        return styles

    def _local_config(self, config: Any) -> Any:
        """Return the config of the rank's model."""
        ranks, local = self._group.ranks, copy.deepcopy(config)
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise self._unsupported(f"neither divides {ranks} its {self.kv_heads} KV heads, nor they it")
        for field in SLICED_FIELDS:
            if value := getattr(config, field, None):
                if value % ranks:
                    raise self._unsupported(f"its {field} of {value} is no multiple of {ranks}")
                setattr(local, field, value // ranks)
        local.num_key_value_heads = max(1, self.kv_heads // ranks)
        local.head_dim = self._head_dim
        return local

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the rank's slices of all tensors of the checkpoint."""
        for file in sorted(self._path.glob("*.safetensors")):
            with safe_open(file, "pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - no dict
                    yield name, self._slice(name, checkpoint.get_slice(name))

    def _slice(self, name: str, whole: Any) -> torch.Tensor:
        shape = whole.get_shape()
        *parents, kind = name.split(".")
        layer = parents[-1] if kind in ("weight", "bias") else kind
        style = self._styles.get(layer, "whole")
        if "experts" in parents and layer in EXPERT_STYLES and "experts" in self._styles:
            style = EXPERT_STYLES[layer]
        if layer in HEAD_NORMS and shape != [self._head_dim]:
            style = "colwise"
            if len(shape) == 1:
                self._spanning_norms.add(layer)
        if style in ("colwise", "packed"):
            dim = max(0, len(shape) - 2)
            parts = self._parts(layer, shape[dim]) if style == "packed" else [self._part(layer, shape[dim], 0)]
            pieces = [_narrow(whole, dim, part) for part in parts]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        if style == "rowwise" and len(shape) > 1:
            return _narrow(whole, len(shape) - 1, self._part(layer, shape[-1], 0))
        tensor: torch.Tensor = whole[:]
        return torch.zeros_like(tensor) if style == "rowwise" and self._group.rank else tensor  # a bias is added once

    def _part(self, layer: str, size: int, start: int) -> range:
        """Return the rank's features of a layer with `size` of them, of which the first is `start` in the tensor."""
        rank, ranks = self._group.rank, self._group.ranks
        if layer in KV_LAYERS or (layer == "k_norm" and size == self.kv_heads * self._head_dim):
            first = rank * self.kv_heads // ranks * self._head_dim
            count = max(1, self.kv_heads // ranks) * self._head_dim
        else:
            first, count = rank * size // ranks, size // ranks
        return range(start + first, start + first + count)

    def _parts(self, layer: str, size: int) -> list[range]:
        """Return the rank's features of a layer that combines others."""
        if layer == "gate_up_proj":
            return [self._part(layer, size // 2, start) for start in (0, size // 2)]
        query, kv = self._heads * self._head_dim, self.kv_heads * self._head_dim
        return [
            self._part("q_proj", query, 0),
            self._part("k_proj", kv, query),
            self._part("v_proj", kv, query + kv),
        ]

    def _wrap_layers(self, model: Any) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                style = self._styles.get(name)
                if style == "experts" and any(isinstance(layer, torch.nn.Linear) for layer in child.modules()):
                    raise self._unsupported("its experts consist of layers")
                if style == "experts" or (style == "rowwise" and isinstance(child, torch.nn.Linear)):
                    setattr(parent, name, SummedLayer(child, self._group))
                elif name in self._spanning_norms:
                    setattr(parent, name, self._spanning_norm(child))

    def _spanning_norm(self, norm: Any) -> SpanningNorm:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        spanning = SpanningNorm(norm.weight, eps, self._group) if isinstance(eps, float) else None
        if spanning is None or not spanning.equals(norm):
            raise self._unsupported(f"{type(norm).__name__} spans all heads")
        return spanning

    def _slice_output(self, model: Any) -> None:
        """Keep the rank's part of the output layer. With tied weights, it is a view of the embedding."""
        output, ranks = model.get_output_embeddings(), self._group.ranks
        if not isinstance(output, torch.nn.Linear) or output.out_features % ranks:
            return  # each rank computes all logits
        count = output.out_features // ranks
        part = torch.nn.Linear(output.in_features, count, bias=output.bias is not None, device="meta")
        for name, whole in output.named_parameters():
            values = whole.data[self._group.rank * count : (self._group.rank + 1) * count]
            is_tied = whole is model.get_input_embeddings().weight
            setattr(part, name, torch.nn.Parameter(values if is_tied else values.clone(), requires_grad=False))
        for parent in model.modules():
            for name, child in parent.named_children():
                if child is output:
                    setattr(parent, name, GatheredLayer(part, self._group))
                    return


def _narrow(whole: Any, dim: int, part: range) -> torch.Tensor:
    """Read a slice of a tensor of the checkpoint."""
    index = [slice(None)] * len(whole.get_shape())
    index[dim] = slice(part.start, part.stop)
    tensor: torch.Tensor = whole[tuple(index)]
    return tensor.contiguous()
