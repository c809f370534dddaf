"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.gated_norm import gated_rms_norm
from mamba_jax.config import MambaConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, Weight, normal, scaled
from mamba_jax.store import MambaSlots

# A step size of exactly 0 means padding; one that merely underflowed must not.
_LEAST_DT = 1e-37


class Conv(nnx.Module):
    """Weights of a causal depthwise convolution."""

    def __init__(self, channels: int, width: int, *, bias: bool, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(normal(rngs, (channels, width), dtype))
        self.bias = nnx.Param(jnp.zeros(channels, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T channels"], layout: Layout, state: Any) -> tuple[Array, Any]:
        bias = None if self.bias is None else self.bias[...]
        return layout.conv(x, self.weight[...], bias, state)


class Mamba(nnx.Module):
    """Projection, convolution, recurrence, gated norm, projection.

    The input projection and the convolution are split into parts that can be sharded: z and x by heads, B and C by
    groups, dt by heads. What steers the recurrence (a_log, d, dt_bias) is float32 whatever the model's dtype.
    """

    def __init__(self, config: MambaConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner, group, heads, width = config.inner_size, config.group_size, config.num_heads, config.conv_width

        def project(outputs: tuple[int, ...]) -> Linear:
            return Linear(hidden_size, outputs, bias=config.in_bias, rngs=rngs, dtype=dtype)

        self.in_proj_zx = project((2, inner))
        self.in_proj_bc = project((2, group))
        self.in_proj_dt = project((heads,))
        self.conv_x = Conv(inner, width, bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.conv_bc = Conv(2 * group, width, bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(_initial_dt_bias(rngs, heads))
        self.a_log = nnx.Param(jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32)))
        self.d = nnx.Param(jnp.ones(heads, jnp.float32))
        self.norm = Weight(jnp.ones(inner, dtype)) if config.norm else None
        self.out_proj = Linear(inner, hidden_size, bias=config.out_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: MambaSlots | None
    ) -> tuple[Float[Array, "T hidden"], MambaSlots | None]:
        config = self.config
        tokens, heads = x.shape[0], (x.shape[0], config.num_heads, config.head_dim)
        groups = (tokens, config.num_groups, config.state_size)
        times_z, times_x, times_b, times_c, times_dt = config.projection_multipliers

        # Without a store there is no state to hand on either.
        old = (None, None, None) if state is None else (state.conv_x, state.conv_bc, state.ssm)

        x = scaled(x, config.input_multiplier)
        zx, bc = self.in_proj_zx(x), self.in_proj_bc(x)
        dt = scaled(self.in_proj_dt(x, out_dtype=jnp.float32), times_dt)
        z, inner = scaled(zx[:, 0], times_z), scaled(zx[:, 1], times_x)
        if times_b != 1.0 or times_c != 1.0:
            bc = bc * jnp.asarray([times_b, times_c], bc.dtype)[:, None]
        inner, conv_x = self.conv_x(inner, layout, old[0])
        bc, conv_bc = self.conv_bc(bc.reshape(tokens, -1), layout, old[1])
        b, c = jnp.split(bc, 2, axis=1)

        low, high = config.dt_limit
        y, ssm = layout.scan(
            inner.reshape(heads),
            jnp.clip(jax.nn.softplus(dt + self.dt_bias[...]), max(low, _LEAST_DT), None if high == math.inf else high),
            -jnp.exp(self.a_log[...]),
            b.reshape(groups),
            c.reshape(groups),
            self.d[...],
            old[2],
        )
        out = self.out_proj(self._gate(y.reshape(z.shape), z))
        new = None if state is None else MambaSlots(ssm=ssm, conv_x=conv_x, conv_bc=conv_bc)
        return scaled(out, config.output_multiplier), new

    def _gate(self, y: Float[Array, "T inner"], z: Float[Array, "T inner"]) -> Float[Array, "T inner"]:
        config = self.config
        if self.norm is None:
            return (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(y.dtype)
        return gated_rms_norm(
            y,
            z,
            self.norm.weight[...],
            groups=config.num_groups,
            eps=config.norm_eps,
            norm_before_gate=config.norm_before_gate,
        )


def _initial_dt_bias(rngs: nnx.Rngs, heads: int) -> Float[Array, " heads"]:
    """Step sizes log-uniform in [0.001, 0.1], through the inverse of softplus (as in the Mamba2 reference code)."""
    low, high = math.log(0.001), math.log(0.1)
    dt = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))
