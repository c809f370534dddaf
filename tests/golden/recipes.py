"""The tiny models behind the golden fixtures, as Hugging Face configs. Odd shapes and real features on purpose.

`changes` lists, for each model, config fields that must matter: the maker of the fixtures checks that the
log-probabilities move when such a field is given the value written here, so that a port that ignores the field cannot
pass.
"""

from __future__ import annotations

import math
from typing import Any

from golden import other_recurrences
from golden.recipe import Recipe

_MIXERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _layers(pattern: str) -> list[str]:
    return [_MIXERS[mixer] for mixer in pattern]


def _nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    # time_step_min: Hugging Face clamps dt to it, in its chunked path only; here it shall do nothing.
    return {
        "layers_block_type": _layers(pattern),
        "head_dim": 24,
        "ssm_state_size": 40,
        "mamba_head_dim": 16,
        "time_step_min": 1e-12,
        "max_position_embeddings": 2048,
        **_IDS,
        **fields,
    }


_MOE = {
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 56,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": _layers("*E"),
}

_BAMBA = {
    "vocab_size": 997,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 9,
    "mamba_n_groups": 3,
    "mamba_d_state": 40,
    "mamba_expand": 2,
    "max_position_embeddings": 2048,
    **_IDS,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_GRANITE = {
    **_BAMBA,
    "intermediate_size": 24,
    "shared_intermediate_size": 56,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.62,
    "attention_multiplier": 0.11,
    "logits_scaling": 0.7,
    "rope_parameters": _ROPE,
}
_GRANITE_CHANGES = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2041,
    "logits_scaling": 0.9,
}
# Tied heads: were the embeddings to dominate, every token would predict itself.
_GRANITE_TIED = {"tie_word_embeddings": True, "embedding_multiplier": 0.7, "logits_scaling": 1.4}

_FALCON = {
    **_BAMBA,
    "vocab_size": 509,
    "mamba_d_ssm": 180,
    "mamba_n_heads": 9,
    "head_dim": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 3.1,
    "mlp_multipliers": [0.88, 0.54],
    "key_multiplier": 0.39,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9375,
    "ssm_multipliers": [0.7, 0.5, 0.8, 1.25, 0.35],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.83,
    "rope_parameters": {**_ROPE, "rope_theta": 1e11},
}
_FALCON_CHANGES = {
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 2.5,
    "mlp_multipliers": [0.54, 0.88],
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_multipliers": [0.7, 0.5, 1.25, 0.8, 0.5],
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "rope_parameters": _ROPE,
}

_MAMBA2 = {
    "hidden_size": 72,
    "num_heads": 9,
    "head_dim": 16,
    "state_size": 40,
    "num_hidden_layers": 4,
    "n_groups": 3,
    "expand": 2,
    **_IDS,
}

# A shared block has no residual connection: its second norm blows up whatever is left of an attention to many tokens.
_ZAMBA2_QUIETER = {"embed": 0.7, "q_proj": 0.5, "k_proj": 0.6, ".linear.weight": 0.3}
_ZAMBA2 = {
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_attention_heads": 4,
    "n_mamba_heads": 6,
    "mamba_ngroups": 3,
    "mamba_d_state": 40,
    "mamba_expand": 2,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
    "time_step_min": 1e-12,
    "max_position_embeddings": 2048,
    "rope_parameters": _ROPE,
    **_IDS,
}

RECIPES: dict[str, Recipe] = other_recurrences.RECIPES | {
    "nemotronh": Recipe(
        "NemotronHForCausalLM",
        _nemotron(
            "M-M*-M",
            vocab_size=997,
            hidden_size=64,
            intermediate_size=136,
            num_attention_heads=6,
            num_key_value_heads=2,
            mamba_num_heads=9,
            n_groups=3,
            chunk_size=64,
        ),
        # The names inside transformers 5; it writes NVIDIA's own, with `backbone.`.
        rename_weights=("backbone.", "model."),
        seed=11,
    ),
    # What the first Nemotron-H directories look like: a pattern string, other names, and each MLP with its own size.
    "nemotronh-old": Recipe(
        "NemotronHForCausalLM",
        _nemotron(
            "M-*M-M",
            vocab_size=509,
            hidden_size=56,
            intermediate_size=96,
            num_attention_heads=5,
            num_key_value_heads=1,
            mamba_num_heads=12,
            mamba_head_dim=12,
            n_groups=4,
            chunk_size=128,
            layer_norm_epsilon=1e-3,
        ),
        changes={"layer_norm_epsilon": 1e-5},
        rename_config={
            "layers_block_type": None,
            "mtp_layers_block_type": None,
            "hybrid_override_pattern": "M-*M-M",
            "num_hidden_layers": 6,
            "head_dim": None,
            "attention_head_dim": 24,
        },
        mlp_sizes=(96, 168),
        literal_infinity=True,
        seed=12,
    ),
    "nemotronh-moe": Recipe(
        "NemotronHForCausalLM",
        _nemotron(
            "MEM*E",
            vocab_size=509,
            hidden_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_num_heads=9,
            n_groups=3,
            chunk_size=32,
            n_routed_experts=16,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            **_MOE,
        ),
        changes={"topk_group": 3, "norm_topk_prob": False, "routed_scaling_factor": 2.0, "num_experts_per_tok": 4},
        mtp=True,
        seed=13,
    ),
    "nemotronh-latent": Recipe(
        "NemotronHForCausalLM",
        _nemotron(
            "MEM*EM",
            vocab_size=331,
            hidden_size=48,
            num_attention_heads=4,
            num_key_value_heads=1,
            mamba_num_heads=8,
            n_groups=4,
            chunk_size=128,
            n_routed_experts=12,
            num_experts_per_tok=5,
            moe_latent_size=20,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            **_MOE,
        ),
        changes={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        rename_config={
            "layers_block_type": None,
            "hybrid_override_pattern": "MEM*EM",
            "mtp_layers_block_type": None,
            "mtp_hybrid_override_pattern": "*E",
        },
        mtp=True,
        seed=14,
    ),
    "bamba": Recipe(
        "BambaForCausalLM",
        {
            **_BAMBA,
            "hidden_size": 72,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_chunk_size": 256,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
        changes={"rope_parameters": {**_ROPE, "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        seed=21,
    ),
    "granite-nope": Recipe(
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "nope",
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_chunk_size": 64,
            **_GRANITE_TIED,
        },
        changes=_GRANITE_CHANGES | {"num_experts_per_tok": 3},
        seed=31,
    ),
    "granite-rope": Recipe(
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "vocab_size": 509,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "rope_parameters": {**_ROPE, "rope_theta": 3000.0},
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "mamba_chunk_size": 32,
        },
        changes={"position_embedding_type": "nope", "rope_parameters": {**_ROPE, "rope_theta": 100.0}},
        # The spelling of transformers 4.
        rename_config={
            "layer_types": ["mamba", "attention", "mamba"],
            "rope_parameters": None,
            "rope_theta": 3000.0,
        },
        seed=32,
    ),
    "granite-dense": Recipe(
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "nope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 104,
            "mamba_n_heads": 12,
            "mamba_n_groups": 4,
            "mamba_chunk_size": 128,
            **_GRANITE_TIED,
        },
        changes=_GRANITE_CHANGES,
        seed=33,
    ),
    "falconh1": Recipe(
        "FalconH1ForCausalLM",
        {**_FALCON, "mamba_rms_norm": False, "mamba_chunk_size": 128},
        changes=_FALCON_CHANGES,
        seed=41,
    ),
    "falconh1-norm": Recipe(
        "FalconH1ForCausalLM",
        {
            **_FALCON,
            "vocab_size": 331,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_chunk_size": 64,
            "tie_word_embeddings": True,
            "embedding_multiplier": 0.45,
            "num_key_value_heads": 1,
        },
        changes={**_FALCON_CHANGES, "mamba_norm_before_gate": True},
        rename_config={"rope_parameters": None, "rope_theta": 1e11},
        seed=42,
    ),
    "falconh1-norm-first": Recipe(
        "FalconH1ForCausalLM",
        {
            **_FALCON,
            "vocab_size": 331,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_d_ssm": None,
            "mamba_n_heads": 12,
            "mamba_n_groups": 4,
            "time_step_limit": [0.004, 0.06],
            "mamba_chunk_size": 32,
        },
        changes={"mamba_norm_before_gate": False, "time_step_limit": [0.0, math.inf]},
        seed=43,
    ),
    "mamba2": Recipe(
        "Mamba2ForCausalLM",
        {
            **_MAMBA2,
            "vocab_size": 997,
            "tie_word_embeddings": True,
            "residual_in_fp32": True,
            "chunk_size": 64,
        },
        literal_infinity=True,
        seed=51,
    ),
    "mamba2-plain": Recipe(
        "Mamba2ForCausalLM",
        {
            **_MAMBA2,
            "vocab_size": 331,
            "num_heads": 12,
            "head_dim": 12,
            "n_groups": 4,
            "use_conv_bias": False,
            "residual_in_fp32": False,
            "layer_norm_epsilon": 1e-3,
            "time_step_limit": [0.01, 0.05],
            "chunk_size": 256,
        },
        changes={"layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, math.inf]},
        seed=52,
    ),
    "zamba2": Recipe(
        "Zamba2ForCausalLM",
        {
            **_ZAMBA2,
            "vocab_size": 997,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 5,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "chunk_size": 64,
        },
        changes={"rope_parameters": {**_ROPE, "rope_theta": 100.0}},
        quieter=_ZAMBA2_QUIETER,
        seed=61,
    ),
    "zamba2-nope": Recipe(
        "Zamba2ForCausalLM",
        {
            **_ZAMBA2,
            "vocab_size": 509,
            "layers_block_type": [*["linear_attention", "hybrid"] * 3],
            "num_hidden_layers": 6,
            "n_mamba_heads": 8,
            "mamba_ngroups": 4,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "chunk_size": 32,
        },
        # The spelling of Zyphra's own code.
        rename_config={"layers_block_type": ["mamba", "hybrid"] * 3},
        quieter=_ZAMBA2_QUIETER,
        seed=62,
    ),
}
