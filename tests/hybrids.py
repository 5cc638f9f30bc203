"""Small models with recurrent layers, for tests: a class of configs in transformers, and values besides the usual ones."""

from typing import Any

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
