"""A model small enough to write and read in milliseconds."""

from checkpoints.json_file import read_json
from checkpoints.resolve import DEMO_DIRECTORY

TINY = {
    "model_type": "nemotron_h",
    "vocab_size": 61,
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["full_attention", "moe"],
    "eos_token_id": [2, 3],
}
"""A config.json with every kind of layer and a multi-token-prediction layer."""

DEMO_CONFIG = read_json(DEMO_DIRECTORY / "config.json")
