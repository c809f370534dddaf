"""Rotary embeddings, also of part of each head (proportional), and for longer contexts than a model was trained for:
linear, dynamic, YaRN, llama3 and LongRoPE.

Frequencies and factors as in transformers' `modeling_rope_utils.py`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mamba_jax.config import ModelConfigError, RopeConfig
from mamba_jax.families.fields import Fields

_Scaled = tuple[np.ndarray, float, float]
"""Frequencies [size / 2], the factor of cosine and sine, and how many positions they are made for."""


def rope_config(
    fields: Fields,
    head_dim: int,
    *,
    share: float | None = None,
    layers: str = "full_attention",
) -> RopeConfig:
    """Rotary embedding, from `rope_parameters` or the older fields.

    `share` is the share of each head that is rotated unless `rope_parameters` has another; None: the whole head in
    any case, as in families whose code does not look at it. `layers` is the kind of layers whose positions are read,
    where `rope_parameters` has an object for each kind.

    Raises:
        ModelConfigError: the kind of scaling is not supported, or its fields are missing or wrong.
    """
    parameters = _parameters(fields, "rope_parameters") | _parameters(fields, "rope_scaling")
    inner = Fields(_parameters(Fields(parameters), layers) or parameters)
    kind = inner.text("rope_type", "default", "type")
    # The positions of text are equal on the three axes of mrope.
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if share is None or kind == "proportional":
        size = head_dim
    else:
        size = int(head_dim * inner.number("partial_rotary_factor", share))
    if kind == "default":
        return RopeConfig(theta, size)
    if kind not in _KINDS:
        raise ModelConfigError(f"config field rope_type is {kind!r}: supported are default, {', '.join(_KINDS)}")
    if size % 2:
        raise ModelConfigError(f"rope_type {kind} rotates an odd number of elements, {size}: an even one is expected")
    trained = _positive(fields, "max_position_embeddings")
    original = fields.given("original_max_position_embeddings") or inner.given("original_max_position_embeddings")
    if original is None:
        original = trained
    if isinstance(original, bool) or not isinstance(original, int | float) or original <= 1:
        raise ModelConfigError(f"config field original_max_position_embeddings is {original!r}: a number is expected")
    plain = theta ** (-np.arange(0, size, 2) / size)
    frequencies, scale, positions = _KINDS[kind](inner, plain, theta, float(trained), float(original))
    return RopeConfig(
        theta=theta, size=size, frequencies=tuple(map(float, frequencies)), scale=scale, positions=int(positions)
    )


def _parameters(fields: Fields, name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.mapping(name).items() if value is not None}


def _linear(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    factor = _positive(rope, "factor")
    return plain / factor, 1.0, trained * factor


def _proportional(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    """The first pairs of elements have the frequencies of the whole head, and the others are not rotated."""
    rotated = int(rope.number("partial_rotary_factor", 1.0) * 2 * len(plain) // 2)
    frequencies = np.where(np.arange(len(plain)) < rotated, plain, 0.0)
    return frequencies / _positive(rope, "factor", 1.0), 1.0, trained


def _dynamic(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    """Dynamic NTK scaling: a larger theta for a longer sequence.

    The theta of the longest context applies at every length, as states and keys cannot change with the length.
    """
    factor = _positive(rope, "factor")
    if factor < 1:
        raise ModelConfigError(f"config field factor is {factor}: at least 1 is expected for rope_type dynamic")
    size = 2 * len(plain)
    growth = (factor * factor - (factor - 1)) ** (size / (size - 2))
    return (theta * growth) ** (-np.arange(0, size, 2) / size), 1.0, original * factor


def _llama3(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    factor, low, high = (_positive(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelConfigError(f"low_freq_factor is {low}: less than high_freq_factor, {high}, is expected")
    turns = original * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * plain / factor + share * plain, 1.0, trained


def _yarn(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    """YaRN (Peng et al., 2023): frequencies of many turns stay, those of few are divided by the factor."""
    factor = _positive(rope, "factor", trained / original)
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        """Returns the (fractional) index of the frequency with this number of turns in the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (dimension(rope.number(name, default) or default) for name, default in _TURNS)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 1e-3), 0, 1)
    if rope.given("attention_factor") is not None:
        scale = _positive(rope, "attention_factor")
    elif (ours := rope.number("mscale", 0.0)) and (all_dimensions := rope.number("mscale_all_dim", 0.0)):
        scale = _temperature(factor, ours) / _temperature(factor, all_dimensions)
    else:
        scale = _temperature(factor, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), scale, original * factor


def _longrope(rope: Fields, plain: np.ndarray, theta: float, trained: float, original: float) -> _Scaled:
    """LongRoPE (Ding et al., 2024). The long factors apply at every length, as states cannot change with it, unless the
    config's context is not longer than the original one."""
    name = "long_factor" if trained > original else "short_factor"
    factors = rope.numbers(name, (1.0,) * len(plain))
    if rope.given(name) is None or min(factors) <= 0:
        raise ModelConfigError(f"config field {name} is {rope.given(name)!r}: {len(plain)} numbers over 0 are expected")
    factor = _positive(rope, "factor", trained / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / np.array(factors), _positive(rope, "attention_factor", scale), trained


_TURNS = (("beta_fast", 32.0), ("beta_slow", 1.0))
_KINDS: Mapping[str, Callable[[Any, np.ndarray, float, float, float], _Scaled]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _temperature(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _positive(fields: Fields, name: str, default: float = 0.0) -> float:
    value = fields.number(name, default)
    if not 0 < value < math.inf:
        raise ModelConfigError(f"config field {name} is {fields.given(name)!r}: a number over 0 is expected")
    return value
