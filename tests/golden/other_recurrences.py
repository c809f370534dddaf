"""Tiny models with other recurrences than Mamba2: gated delta nets, Kimi Delta Attention and short convolutions.

The delta nets have three key heads for six value heads, keys of 40 and values of 24.
"""

from __future__ import annotations

from golden.recipe import Recipe

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_QWEN = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 40,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _ROPE,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_CHANGES = {"rms_norm_eps": 1e-2, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
# Most norms multiply by 1 + weight: weights around 1 would amplify everything by two in every layer.
_QUIETER = {"layernorm": 0.2, "q_norm": 0.2, "k_norm": 0.2, "model.norm": 0.2}
_LFM2 = {
    "vocab_size": 331,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LFM2_CHANGES = {"norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}

RECIPES = {
    "qwen3next": Recipe(
        "Qwen3NextForCausalLM",
        {**_QWEN, **_MOE, "linear_conv_kernel_dim": 4},
        changes=_CHANGES | {"num_experts_per_tok": 3},
        quieter=_QUIETER,
        mtp=True,
        seed=71,
    ),
    "qwen3next-dense": Recipe(
        "Qwen3NextForCausalLM",
        {
            **_QWEN,
            **_MOE,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
        changes=_CHANGES,
        quieter=_QUIETER,
        seed=72,
    ),
    "qwen35": Recipe(
        "Qwen3_5ForCausalLM",
        {**_QWEN, "linear_conv_kernel_dim": 3},
        changes=_CHANGES,
        quieter=_QUIETER,
        mtp=True,
        seed=73,
    ),
    "qwen35-moe": Recipe(
        "Qwen3_5MoeForCausalLM",
        {**_QWEN, **_MOE, "linear_conv_kernel_dim": 4},
        changes=_CHANGES,
        quieter=_QUIETER,
        rename_weights=("model.", "model.language_model."),
        seeing=True,
        mtp=True,
        seed=74,
    ),
    "lfm2": Recipe(
        "Lfm2ForCausalLM",
        {
            **_LFM2,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "intermediate_size": 120,
            "block_multiple_of": 16,
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        changes=_LFM2_CHANGES,
        seed=81,
    ),
    "lfm2-moe": Recipe(
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "intermediate_size": 88,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
        changes=_LFM2_CHANGES | {"routed_scaling_factor": 1.0},
        seed=82,
    ),
    "kimi": Recipe(
        "KimiLinearForCausalLM",
        {
            "vocab_size": 331,
            "hidden_size": 56,
            "intermediate_size": 88,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 12,
            "v_head_dim": 18,
            "kv_lora_rank": 28,
            "linear_num_heads": 5,
            "linear_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        changes={"rms_norm_eps": 1e-2, "routed_scaling_factor": 1.0, "topk_group": 3, "norm_topk_prob": False},
        seed=95,
    ),
    "olmo-hybrid": Recipe(
        "OlmoHybridForCausalLM",
        {
            **{key: _QWEN[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")},
            **{key: value for key, value in _QWEN.items() if key.startswith("linear") or key.endswith("token_id")},
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": None,
            "max_position_embeddings": 2048,
        },
        changes={"rms_norm_eps": 1e-2, "linear_allow_neg_eigval": False},
        modules=True,
        seed=91,
    ),
}
