"""Published sizes of Nemotron-H and Nemotron 3.

Shapes: NVIDIA's Megatron-Bridge, models/nemotronh/nemotron_h_provider.py.
"""

from __future__ import annotations

from typing import Any

from checkpoints.presets.published import NO_IDS, Preset


def _nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "vocab_size": 131072,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "max_position_embeddings": 8192,
        **NO_IDS,
        **fields,
    }


PRESETS = {
    # 8.1 billion: the technical report, and the sizes of its weight files.
    "nemotron-h-8b": Preset(
        _nemotron(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            hidden_size=4096,
            intermediate_size=21504,
            num_attention_heads=32,
            mamba_num_heads=128,
        ),
        8.1e9,
    ),
    "nemotron-h-47b": Preset(
        _nemotron(
            "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
            hidden_size=8192,
            intermediate_size=30720,
            num_attention_heads=64,
            mamba_num_heads=256,
            ssm_state_size=256,
        ),
        47e9,
    ),
    # 54 Mamba, 54 MLP and 10 attention layers, as NVIDIA's announcement says.
    "nemotron-h-56b": Preset(
        _nemotron(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
            "M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            hidden_size=8192,
            intermediate_size=32768,
            num_attention_heads=64,
            mamba_num_heads=256,
            ssm_state_size=256,
        ),
        56e9,
    ),
    # Also its config.json as quoted in tools that estimate memory; 8.89 billion: the model card's weight files.
    "nemotron-nano-9b-v2": Preset(
        _nemotron(
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            hidden_size=4480,
            intermediate_size=15680,
            num_attention_heads=40,
            mamba_num_heads=128,
            mamba_head_dim=80,
            max_position_embeddings=131072,
        ),
        8.89e9,
    ),
    # 12.31 billion: the technical report of Nemotron Nano 2.
    "nemotron-nano-12b-v2": Preset(
        _nemotron(
            "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
            hidden_size=5120,
            intermediate_size=20480,
            num_attention_heads=40,
            mamba_num_heads=128,
            mamba_head_dim=80,
            max_position_embeddings=131072,
        ),
        12.31e9,
    ),
    # 31.6 billion, of which 3.2 active: the technical report of Nemotron 3 Nano.
    "nemotron-3-nano-30b-a3b": Preset(
        _nemotron(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            hidden_size=2688,
            intermediate_size=1856,
            num_attention_heads=32,
            num_key_value_heads=2,
            mamba_num_heads=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            max_position_embeddings=262144,
        ),
        31.6e9,
    ),
    # 120.6 billion, of which 12.7 active: the technical report of Nemotron 3 Super. The draft layer is not counted.
    "nemotron-3-super-120b-a12b": Preset(
        _nemotron(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            hidden_size=4096,
            intermediate_size=2688,
            num_attention_heads=32,
            num_key_value_heads=2,
            mamba_num_heads=128,
            n_routed_experts=512,
            num_experts_per_tok=22,
            moe_intermediate_size=2688,
            moe_shared_expert_intermediate_size=5376,
            moe_latent_size=1024,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=5.0,
            num_nextn_predict_layers=1,
            mtp_hybrid_override_pattern="*E",
            max_position_embeddings=262144,
        ),
        120.6e9,
    ),
}
