"""The configuration of a model, and its mixers' declarations of state and sharding."""

from mamba_jax.config.attention import AttentionConfig, LatentAttentionConfig, QKNormConfig, RopeConfig
from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    MixerConfig,
    ModelConfigError,
    Placement,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
    UnevenDivision,
    need,
)
from mamba_jax.config.feed_forward import ACTIVATIONS, MLPConfig, MoEConfig
from mamba_jax.config.hybrid import (
    ATTENTION,
    LATENT,
    MAMBA,
    MLP,
    MOE,
    PARALLEL,
    SHARED,
    WINDOWED,
    HybridConfig,
    NormedResidual,
    SharedConfig,
)
from mamba_jax.config.linear_recurrence import MambaConfig
