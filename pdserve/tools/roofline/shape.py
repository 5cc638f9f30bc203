"""Shape of a model from its config.json: what its steps read and compute, and its KV. Plain arithmetic, without torch."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError
from pdserve.kv_spec import KVGroup, KVSpec
from pdserve.lines.untrusted import read_json

UNGATED = (
    "opt",
    "gpt2",
    "gptj",
    "gpt_neox",
    "bloom",
    "falcon",
    "phi",
)  # model types whose MLPs have two matrices, not three
ATTENDING = ("full_attention", "attention", "sliding_attention")  # kinds of layers
RECURRENT = ("linear_attention", "mamba")
UNKNOWN = "hybrid_override_pattern"  # which names kinds of layers otherwise
SUFFIXES = ("-instruct", "-base", "-chat", "-it", "-hf")
Config = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Numbers of parameters and operations.

    Attributes:
        kv: its KV.
        heads: of attention's queries, in each layer.
        dense: parameters that each token uses, without the output matrix.
        expert, experts, chosen: parameters of one expert in all layers together, experts of a layer, and those of a token.
        output: parameters of the output matrix.
        pair_flops: operations of attention for each pair of a new and an earlier token, in all layers without a window.
        context_flops: the same of decode, where latent rows are not expanded.
    """

    name: str
    layers: int
    hidden: int
    max_model_len: int
    kv: KVSpec
    heads: int
    dense: int
    expert: int
    experts: int
    chosen: int
    output: int
    pair_flops: float
    context_flops: float

    @property
    def parameters(self) -> int:
        """All that are kept in memory; the input matrix is taken to be another one than that of the output."""
        return self.dense + self.expert * self.experts + 2 * self.output

    @property
    def active(self) -> int:
        """Parameters that a token uses, without the output matrix."""
        return self.dense + self.expert * self.chosen

    def read(self, tokens: float) -> float:
        """Return how many parameters a step of `tokens` reads, without the output matrix. Experts are drawn evenly."""
        if not self.experts:
            return self.dense
        used: float = 1 - (1 - self.chosen / self.experts) ** tokens
        return self.dense + self.expert * self.experts * used

    def can_divide(self, gpus: int) -> bool:
        """Return whether attention can be divided among GPUs: whole heads each, of KV also one for several of them."""
        kv_heads = [group.num_heads for group in self.kv.groups if not group.latent]
        return self.heads % gpus == 0 and all(one % gpus == 0 or gpus % one == 0 for one in kv_heads)

    def kv_numbers(self, context: float) -> float:
        """Return the numbers of KV for each token of a context of this length, of which windows forget a part."""
        return sum(
            len(group.layers) * group.num_heads * group.head_dim * (1 if group.latent else 2) * kept(group, context)
            for group in self.kv.groups
        )

    def attended(self, context: float) -> float:
        """Return the share of a context that layers attend to, in the mean."""
        layers = sum(len(group.layers) for group in self.kv.groups)
        return sum(len(group.layers) * kept(group, context) for group in self.kv.groups) / layers


def kept(group: KVGroup, context: float) -> float:
    """Return the share of a context that the window of some layers keeps."""
    return 1.0 if group.window is None or context <= group.window else group.window / context


@cache
def load(model: str) -> Shape:
    """Return the shape of a model: of the config.json in a directory, or one of the built-in shapes. Nothing is downloaded.

    Raises:
        SetupError: there is neither, or the config lacks something.
    """
    file = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if file.is_file():
        try:
            config = read_json(file.read_text())
        except OSError as error:
            raise SetupError(f"--model {model}: {file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise SetupError(f"--model {model}: {file} is not JSON: {error}") from None
    else:
        known = built_in()
        names = {key(name): name for name in known} | {key(name.partition("/")[2]): name for name in known}
        if key(model) not in names:
            raise SetupError(
                f"--model {model}: no directory with a config.json, which is not downloaded, and no built-in shape; "
                f"there are {', '.join(known)}"
            )
        config = known[names[key(model)]]
    try:
        return shape_of(model, config)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise SetupError(f"--model {model}: its config has no usable {error}") from None


def built_in() -> dict[str, Config]:
    """Return the configs that come with this package, by name."""
    found: dict[str, Config] = json.loads((files("pdserve.tools.roofline") / "models.json").read_text())
    return found


def key(name: str) -> str:
    """Return a name without the endings that do not change a shape."""
    name = name.lower()
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def shape_of(name: str, config: Config) -> Shape:
    """Return the shape that a config of transformers describes."""
    config = config.get("text_config", config)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    attention, pair_flops, context_flops = _attention(config)
    matrices = 2 if config.get("model_type") in UNGATED else 3
    inner = config.get("ffn_dim") or config.get("intermediate_size") or 4 * hidden
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    sparse = (
        layers - (config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())) if experts else 0
    )
    of_expert = matrices * hidden * (config.get("moe_intermediate_size") or inner)
    shared = (config.get("n_shared_experts") or 0) * of_expert
    shared += matrices * hidden * (config.get("shared_expert_intermediate_size") or 0)
    kv, recurrent = kv_spec(config), _recurrent(config)
    attending = sum(len(group.layers) for group in kv.groups)
    dense = attending * attention + (layers - attending) * recurrent
    dense += (layers - sparse) * matrices * hidden * inner + sparse * (shared + hidden * experts)
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        max_model_len=config.get("max_position_embeddings") or 4096,
        kv=kv,
        heads=config["num_attention_heads"],
        dense=dense,
        expert=sparse * of_expert,
        experts=experts,
        chosen=config["num_experts_per_tok"] if experts else 0,
        output=hidden * config["vocab_size"],
        pair_flops=attending * pair_flops,
        context_flops=attending * context_flops,
    )


def _attention(config: Config) -> tuple[int, float, float]:
    """Return the parameters of a layer's attention, and its operations for each pair in prefill, and in decode."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if rank := config.get("kv_lora_rank"):
        rotary, plain, value = (config[f"{part}_head_dim"] for part in ("qk_rope", "qk_nope", "v"))
        query = heads * (plain + rotary)
        queries = hidden * query if not (low := config.get("q_lora_rank")) else low * (hidden + query)
        others = hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
        return queries + others, 2.0 * heads * (plain + rotary + value), 2.0 * heads * (2 * rank + rotary)
    size, kv_heads = _heads(config)
    return hidden * size * (2 * heads + 2 * kv_heads), 4.0 * heads * size, 4.0 * heads * size


def _heads(config: Config) -> tuple[int, int]:
    """Return the size of a head, and the number of KV heads."""
    heads = config["num_attention_heads"]
    return config.get("head_dim") or config["hidden_size"] // heads, config.get("num_key_value_heads") or heads


def _recurrent(config: Config) -> int:
    """Return the parameters of a recurrent layer (Gated DeltaNet or Mamba-2); 0: there is none."""
    hidden = config["hidden_size"]
    if heads := config.get("linear_num_value_heads"):
        keys, values = _delta_sizes(config)
        return int(hidden * (2 * keys + 3 * values + 2 * heads))
    if heads := config.get("mamba_n_heads"):
        inner = heads * config["mamba_d_head"]
        return int(hidden * (3 * inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"] + heads))
    return 0


def _delta_sizes(config: Config) -> tuple[int, int]:
    """Return the numbers of all keys, and of all values, of a token in a layer of Gated DeltaNet."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _state_numbers(kind: str, config: Config) -> int:
    """Return the numbers of a recurrent layer's state, that of its convolution included."""
    if kind == "linear_attention":
        keys, values = _delta_sizes(config)
        return int(values * config["linear_key_head_dim"] + (2 * keys + values) * config["linear_conv_kernel_dim"])
    inner, width = config["mamba_n_heads"] * config["mamba_d_head"], config["mamba_d_state"]
    return int(inner * width + (inner + 2 * config["mamba_n_groups"] * width) * config["mamba_d_conv"])


def kv_spec(config: Config) -> KVSpec:
    """Return the KV of a model: latent rows, heads, windows of some layers, and states of recurrent ones.

    Raises:
        KeyError: layers are of another kind, or none has attention.
    """
    layers = range(config["num_hidden_layers"])
    if rank := config.get("kv_lora_rank"):
        return KVSpec((KVGroup(tuple(layers), 1, rank + config["qk_rope_head_dim"], latent=True),))
    size, heads = _heads(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * len(layers)
    if "layer_types" not in config and (pattern := config.get("sliding_window_pattern")):
        kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in layers]
    groups = []
    for kind, span in (("full_attention", None), ("sliding_attention", window)):
        names = (kind, "attention") if span is None else (kind,)  # Granite's full attention has the short name
        if of_kind := tuple(layer for layer in layers if kinds[layer] in names):
            groups.append(KVGroup(of_kind, heads, size, window=span))
    if UNKNOWN in config or (others := set(kinds) - {*ATTENDING, *RECURRENT}):
        raise KeyError(f"kinds of layers: {UNKNOWN if UNKNOWN in config else ', '.join(sorted(others))}")
    if not groups:
        raise KeyError("layers with attention")
    states = {(at, "state"): _state_numbers(kind, config) for at, kind in enumerate(kinds) if kind in RECURRENT}
    return KVSpec(tuple(groups), states=states, num_without=len(states))
