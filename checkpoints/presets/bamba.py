"""Published sizes of Bamba.

Shapes: transformers' BambaConfig and the release's table (32 layers, 4096 wide, 32 heads, 8 for keys and values); a
state of 128 because that, and not the default of 256, gives the published 9.78 billion.
"""

from __future__ import annotations

from checkpoints.presets.published import NO_IDS, Preset

PRESETS = {
    "bamba-9b": Preset(
        {
            "model_type": "bamba",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "max_position_embeddings": 4096,
            **NO_IDS,
        },
        9.78e9,
    ),
}
