"""Published sizes of Mamba and Falcon-Mamba.

Shapes: state-spaces/mamba as transformers converts it; Falcon-Mamba's config.json as tools that export models quote it.
Sizes: the models' names; for the largest, whose names are rounded, what the Hugging Face Hub counts.
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import NO_IDS, Preset


def _mamba(hidden_size: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "mamba",
        "vocab_size": 50280,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "tie_word_embeddings": True,
        **NO_IDS,
    }


PRESETS = {
    "mamba-130m": Preset(_mamba(768, 24), 130e6),
    "mamba-370m": Preset(_mamba(1024, 48), 370e6),
    "mamba-790m": Preset(_mamba(1536, 48), 790e6),
    "mamba-1.4b": Preset(_mamba(2048, 48), 1.37e9),
    "mamba-2.8b": Preset(_mamba(2560, 64), 2.77e9),
    "falcon-mamba-7b": Preset(
        {
            "model_type": "falcon_mamba",
            "vocab_size": 65024,
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 64,
            "state_size": 16,
            "conv_kernel": 4,
            "time_step_rank": 256,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 11,
        },
        7.27e9,
    ),
}
