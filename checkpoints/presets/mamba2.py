"""Published sizes of Mamba-2.

Shapes: state-spaces/mamba (the family's own sizes, vocabulary padded to a multiple of 16) as transformers converts
them, and config.json of Codestral-Mamba as quoted in NX-AI's benchmarks. Counts: the models' names.
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import NO_IDS, Preset


def _mamba2(hidden_size: int, layers: int, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "vocab_size": 50288,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_heads": hidden_size * 2 // 64,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 256,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        **NO_IDS,
        **fields,
    }


PRESETS = {
    "mamba2-130m": Preset(_mamba2(768, 24), 130e6),
    "mamba2-370m": Preset(_mamba2(1024, 48), 370e6),
    "mamba2-780m": Preset(_mamba2(1536, 48), 780e6),
    "mamba2-2.7b": Preset(_mamba2(2560, 64), 2.7e9),
    # 7,285,403,648: Mistral's announcement.
    "codestral-mamba-7b": Preset(
        _mamba2(4096, 64, vocab_size=32768, n_groups=8, tie_word_embeddings=False), 7_285_403_648
    ),
}
