"""Published sizes of Zamba2.

Shapes: transformers traced over the released config.json (1.2B); config.json at release as quoted in NX-AI's
benchmarks (7B). Counts: that trace's 1.22 billion, and the technical report's 7.4 billion.
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import Preset


def _zamba2(layers: int, hybrid: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "zamba2",
        "vocab_size": 32000,
        "num_hidden_layers": layers,
        "layers_block_type": ["hybrid" if i in hybrid else "mamba" for i in range(layers)],
        "num_attention_heads": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "chunk_size": 256,
        "adapter_rank": 128,
        "use_mem_rope": True,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


PRESETS = {
    "zamba2-1.2b": Preset(
        _zamba2(
            38,
            (5, 11, 17, 23, 29, 35),
            hidden_size=2048,
            intermediate_size=8192,
            n_mamba_heads=64,
            mamba_ngroups=1,
            mamba_d_state=128,
            num_mem_blocks=1,
            use_shared_attention_adapter=True,
        ),
        1.22e9,
    ),
    "zamba2-7b": Preset(
        _zamba2(
            81,
            (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77),
            hidden_size=3584,
            intermediate_size=14336,
            n_mamba_heads=112,
            mamba_ngroups=2,
            mamba_d_state=64,
            num_mem_blocks=2,
            use_shared_attention_adapter=False,
        ),
        7.4e9,
    ),
}
