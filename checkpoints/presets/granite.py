"""Published sizes of Granite 4.0 H.

Shapes: config.json of each as quoted in the tests of MLX ports and of tools that estimate memory. Counts: metadata of
the weight files (350m, tiny), llama.cpp's listing (micro), IBM's model card (small).
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import Preset


def _granite(layers: int, attention: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "num_hidden_layers": layers,
        "layer_types": ["attention" if i in attention else "mamba" for i in range(layers)],
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "max_position_embeddings": 131072,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        **fields,
    }


_EVERY_TENTH = (5, 15, 25, 35)
PRESETS = {
    "granite-4.0-h-350m": Preset(
        _granite(
            32,
            (10, 13, 17, 27),
            hidden_size=768,
            shared_intermediate_size=2048,
            intermediate_size=2048,
            num_attention_heads=12,
            num_key_value_heads=4,
            mamba_n_heads=48,
            mamba_d_head=32,
            attention_multiplier=0.015625,
            residual_multiplier=0.246,
            logits_scaling=3,
            max_position_embeddings=32768,
        ),
        340_332_224,
    ),
    "granite-4.0-h-micro": Preset(
        _granite(
            40,
            _EVERY_TENTH,
            hidden_size=2048,
            shared_intermediate_size=8192,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            mamba_n_heads=64,
            attention_multiplier=0.015625,
            logits_scaling=8,
        ),
        3.19e9,
    ),
    "granite-4.0-h-tiny": Preset(
        _granite(
            40,
            _EVERY_TENTH,
            hidden_size=1536,
            shared_intermediate_size=1024,
            intermediate_size=512,
            num_local_experts=64,
            num_experts_per_tok=6,
            num_attention_heads=12,
            num_key_value_heads=4,
            mamba_n_heads=48,
            attention_multiplier=0.0078125,
            logits_scaling=6,
        ),
        6_939_037_248,
    ),
    "granite-4.0-h-small": Preset(
        _granite(
            40,
            _EVERY_TENTH,
            hidden_size=4096,
            shared_intermediate_size=1536,
            intermediate_size=768,
            num_local_experts=72,
            num_experts_per_tok=10,
            num_attention_heads=32,
            num_key_value_heads=8,
            mamba_n_heads=128,
            attention_multiplier=0.0078125,
            logits_scaling=16,
        ),
        32e9,
    ),
}
