"""Published sizes of Falcon-H1.

Shapes and multipliers: TII's own provider in NVIDIA's Megatron-Bridge, models/falcon_h1, and config.json of the 0.5B
and 34B. Counts: measured on the weights (0.5B, 7B), size of the weight file (1.5B-Deep), its card (34B).
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import NO_IDS, Preset


def _falcon(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon_h1",
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e11,
        "attention_in_multiplier": 1.0,
        "embedding_multiplier": 5.656854249492381,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
        **NO_IDS,
        **fields,
    }


PRESETS = {
    "falcon-h1-0.5b": Preset(
        _falcon(
            vocab_size=32784,
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=36,
            num_attention_heads=8,
            head_dim=64,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_rms_norm=False,
            lm_head_multiplier=0.0390625,
            key_multiplier=0.39062499999999994,
            attention_out_multiplier=0.9375,
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.23570226039551587,
            mlp_multipliers=[0.8838834764831844, 0.5859375],
            ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            max_position_embeddings=16384,
        ),
        521_411_104,
    ),
    "falcon-h1-1.5b-deep": Preset(
        _falcon(
            vocab_size=65537,
            hidden_size=1280,
            intermediate_size=3072,
            num_hidden_layers=66,
            num_attention_heads=6,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            lm_head_multiplier=0.03125,
            key_multiplier=0.17677669529663687,
            attention_out_multiplier=0.5,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=0.23570226039551587,
            mlp_multipliers=[0.7071067811865476, 0.3125],
            max_position_embeddings=131072,
        ),
        3_109_870_496 / 2,
    ),
    "falcon-h1-7b": Preset(
        _falcon(
            vocab_size=130049,
            hidden_size=3072,
            intermediate_size=12288,
            num_hidden_layers=44,
            num_attention_heads=12,
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_chunk_size=256,
            lm_head_multiplier=0.013020833333333334,
            key_multiplier=0.030690398488999456,
            attention_out_multiplier=0.10416666666666667,
            ssm_in_multiplier=0.4166666666666667,
            ssm_out_multiplier=0.11785113019775793,
            mlp_multipliers=[0.2946278254943948, 0.032552083333333336],
            max_position_embeddings=262144,
        ),
        7_585_648_736,
    ),
    "falcon-h1-34b": Preset(
        _falcon(
            vocab_size=261120,
            hidden_size=5120,
            intermediate_size=21504,
            num_hidden_layers=72,
            num_attention_heads=20,
            num_key_value_heads=4,
            mamba_d_ssm=4096,
            mamba_n_heads=32,
            mamba_d_head=128,
            mamba_n_groups=2,
            lm_head_multiplier=0.0078125,
            key_multiplier=0.011048543456039804,
            attention_out_multiplier=0.0375,
            ssm_in_multiplier=0.25,
            ssm_out_multiplier=0.08838834764831845,
            mlp_multipliers=[0.1767766952966369, 0.011160714285714284],
            max_position_embeddings=262144,
            bos_token_id=1,
            eos_token_id=11,
        ),
        33.6e9,
    ),
}
