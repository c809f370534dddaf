"""Configs of models small enough to compile in seconds."""

from dataclasses import replace

from mamba_jax.config import (
    AttentionConfig,
    HybridConfig,
    LatentAttentionConfig,
    MambaConfig,
    MLPConfig,
    MoEConfig,
    NormedResidual,
    QKNormConfig,
    RopeConfig,
    SharedConfig,
)
from mamba_jax.config.channel_recurrence import Mamba1Config, RGLRUConfig, ShortConvConfig
from mamba_jax.config.drafter import BlockConfig, EagleConfig
from mamba_jax.config.linear_recurrence import DeltaConfig, LightningConfig

HIDDEN, VOCAB = 20, 61

MAMBA = MambaConfig(
    num_heads=6, head_dim=5, state_size=7, num_groups=3, conv_width=4, in_bias=True,
    projection_multipliers=(1.1, 0.9, 1.2, 0.8, 1.3), output_multiplier=0.7,
)  # fmt: skip
ATTENTION = AttentionConfig(
    num_heads=6, num_kv_heads=2, head_dim=6, scale=0.3, input_size=HIDDEN, rope=RopeConfig(theta=100.0, size=4),
    key_multiplier=1.4,
)  # fmt: skip
MLP = MLPConfig(intermediate_size=28, activation="silu", gated=True, bias=True)
MOE = MoEConfig(
    num_experts=8, experts_per_token=3, intermediate_size=10, activation="relu2", gated=False, router="sigmoid",
    num_groups=4, top_groups=2, normalize=True, scaling=1.5, latent_size=12, shared_size=14,
)  # fmt: skip

# Shared blocks see twice the hidden size, so they cannot be in the same model as other attention.
EVERYTHING = HybridConfig(
    family="test", vocab_size=VOCAB, hidden_size=HIDDEN, pattern="M*-EP", norm_eps=1e-5, mamba=MAMBA,
    attention=ATTENTION, mlp=MLP, moe=MOE, embedding_multiplier=2.0, residual_multiplier=0.8, logits_multiplier=0.5,
    mtp_pattern="*E",
)  # fmt: skip
SHARED = HybridConfig(
    family="test", vocab_size=VOCAB, hidden_size=HIDDEN, pattern="ZZZ", norm_eps=1e-5, mamba=MAMBA,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=10, scale=0.4, input_size=2 * HIDDEN),
    mlp=MLPConfig(intermediate_size=28, activation="gelu", gated=True),
    shared=SharedConfig(num_blocks=2, adapter_rank=3, attention_adapters=True), residual_in_fp32=True,
    tie_word_embeddings=True,
)  # fmt: skip

STEP = HybridConfig(
    family="test", vocab_size=VOCAB, hidden_size=24, pattern="M*-PM", norm_eps=1e-5,
    mamba=MambaConfig(num_heads=6, head_dim=8, state_size=16, num_groups=2, conv_width=4),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, input_size=24),
    mlp=MLPConfig(intermediate_size=40, activation="silu", gated=False),
)  # fmt: skip
"""Few kinds of layers, for tests that compile many steps."""

ENGINE_VOCAB, ENGINE_HIDDEN = 96, 32
_ENGINE_MAMBA = MambaConfig(num_heads=4, head_dim=8, state_size=12, num_groups=2, conv_width=4)
_ENGINE_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, input_size=ENGINE_HIDDEN)
_ENGINE_MLP = MLPConfig(intermediate_size=40, activation="relu2", gated=False)


def _for_engines(pattern: str, *recurrences, **fields) -> HybridConfig:
    """A model with the attention and the MLP of all of them, if its pattern has any."""
    parts = {"MP": ("mamba", _ENGINE_MAMBA), "*W": ("attention", _ENGINE_ATTENTION), "-": ("mlp", _ENGINE_MLP)}
    fields = {name: part for kinds, (name, part) in parts.items() if set(kinds) & set(pattern)} | fields
    sizes = {"vocab_size": ENGINE_VOCAB, "hidden_size": ENGINE_HIDDEN, "norm_eps": 1e-5}
    return HybridConfig(family="test", pattern=pattern, recurrences=recurrences, **sizes, **fields)


EAGLE = EagleConfig(
    hidden_size=24, vocab_size=40, places=(1, 2, 4), norm_eps=1e-6, own_embedding=True, maps_vocabulary=True,
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=1, head_dim=6, scale=6**-0.5, input_size=24, rope=RopeConfig(theta=50.0, size=6)
    ),
    mlp=MLPConfig(intermediate_size=28, activation="silu", gated=True),
)  # fmt: skip
FLASH = BlockConfig(
    hidden_size=ENGINE_HIDDEN, vocab_size=ENGINE_VOCAB, places=(1, 3),
    attention=replace(EAGLE.attention, input_size=ENGINE_HIDDEN, qk_norm=QKNormConfig(1e-6)), mlp=EAGLE.mlp,
    norm_eps=1e-6, num_layers=2, own_head=False, mask_token=7,
)  # fmt: skip
_QK_NORM = QKNormConfig(1e-5)
_KIMI_GATES = {"decay": "channel", "gate_rank": 6, "output_gate": "sigmoid"}

FOR_ENGINES = {
    # The kinds of layers of NemotronH, and of plain Mamba2, which has no attention.
    "nemotronh": _for_engines("M*-M", mtp_pattern="*-"),
    "mamba2": _for_engines("MMM"),
    # Routed experts over latents and a shared one, as in Nemotron 3.
    "experts": _for_engines("ME*E", moe=MOE),
    # A drafter of blocks, with the embedding and the head of its target.
    "dflash": replace(_for_engines("M*-M"), drafter=FLASH),
    # A separate drafter, whose keys have another shape, on a model that has attention.
    "eagle3": replace(_for_engines("M*-M"), drafter=EAGLE),
    # The kinds of layers whose states may lie in one store: Mamba2 and attention side by side as in FalconH1, gated
    # delta nets and gated attention as in Qwen3.5, short convolutions as in LFM2.
    "joined": _for_engines(
        "PDC*-",
        DeltaConfig(num_heads=4, head_dim=8, state_size=12, num_groups=2, conv_width=4, norm_eps=1e-5),
        ShortConvConfig(channels=ENGINE_HIDDEN, conv_width=3),
        attention=replace(
            _ENGINE_ATTENTION, num_kv_heads=1, scale=0.3, rope=RopeConfig(100.0, 4), qk_norm=_QK_NORM, output_gate=True
        ),
        mlp=replace(_ENGINE_MLP, activation="silu", gated=True),
        mtp_pattern="*-",
    ),
    # Short convolutions, attention to a window and to everything, and norms of outputs, as in LFM3.
    "windowed": _for_engines(
        "CW-*",
        ShortConvConfig(channels=ENGINE_HIDDEN, conv_width=5),
        attention=replace(_ENGINE_ATTENTION, head_gate=True),
        windowed_attention=replace(
            _ENGINE_ATTENTION, head_gate=True, window=11, rope=RopeConfig(theta=100.0, size=8), qk_norm=_QK_NORM
        ),
        norm_both=True,
    ),
    # Real-gated linear recurrent units, attention to a window, and capped logits, as in RecurrentGemma.
    "griffin": _for_engines(
        "R*-R",
        RGLRUConfig(channels=20, num_heads=4, conv_width=3, activation="gelu"),
        attention=replace(_ENGINE_ATTENTION, window=11, output_bias=True),
        logits_soft_cap=5.0,
    ),
    # Kimi Delta Attention, and attention over latents.
    "kimi": _for_engines(
        "DL-D",
        DeltaConfig(num_heads=3, head_dim=8, state_size=8, num_groups=3, conv_width=4, norm_eps=1e-5, **_KIMI_GATES),
        latent_attention=LatentAttentionConfig(
            num_heads=3, key_size=7, shared_key_size=5, value_size=6, latent_size=12, norm_eps=1e-6
        ),
    ),
    # Lightning attention, and residuals through norms, as in MiniMax-Text-01.
    "lightning": _for_engines(
        "F*-F",
        LightningConfig(num_heads=3, head_dim=8, norm_eps=1e-6, decay_factors=(1.0, 0.3)),
        normed_residuals=(NormedResidual("F", 1.5, 1.0), NormedResidual("*", 1.2, 0.9), NormedResidual("-", 1.0, 0.8)),
    ),
    # Mamba-1 with norms inside, and attention, as in Jamba.
    "selective": _for_engines(
        "S*-S",
        Mamba1Config(channels=20, state_size=5, dt_rank=3, conv_width=4, bias=True, norm_eps=1e-5, norm_weights=True),
    ),
    # One layer of each kind that keeps state, and a draft layer: to compile again and again.
    "smallest": _for_engines("M*", mtp_pattern="*"),
}
"""For tests that run engines."""

CHECKPOINT = {
    "model_type": "nemotron_h", "vocab_size": 61, "hidden_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 4,
    "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["full_attention", "moe"], "eos_token_id": [2, 3],
}  # fmt: skip
"""A config.json with every kind of layer and a multi-token-prediction layer."""

TRAINABLE = {
    "model_type": "nemotron_h", "vocab_size": 40, "hidden_size": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
    "n_groups": 2, "ssm_state_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "tie_word_embeddings": True, "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["full_attention", "mlp"],
}  # fmt: skip
"""A config.json of a model that learns something in a few steps."""
