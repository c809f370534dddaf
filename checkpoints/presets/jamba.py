"""Published sizes of Jamba.

Shapes: AI21's config.json as tools that export models quote it; that of 1.5 Large as its paper describes it (Jamba
Team, 2024). Of 1.6 and 2, only the sizes were found, which are those of the same shapes.
"""

from __future__ import annotations

from checkpoints.presets.published import NO_IDS, Preset

_MINI = {
    "model_type": "jamba",
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    **NO_IDS,
}
_LARGE = _MINI | {
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "mamba_dt_rank": 512,
}
_3B = _MINI | {
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "attn_layer_period": 14,
    "attn_layer_offset": 7,
    "num_attention_heads": 20,
    "num_key_value_heads": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_dt_rank": 160,
    "tie_word_embeddings": True,
}

PRESETS = {
    "jamba-reasoning-3b": Preset(_3B, 3e9),
    "jamba2-3b": Preset(_3B, 3e9),
    "jamba-1.5-mini": Preset(_MINI, 52e9),
    "jamba-mini-1.6": Preset(_MINI, 52e9),
    "jamba2-mini": Preset(_MINI, 52e9),
    "jamba-1.5-large": Preset(_LARGE, 398e9),
    "jamba-large-1.6": Preset(_LARGE, 398e9),
}
