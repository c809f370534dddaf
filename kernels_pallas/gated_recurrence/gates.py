"""What a layer makes of its projections before a linear recurrence, and of the recurrence's output after it."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import F32, exp, rounded, row_sum, sigmoid, softplus
from kernels_pallas.gated_norm import gated, gated_rms_norm

LEAST = 1e-37
"""A strength of exactly 0 marks padding, so a token's strength must not underflow to 0."""
UNIT_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Mamba2Gates:
    """Mamba2: a token's strength is its step size, which also gives the decay. The norm's groups are those of heads."""

    dt_limit: tuple[float, float]
    """Step sizes are clamped to it, after softplus."""
    eps: float
    norm_before_gate: bool = False
    erase: ClassVar[bool] = False
    query_first: ClassVar[bool] = False
    """Whether, of the two vectors of a group, the first is the query."""

    @property
    def limit(self) -> tuple[float, float]:
        """The limit of step sizes, of which the lower one is above 0."""
        return max(self.dt_limit[0], LEAST), self.dt_limit[1]

    def decays_and_strengths(
        self,
        decay: Array | None,
        strength: Float[Array, "*batch heads"],
        a_log: Float[Array, " heads"],
        dt_bias: Float[Array, " heads"],
    ) -> tuple[Float[Array, "*batch heads"], Float[Array, "*batch heads"]]:
        """Returns log_decay and strength; all float32."""
        step = self.strength(strength + dt_bias)
        return -exp(a_log) * step, step

    def strength(self, given: Array) -> Array:
        """Returns the step size, of its projection with the bias; also inside of kernels."""
        low, high = self.limit
        return jnp.clip(softplus(given), low, None if high == math.inf else high)

    def vectors(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Returns query and key as the recurrence takes them."""
        return query, key

    def output(
        self, y: Float[Array, "*batch inner"], gate: Float[Array, "*batch inner"], norm: Array | None, *, groups: int
    ) -> Float[Array, "*batch inner"]:
        """Gates y by silu(gate), and normalizes it by groups of heads if there is a norm."""
        flat, gate = (v.reshape(-1, y.shape[-1]) for v in (y, gate))
        if norm is None:
            return gated(flat, gate).reshape(y.shape)
        out = gated_rms_norm(flat, gate, norm, groups=groups, eps=self.eps, norm_before_gate=self.norm_before_gate)
        return out.reshape(y.shape)


@dataclasses.dataclass(frozen=True)
class DeltaGates:
    """Gated delta nets: keys and queries of length 1, and a norm of each head before the gate."""

    beta_scale: float
    log_decay_bound: float | None
    """The logarithm of the strongest decay; None: not bounded."""
    activation: Literal["silu", "sigmoid"]
    """Of the output's gate."""
    eps: float
    norm_before_gate: ClassVar[bool] = True
    erase: ClassVar[bool] = True
    query_first: ClassVar[bool] = True

    def decays_and_strengths(
        self,
        decay: Float[Array, "*batch decays"] | None,
        strength: Float[Array, "*batch heads"],
        a_log: Float[Array, " heads"],
        dt_bias: Float[Array, " decays"],
    ) -> tuple[Float[Array, "..."], Float[Array, "*batch heads"]]:
        """Returns log_decay [*batch, heads], or [*batch, heads, state] if decays are by channel, and strength."""
        assert decay is not None, "decays of a gated delta net are projected"
        beta, decay, rate = self.strength(strength), decay + dt_bias, exp(a_log)
        if decay.shape[-1] != beta.shape[-1]:
            decay, rate = decay.reshape(*beta.shape, decay.shape[-1] // beta.shape[-1]), rate[:, None]
        return self.log_decay(decay, rate), beta

    def strength(self, given: Array) -> Array:
        """Returns beta, of its projection; also inside of kernels."""
        return jnp.maximum(self.beta_scale * sigmoid(given), LEAST)

    def log_decay(self, given: Array, rate: Array) -> Array:
        """Returns the log of a decay, of its projection with the bias; also inside of kernels."""
        if self.log_decay_bound is None:
            return -rate * softplus(given)
        return self.log_decay_bound * sigmoid(rounded(rate * given))

    def vectors(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Returns query and key of length 1; the query is also scaled by the root of its size."""
        return unit(query, query.shape[-1] ** -0.5), unit(key)

    def output(
        self, y: Float[Array, "*batch inner"], gate: Float[Array, "*batch inner"], norm: Array | None, *, groups: int
    ) -> Float[Array, "*batch inner"]:
        """Normalizes each head of y, and gates it."""
        assert norm is not None, "a gated delta net has a norm"
        own, gate = (v.reshape(*y.shape[:-1], y.shape[-1] // norm.shape[0], norm.shape[0]) for v in (y, gate))
        out = gated_rms_norm(own, gate, norm, groups=1, eps=self.eps, norm_before_gate=True, activation=self.activation)
        return out.reshape(y.shape)


Gates = Mamba2Gates | DeltaGates


def unit(v: Float[Array, "*batch state"], scale: float = 1.0) -> Float[Array, "*batch state"]:
    """Returns v scaled to length 1, times `scale`; computed in float32."""
    wide = v.astype(F32)
    one = wide * lax.rsqrt(row_sum(jnp.square(wide)) + UNIT_EPS)
    return (one if scale == 1.0 else one * scale).astype(v.dtype)
