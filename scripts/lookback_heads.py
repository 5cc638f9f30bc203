"""Initial weights of induction heads: they find the token that followed an earlier occurrence of the current token."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention


def pattern_of_offset(config: LlamaConfig, offset: int, pairs: int = 3) -> Tensor:
    """Return a query that, after rotation, matches the all-ones key of the fastest rotary pairs ``offset`` tokens back."""
    assert config.head_dim is not None and config.rope_parameters is not None
    half, theta = config.head_dim // 2, config.rope_parameters["rope_theta"]
    assert theta is not None
    angle = -offset * theta ** (-torch.arange(half) / half)
    pattern = torch.cat([angle.cos() - angle.sin(), angle.sin() + angle.cos()])
    pattern[torch.arange(config.head_dim) % half >= pairs] = 0.0
    return pattern


def head_slice(attention: LlamaAttention, index: int) -> slice:
    """Return the rows (or columns) of one head in a projection."""
    return slice(index * attention.head_dim, (index + 1) * attention.head_dim)


def attend_to_previous_tokens(attention: LlamaAttention, constant: Tensor, seen: Tensor, written: Tensor) -> None:
    """Make the first group's heads attend one and two tokens back, and copy subspace ``seen`` to ``written``."""
    sharpness, config, first = 0.6, attention.config, head_slice(attention, 0)
    attention.k_proj.weight[first] = sharpness * torch.outer(pattern_of_offset(config, 0), constant)
    for index in range(attention.num_key_value_groups):
        attention.q_proj.weight[head_slice(attention, index)] = sharpness * torch.outer(
            pattern_of_offset(config, index + 1), constant
        )
    attention.v_proj.weight[first] = 0.25 * seen
    attention.o_proj.weight[:, first] = 0.25 * written.T


def attend_and_copy(attention: LlamaAttention, group: int, seen: Tensor, written: Tensor, copied: Tensor) -> None:
    """Make a group's heads attend to positions whose previous token is the current one, and copy the token there."""
    size, heads = attention.head_dim, attention.num_key_value_groups
    slow = (torch.arange(size) % (size // 2) >= size // 4)[:, None]
    attention.k_proj.weight[head_slice(attention, group)] = 2.0 * written * slow
    attention.v_proj.weight[head_slice(attention, group)] = 0.25 * copied
    for index in range(heads * group, heads * (group + 1)):
        attention.q_proj.weight[head_slice(attention, index)] = 2.0 * seen * slow
        attention.o_proj.weight[:, head_slice(attention, index)] = 0.25 / heads * copied.T


@torch.no_grad()
def place_lookback_heads(model: LlamaForCausalLM) -> None:
    """Initialise induction heads, which training would also find, but only after many steps.

    In layer 0 a head attends one token back and writes that token into a separate subspace. In layers 1 and 2 heads
    compare the current token with that subspace at earlier positions and copy the token found there. The comparison
    uses only the slow rotary pairs, which hardly rotate within the context, so it works at any distance. All weights
    stay trainable.
    """
    hidden, size = model.config.hidden_size, model.model.layers[0].self_attn.head_dim
    basis = torch.linalg.qr(torch.randn(hidden, hidden)).Q.T
    constant, seen, written = basis[0], basis[1 : 1 + size], basis[1 + size : 1 + 2 * size]
    model.model.embed_tokens.padding_idx = None  # the padding token also ends texts, so it must be trained
    embedding = model.model.embed_tokens.weight
    embedding[model.config.pad_token_id] = 0.02 * torch.randn(hidden)
    # A component that all tokens share equally, so that a head can attend by position alone.
    embedding -= torch.outer(embedding @ constant, constant)
    embedding *= 0.3 / embedding.norm(dim=1, keepdim=True)
    embedding += 0.15 * constant
    for layer in model.model.layers:  # small random weights, which would otherwise drown the placed ones
        layer.self_attn.o_proj.weight *= 0.2
        layer.mlp.down_proj.weight *= 0.2
    attend_to_previous_tokens(model.model.layers[0].self_attn, constant, seen, written)
    for layer_index, group in ((1, 0), (1, 1), (2, 0), (2, 1)):  # each group copies a different part of the token
        start = (2 * (layer_index - 1) + group + 2) * size
        copied = basis[start : start + size]
        attend_and_copy(model.model.layers[layer_index].self_attn, group, seen, written, copied)
