"""Published models by name: their config.json as far as it shapes the model, and how many parameters they have.

A preset is a configuration without weights: for planning memory, for compiling, and for dummy weights. Fields that
could not be established (mostly the ids of special tokens) are null. A size is listed only if its configuration gives
the published number of parameters within 1 %, which a test checks.

Left out, because that could not be shown: Nemotron-H-4B, Zamba2-2.7B and Mamba2-1.3b (the shapes that are known give
4.49, 2.66 and 1.34 billion parameters, and only the rounded name is published), Falcon-H1-1.5B and -3B (their
multipliers are not known to all digits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from checkpoints import delta_presets
from mamba_jax.config import HybridConfig
from mamba_jax.families import config_from_hf


@dataclass(frozen=True)
class Preset:
    """A published size."""

    fields: Mapping[str, Any]
    """Of its config.json."""
    parameters: float
    """As published, without a multi-token-prediction layer."""


def preset_names() -> tuple[str, ...]:
    """The published sizes that are known by name."""
    return tuple(PRESETS)


@cache
def preset(name: str) -> HybridConfig:
    """The configuration of a published size.

    Raises:
        KeyError: not one of `preset_names`.
    """
    return config_from_hf(PRESETS[name].fields)


_NO_IDS = {"bos_token_id": None, "eos_token_id": None}


# Nemotron. Shapes: NVIDIA's Megatron-Bridge, models/nemotronh/nemotron_h_provider.py.
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
        **_NO_IDS,
        **fields,
    }


_NEMOTRON = {
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

# Bamba. Shapes: transformers' BambaConfig and the release's table (32 layers, 4096 wide, 32 heads, 8 for keys and
# values); a state of 128 because that, and not the default of 256, gives the published 9.78 billion.
_BAMBA = {
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
            **_NO_IDS,
        },
        9.78e9,
    ),
}


# Granite 4.0 H. Shapes: config.json of each as quoted in the tests of MLX ports and of tools that estimate memory.
# Counts: metadata of the weight files (350m, tiny), llama.cpp's listing (micro), IBM's model card (small).
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
_GRANITE = {
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


# Falcon-H1. Shapes and multipliers: TII's own provider in NVIDIA's Megatron-Bridge, models/falcon_h1, and config.json
# of the 0.5B and 34B. Counts: measured on the weights (0.5B, 7B), size of the weight file (1.5B-Deep), its card (34B).
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
        **_NO_IDS,
        **fields,
    }


_FALCON = {
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


# Mamba-2. Shapes: state-spaces/mamba (the family's own sizes, vocabulary padded to a multiple of 16) as transformers
# converts them, and config.json of Codestral-Mamba as quoted in NX-AI's benchmarks. Counts: the models' names.
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
        **_NO_IDS,
        **fields,
    }


_MAMBA2 = {
    "mamba2-130m": Preset(_mamba2(768, 24), 130e6),
    "mamba2-370m": Preset(_mamba2(1024, 48), 370e6),
    "mamba2-780m": Preset(_mamba2(1536, 48), 780e6),
    "mamba2-2.7b": Preset(_mamba2(2560, 64), 2.7e9),
    # 7,285,403,648: Mistral's announcement.
    "codestral-mamba-7b": Preset(
        _mamba2(4096, 64, vocab_size=32768, n_groups=8, tie_word_embeddings=False), 7_285_403_648
    ),
}


# Zamba2. Shapes: transformers traced over the released config.json (1.2B); config.json at release as quoted in NX-AI's
# benchmarks (7B). Counts: that trace's 1.22 billion, and the technical report's 7.4 billion.
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


_ZAMBA2 = {
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

_DELTA = {name: Preset(fields, parameters) for name, (fields, parameters) in delta_presets.PUBLISHED.items()}

PRESETS: Mapping[str, Preset] = {**_NEMOTRON, **_BAMBA, **_GRANITE, **_FALCON, **_MAMBA2, **_ZAMBA2, **_DELTA}
