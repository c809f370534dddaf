"""The mixer of the first Mamba (Gu and Dao, "Mamba", 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import exp, row_sum, softplus
from kernels_pallas.gated_norm import gated
from kernels_pallas.selective_scan import (
    SelectiveTail,
    selective_replay,
    selective_scan,
    selective_scan_sequence,
    selective_update,
)
from mamba_jax.config.mamba1 import Mamba1Config
from mamba_jax.layout import (
    Anchors,
    DecodeLayout,
    Inputs,
    Layout,
    Operation,
    Parameters,
    PrefillLayout,
    ReplayLayout,
    SequenceLayout,
)
from mamba_jax.modules.basic import Linear, RMSNorm, constant, initial
from mamba_jax.modules.conv import Conv
from mamba_jax.modules.recurrence import LEAST_DT, initial_dt_bias
from mamba_jax.sharding.axis import TENSOR
from mamba_jax.store import SlotArrays


def _sequences(layout: SequenceLayout, inputs: Inputs, parameters: Parameters) -> Array:
    x, dt, b, c = map(layout.by_sequence, inputs)
    a, d = parameters
    y, _ = selective_scan_sequence(x, dt, a, b, c, d, initial_state=layout.initial_state("selective"))
    return layout.by_token(y)


def _tiles(layout: PrefillLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
    x, dt, b, c = inputs
    # The scan recognises padding by its step size of 0; other values of padding do not matter.
    x, b, c = map(layout.with_any_padding, (x, b, c))
    a, d = parameters
    y, state = selective_scan(x, layout.by_tile(dt), a, b, c, d, state, layout.tiles)
    return layout.by_token(y), state


def _rows(layout: DecodeLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
    x, dt, b, c = map(layout.by_row, inputs)
    a, d = parameters
    y, state = selective_update(x, dt, a, b, c, d, state, layout.rows)
    return layout.by_token(y), state


def _replay(layout: ReplayLayout, inputs: Inputs, parameters: Parameters, state: Anchors) -> tuple[Array, Anchors]:
    x, dt, b, c = map(layout.by_row, inputs)
    (a, d), (states, tail) = parameters, state
    old = SelectiveTail(tail["selective_x"], tail["selective_b"], tail["selective_dt"])
    y, states, new = selective_replay(x, dt, a, b, c, d, states, old, layout.anchored)
    return layout.by_token(y), (states, {"selective_x": new.x, "selective_b": new.b, "selective_dt": new.dt})


SELECTIVE = Operation(_sequences, _tiles, _rows, _replay)
"""The Mamba-1 recurrence. Inputs: x and dt [T, inner], B and C [T, state]; parameters: a [state, inner] and d [inner];
state: [slots, state, inner]. With dt = 0 a token of padding changes nothing."""


class Mamba1(nnx.Module):
    """Projection, convolution, projections to B, C and step sizes, recurrence, gate, projection.

    `a_log`, `d` and the step sizes are float32 whatever the model's dtype. With the weights divided over devices, each
    has some of the channels, and the devices add up B, C and what step sizes are projected from.
    """

    def __init__(self, config: Mamba1Config, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner, state, rank = config.channels, config.state_size, config.dt_rank
        self.in_proj = Linear(hidden_size, (2, inner), bias=config.bias, rngs=rngs, dtype=dtype)
        self.conv = Conv(inner, config.conv_width, window="conv_x", bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.x_proj = Linear(inner, rank + 2 * state, rngs=rngs, dtype=dtype)
        self.dt_proj = Linear(rank, inner, bias=True, rngs=rngs, dtype=dtype)
        self.dt_proj.bias = nnx.Param(initial_dt_bias(rngs, inner))
        self.a_log = nnx.Param(
            initial((inner, state), jnp.float32, lambda: jnp.tile(jnp.log(jnp.arange(1.0, state + 1)), (inner, 1)))
        )
        self.d = nnx.Param(constant(1, (inner,), jnp.float32))
        if config.norm_weights and config.norm_eps is not None:
            self.dt_norm = RMSNorm(rank, config.norm_eps, dtype=dtype)
            self.b_norm = RMSNorm(state, config.norm_eps, dtype=dtype)
            self.c_norm = RMSNorm(state, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(inner, hidden_size, bias=config.bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T hidden"], SlotArrays | None]:
        xz = self.in_proj(x, layout.adapter)
        x, z = xz[:, 0], xz[:, 1]
        x, window = self.conv(x, layout, None if state is None else state["conv_x"])
        dt, b, c = self._steered(x, layout)
        parameters = -exp(self.a_log[...]).T, self.d[...]
        y, new = layout.run(SELECTIVE, (x, dt, b, c), parameters, None if state is None else state["selective"])
        y = self.out_proj(gated(y, z), layout.adapter)
        return y, None if state is None else {"selective": new, "conv_x": window}

    def _steered(
        self, x: Float[Array, "T inner"], layout: Layout
    ) -> tuple[Float[Array, "T inner"], Float[Array, "T state"], Float[Array, "T state"]]:
        """Step sizes in float32, B and C."""
        config, dtype = self.config, x.dtype
        projected = self.x_proj(x, layout.adapter, out_dtype=jnp.float32)
        if x.shape[1] < config.channels:
            projected = jax.lax.psum(projected, TENSOR)
        dt, b, c = jnp.split(projected, [config.dt_rank, config.dt_rank + config.state_size], axis=1)
        if config.norm_weights:
            dt, b, c = self.dt_norm(dt), self.b_norm(b), self.c_norm(c)
        elif config.norm_eps is not None:
            dt, b, c = (_normed(v, config.norm_eps) for v in (dt, b, c))
        dt = self.dt_proj(dt.astype(dtype), layout.adapter, out_dtype=jnp.float32)
        return jnp.maximum(softplus(dt), LEAST_DT), b.astype(dtype), c.astype(dtype)


def _normed(v: Float[Array, "T size"], eps: float) -> Float[Array, "T size"]:
    """v over its root mean square."""
    return v * jax.lax.rsqrt(row_sum(jnp.square(v)) / v.shape[-1] + eps)
