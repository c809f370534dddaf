"""Published sizes of gated delta nets: fields of config.json, and how many parameters the text model has.

Shapes: Alibaba's config.json as transformers, vLLM and tools that estimate memory quote it. Sizes: the models' names.
"""

from __future__ import annotations

from typing import Any

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
    "bos_token_id": None,
    "eos_token_id": None,
}
_SPARSE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "qwen3-next-80b-a3b": (
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
    "qwen3.5-9b": (
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
    "qwen3.5-27b": (
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
    "qwen3.5-35b-a3b": (
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
}
