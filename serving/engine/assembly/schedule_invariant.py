"""Checks that the flag `schedule_invariant` holds for the model, the platform and the other flags."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from mamba_jax.config import HybridConfig
from mamba_jax.programs import WHY_NOT_INVARIANT
from serving.config import ConfigError, EngineConfig

_KEYS = 128
"""Attention adds pieces of this many keys (`kernels_pallas.invariant`)."""
_DTYPES = ("float32", "bfloat16")
_REQUIRED = {
    "ssm_dtype": "float32",
    "kv_cache_dtype": "auto",
    "speculative_model": None,
    "tensor_parallel_size": 1,
    "kernels": "auto",
    "logprobs_mode": "raw_logprobs",
}


def check_schedule_invariant(config: EngineConfig, model: HybridConfig, platform: str) -> None:
    """Checks, before the weights are loaded, that the flag can keep its promise.

    Raises:
        ConfigError: the flag is set, and the platform, the model or another flag does not support it.
    """
    if config.schedule_invariant and (reason := _unsupported(config, model, platform)) is not None:
        raise ConfigError(f"schedule_invariant {reason}")


def check_weights_invariant(config: EngineConfig, dtypes: Iterable[str]) -> None:
    """Raises `ConfigError` if the flag is set and one of the weights' dtypes is neither float32 nor bfloat16."""
    if config.schedule_invariant and (other := sorted(set(dtypes) - set(_DTYPES))):
        raise ConfigError(f"schedule_invariant needs float32 or bfloat16 weights, not {', '.join(other)}")


def _unsupported(config: EngineConfig, model: HybridConfig, platform: str) -> str | None:
    if platform != "cpu":
        return f"is not supported on {platform.upper()}, only on CPU"
    if jax.process_count() > 1:
        return "is not supported on several hosts"
    if WHY_NOT_INVARIANT is not None:
        return f"needs the C++ operations, which are missing: {WHY_NOT_INVARIANT}"
    if config.dtype not in ("auto", *_DTYPES):
        return f"does not support dtype {config.dtype}; use float32 or bfloat16"
    for name, value in _REQUIRED.items():
        if (given := getattr(config, name)) != value:
            return f"does not support {name} {given}; use {value}" if value else f"does not support {name}"
    if (config.replay_interval or 1) > 1:
        return f"does not support replay_interval {config.replay_interval}; use 1"
    if config.narrows_states:
        return f"does not support checkpoint_dtype {config.checkpoint_dtype}; use auto"
    if config.enable_lora and (rank := config.max_lora_rank) & (rank - 1):
        return f"does not support max_lora_rank {rank}; use a power of two"
    if _KEYS % (page := config.page_size_on(platform)):
        return f"does not support page_size {page}; use a divisor of {_KEYS}"
    if recurrence := next((one.varying_bits for one in model.recurrences if one.varying_bits), None):
        return f"does not support the {recurrence} of this {model.family} model"
    return None
