"""Published size of RecurrentGemma.

Shape: Google's config.json, as transformers' defaults and its converter quote it. Size: the model's card.
"""

from __future__ import annotations

from checkpoints.presets.published import NO_IDS, Preset

PRESETS = {
    "recurrentgemma-2b": Preset(
        {
            "model_type": "recurrent_gemma",
            "vocab_size": 256000,
            "hidden_size": 2560,
            "intermediate_size": 15360,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "num_key_value_heads": 1,
            "lru_width": 2560,
            "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
            "logits_soft_cap": 30.0,
            **NO_IDS,
        },
        2.68e9,
    ),
}
