"""Checks that the flag `enable_return_routed_experts` fits the model and the other flags."""

import jax

from mamba_jax.config import HybridConfig
from serving.config import ConfigError, EngineConfig


def check_routed_experts(config: EngineConfig, model: HybridConfig) -> None:
    """Raises `ConfigError` if the flag is set, and the model or another flag does not support it.

    States that arrive from a tier or from another worker bring keys and values, but no experts.
    """
    if not config.enable_return_routed_experts:
        return
    flag = "enable_return_routed_experts"
    if not model.experts_per_token:
        raise ConfigError(f"{flag}: this {model.family} model has no routed experts; leave the flag out")
    if not model.num_attention_uses:
        raise ConfigError(f"{flag} needs a model with attention, whose pages hold the experts")
    if config.host_cache_gib or config.disk_cache:
        raise ConfigError(f"{flag} does not support host_cache_gib or disk_cache")
    if jax.process_count() > 1:
        raise ConfigError(f"{flag} is not supported on several hosts")
