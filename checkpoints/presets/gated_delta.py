"""Published sizes of gated delta nets; parameters are those of the text model.

Shapes: Alibaba's and Moonshot's config.json as transformers, vLLM and tools that estimate memory quote them. Sizes: the
models' names.
"""

from __future__ import annotations

from checkpoints.presets.published import NO_IDS, Preset

_DELTA = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    **NO_IDS,
}
_SPARSE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

PRESETS = {
    "qwen3-next-80b-a3b": Preset(
        {
            **_DELTA,
            **_SPARSE,
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        80e9,
    ),
    "qwen3.5-9b": Preset(
        {
            **_DELTA,
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        9e9,
    ),
    "qwen3.5-27b": Preset(
        {
            **_DELTA,
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
        27e9,
    ),
    "qwen3.5-35b-a3b": Preset(
        {
            **_DELTA,
            **_SPARSE,
            "model_type": "qwen3_5_moe_text",
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        35e9,
    ),
    # The name does not count embedding and head; the files have 91.5 GiB in bfloat16.
    "kimi-linear-48b-a3b": Preset(
        {
            "model_type": "kimi_linear",
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 27) if n % 4],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "model_max_length": 1048576,
            "tie_word_embeddings": False,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
        },
        49.1e9,
    ),
}
