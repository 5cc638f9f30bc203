"""GGUF files of small checkpoints, written with llama.cpp's gguf-py as its converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


def write_gguf(source: Path, to: Path, kinds: dict[str, str], rope_factors: int = 0, **fields: Any) -> Path:
    """Write a checkpoint with one file of weights as GGUF.

    Args:
        kinds: type of tensors by their names in GGUF, whole or without block and `.weight`; others stay in float32.
        rope_factors: number of factors of rotary positions, if there are any.
        fields: of the metadata, with `__` for points.
    """
    config = AutoConfig.from_pretrained(source)
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(to, arch)
    writer.add_name("test")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if not any("key_length" in name for name in fields):
        writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_tokenizer(writer, source, config)
    for name, weight in _named(source, config, arch).items():
        kind = (
            next((kind for part, kind in kinds.items() if part in (name, name.split(".")[-2])), "F32")
            if weight.dim() > 1
            else "F32"
        )
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        of_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(weight.float().numpy(), of_type), raw_dtype=of_type)
    for name, value in fields.items():
        key = name.replace("__", ".")
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint16(key, value)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.ones(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _named(source: Path, config: Any, arch: str) -> dict[str, torch.Tensor]:
    """Return the weights by their names in GGUF, those of experts stacked."""
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors, experts = dict[str, torch.Tensor](), dict[str, dict[int, torch.Tensor]]()
    for name, tensor in load_file(source / "model.safetensors").items():
        owner, _, rest = name.partition(".experts.")
        if rest:
            number, part, _ = rest.split(".")
            block, short = owner.split(".")[2], part.removesuffix("_proj")
            experts.setdefault(f"blk.{block}.ffn_{short}_exps.weight", {})[int(number)] = tensor
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            tensors[found] = tensor
    return tensors | {name: torch.stack([each for _, each in sorted(of.items())]) for name, of in experts.items()}


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: Any) -> None:
    stored = json.loads((source / "tokenizer.json").read_text())
    added = {one["id"]: one["content"] for one in stored["added_tokens"]}
    by_id = {number: token for token, number in stored["model"]["vocab"].items()} | added
    count, merges = config.vocab_size, [" ".join(pair) for pair in stored["model"]["merges"]]
    if not merges:  # there must be one
        merges, by_id[count - 1] = ["a b"], "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(number, f"<unused{number}>") for number in range(count)])
    types = np.array([gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in range(count)])
    writer.add_token_types(types.tolist())
    writer.add_token_merges(merges)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    writer.add_eos_token_id(ends[0])
    writer.add_eot_token_id(ends[-1])
    if (template := source / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())
