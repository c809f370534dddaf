"""What a gated delta net makes of its projections before the recurrence."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import exp, rounded, row_sum, sigmoid, softplus

F32 = jnp.float32
LEAST_BETA = 1e-37
"""A strength of exactly 0 marks padding, so a token's strength must not underflow to 0."""
UNIT_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Gates:
    """How a layer computes its decays and strengths, and how it gates and normalises its output."""

    beta_scale: float
    log_decay_bound: float | None
    """The logarithm of the strongest decay; None: not bounded."""
    output: Literal["silu", "sigmoid"]
    eps: float


def decays_and_strengths(
    a: Float[Array, "*batch decays"],
    b: Float[Array, "*batch heads"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    gates: Gates,
) -> tuple[Float[Array, "..."], Float[Array, "*batch heads"]]:
    """Returns log_decay [*batch, heads], or [*batch, heads, state] if decays are by channel, and beta; all float32."""
    beta = jnp.maximum(gates.beta_scale * sigmoid(b), LEAST_BETA)
    a, rate = a + dt_bias, exp(a_log)
    if a.shape[-1] != b.shape[-1]:
        a, rate = a.reshape(*b.shape, -1), rate[:, None]
    if gates.log_decay_bound is None:
        return -rate * softplus(a), beta
    return gates.log_decay_bound * sigmoid(rounded(rate * a)), beta


def unit(v: Float[Array, "*batch state"], scale: float = 1.0) -> Float[Array, "*batch state"]:
    """Returns v scaled to length 1, times `scale`; computed in float32."""
    wide = v.astype(F32)
    one = wide * lax.rsqrt(row_sum(jnp.square(wide)) + UNIT_EPS)
    return (one if scale == 1.0 else one * scale).astype(v.dtype)
