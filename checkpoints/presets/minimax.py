"""Published sizes of MiniMax-Text-01, and of M1, which has the same shape.

Shapes: the makers' config.json as other engines quote it; seven lightning attentions to one softmax attention.
"""

from __future__ import annotations

from checkpoints.presets.published import NO_IDS, Preset

_ALPHA = 3.5565588200778455
_456B = {
    "model_type": "minimax_text_01",
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 10_000_000,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
    "postnorm": True,
    "layernorm_full_attention_alpha": _ALPHA,
    "layernorm_linear_attention_alpha": _ALPHA,
    "layernorm_mlp_alpha": _ALPHA,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 10_240_000,
    **NO_IDS,
}

PRESETS = {
    "minimax-text-01": Preset(_456B, 456e9),
    "minimax-m1-80k": Preset(_456B | {"model_type": "minimax_m1"}, 456e9),
}
