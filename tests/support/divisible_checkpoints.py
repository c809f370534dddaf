"""Tiny checkpoints of every family whose heads divide by two, or by eight: the golden ones are odd on purpose."""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoints.random import write_random

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@dataclass(frozen=True)
class Case:
    """A golden config with other sizes, and how drafts are made for it."""

    golden: str
    changes: dict
    drafts: str = "ngram"


_BAMBA = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_n_groups": 1}
_BAMBA |= {"mamba_d_head": 18, "vocab_size": 254}
_MIXED = ["linear_attention", "full_attention"]
FAMILIES = {
    # Groups, keys and an odd vocabulary that stays whole; a draft layer of attention and experts.
    "nemotronh-moe": Case(
        "nemotronh-moe",
        {"layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 8, "n_groups": 2}
        | {"vocab_size": 255},
        drafts="mtp",
    ),
    # One group on two devices: the gated norm adds up its squares.
    "bamba": Case("bamba", _BAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]}),
    # Six experts, three on each device; the head is the embedding.
    "granite": Case("granite-nope", _BAMBA | {"num_hidden_layers": 2, "layer_types": _MIXED}),
    # Mamba parallel to attention; one key-value head on two devices; the norm before the gate.
    "falconh1": Case(
        "falconh1-norm-first",
        {"num_hidden_layers": 2, "mamba_n_groups": 1, "num_key_value_heads": 1, "vocab_size": 254},
    ),
    "mamba2": Case(
        "mamba2", {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 18, "n_groups": 4, "vocab_size": 254}
    ),
    # Shared blocks with adapters.
    "zamba2": Case(
        "zamba2",
        {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"], "mamba_ngroups": 2}
        | {"vocab_size": 254},
    ),
    # One key head, which the value heads of both devices share; gated attention, and a draft layer of it and experts.
    "qwen3next": Case(
        "qwen3next",
        {"num_hidden_layers": 2, "layer_types": _MIXED, "linear_num_key_heads": 1, "num_attention_heads": 4},
        drafts="mtp",
    ),
    # The norm of lightning attention, whose squares the devices add up; decays of a device's own heads.
    "minimax": Case(
        "minimax",
        {"num_hidden_layers": 2, "layer_types": _MIXED, "num_local_experts": 4, "vocab_size": 332},
    ),
    # B, C and what step sizes are projected from, which the devices add up.
    "falcon-mamba": Case("falcon-mamba", {"num_hidden_layers": 2, "vocab_size": 332}),
    "jamba": Case(
        "jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"num_experts": 4, "hidden_size": 64, "vocab_size": 332},
    ),
    # Latents, of which every device has all.
    "kimi": Case(
        "kimi",
        {"num_hidden_layers": 2, "layer_types": _MIXED, "mlp_layer_types": ["dense", "sparse"]}
        | {"linear_num_heads": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 332},
    ),
    # The gate of each head of attention over latents.
    "ling3": Case(
        "ling3",
        {"num_hidden_layers": 2, "layer_types": _MIXED, "mlp_layer_types": ["dense", "sparse"]}
        | {"linear_num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 332},
    ),
}
MORE = {
    # Norms of all heads' queries and keys, whose squares the devices add up.
    "olmo-hybrid": Case("olmo-hybrid", {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 332}),
    "lfm2": Case("lfm2", {"vocab_size": 332}),
    # Heads of the gates of recurrent units; one key-value head on two devices.
    "recurrent-gemma": Case(
        "recurrent-gemma",
        {
            "num_hidden_layers": 2,
            "block_types": ["recurrent", "attention"],
            "num_attention_heads": 4,
            "vocab_size": 332,
        },
    ),
    # Gates of heads, in attention to a window and to everything.
    "lfm3": Case("lfm3", {"vocab_size": 332}),
    "qwen35": Case(
        "qwen35",
        {"num_hidden_layers": 2, "layer_types": _MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 8}
        | {"num_key_value_heads": 1, "vocab_size": 332},
        drafts="mtp",
    ),
    "nemotronh": Case("nemotronh", {"mamba_num_heads": 8, "n_groups": 4, "vocab_size": 256}),
    # Experts on a latent copy of the token.
    "nemotronh-latent": Case("nemotronh-latent", {"num_key_value_heads": 1, "vocab_size": 332}, drafts="mtp"),
    # Five experts do not divide: each device has half of every one.
    "granite-rope": Case("granite-rope", _BAMBA | {"num_key_value_heads": 1}),
    "falconh1-plain": Case(
        "falconh1", {"mamba_d_ssm": 160, "mamba_n_heads": 8, "mamba_d_head": 20, "mamba_n_groups": 2}
    ),
}
# Heads for eight devices; two groups and two key-value heads, each on four of them.
EIGHT = Case(
    "nemotronh",
    {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 16,
        "n_groups": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
)


def write_checkpoint(directory: Path, case: Case) -> Path:
    """The checkpoint of a case."""
    config = json.loads((GOLDEN / case.golden / "config.json").read_text())
    return write_random(directory, config | case.changes, seed=5)
