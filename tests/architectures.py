"""Small models of real architectures, for tests: a class of configs in transformers, and values besides those of `SHAPE`."""

from typing import Any

CONTEXT = 1024
VOCAB = 260  # 256 bytes, 2 special tokens, 2 unused
EOS = 256

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # large enough that greedy choices differ by more than rounding errors
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,  # as torch's complex products, V2's rotation rounds what exceeds multiples of 16 otherwise
    "head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

MULTI_HEAD: dict[str, Any] = {"num_key_value_heads": 4}  # as many as heads of queries

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 48}),
    "gemma2": ("Gemma2Config", {"sliding_window": 48, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 48, "query_pre_attn_scalar": 16}),
    "gemma3_mixed": (  # a layer of six attends to all tokens
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "sliding_window": 48, "query_pre_attn_scalar": 16},
    ),
    "olmo2": ("Olmo2Config", {}),
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + i / 10 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "opt": ("OPTConfig", {**MULTI_HEAD, "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.15}),
    "gpt2": ("GPT2Config", MULTI_HEAD),
    "gpt_neox": ("GPTNeoXConfig", MULTI_HEAD),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4Config", {"partial_rotary_factor": 0.5}),
    "llama4": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 256,
            "floor_scale": 200,
        },
    ),
    # Windows in every second layer, and attention sinks.
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48, "head_dim": 16},
    ),
    # The same, in two of three layers.
    "granite_swa": ("GraniteSWAConfig", {"sliding_window": 48, "attention_multiplier": 0.25}),
    "granite_moe_swa": (
        "GraniteMoeSWAConfig",
        {"sliding_window": 48, "attention_multiplier": 0.25, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # Two shapes of rows, and two layers that read the KV of others.
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 48,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 260,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
    ),
}

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}

STRONG: dict[str, Any] = {"initializer_range": 0.3}  # so that the first token of a hundred decides

# With recurrent layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False, **STRONG},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **STRONG,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "layer_types": DELTA["layer_types"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            **STRONG,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA_2, "attn_layer_indices": [1]}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA_2,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA_2, "mamba_d_ssm": 128}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "expand": 2,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "initializer_range": 0.3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "num_experts": 1,
        },
    ),
}

ARCHITECTURES |= HYBRIDS
