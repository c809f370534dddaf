"""Mixers with a recurrence of channels: that of the first Mamba (Gu and Dao, "Mamba", 2023), and the recurrent block of
Griffin (De et al., "Griffin", 2024, section 2.4).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import exp, row_sum, softplus
from kernels_pallas.gated_norm import gated
from kernels_pallas.selective_scan import (
    SelectiveEntry,
    SelectiveTail,
    selective_replay,
    selective_scan,
    selective_scan_sequence,
    selective_update,
)
from mamba_jax.config.channel_recurrence import Mamba1Config, RGLRUConfig
from mamba_jax.layout import Along, Divisible, Hidden, Inputs, Layout, Operation, Parameters, ShareLayout, Transition
from mamba_jax.modules.basic import Linear, RMSNorm, Weight, activation, constant, initial, normal
from mamba_jax.modules.conv import Conv, convolution
from mamba_jax.modules.recurrence import LEAST_DT, Forms, initial_dt_bias, recurrence
from mamba_jax.sharding.axis import sum_over_devices
from mamba_jax.store import SlotArrays

_DECAY = Transition(lambda inputs, _: inputs[3].sum(0), lambda dt, given, state: state * jnp.exp(dt * given["a"]))
_FORMS = Forms(
    SelectiveEntry,
    SelectiveTail,
    selective_scan_sequence,
    selective_scan,
    selective_update,
    selective_replay,
    Divisible(Along(2), Along(-1), (Along(1), Along(None), Along(None), Along(1)), _DECAY),
)
SELECTIVE = recurrence("selective", _FORMS)
"""The Mamba-1 recurrence. Inputs: x [T, inner], B and C [T, state], dt [T, inner]; parameters: a [state, inner] and d
[inner]; state: [slots, state, inner]. With dt = 0 a token of padding changes nothing."""


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

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        config, xz = self.config, self.in_proj(x, layout.adapter)
        x, z = xz[:, 0], xz[:, 1]
        x, window = self.conv(x, layout, None if state is None else state["conv_x"])
        projected = self.x_proj(x, layout.adapter, out_dtype=jnp.float32)
        if x.shape[1] < config.channels:
            projected = sum_over_devices(projected)
        dt, b, c = jnp.split(projected, [config.dt_rank, config.dt_rank + config.state_size], axis=1)
        if config.norm_weights:
            dt, b, c = self.dt_norm(dt), self.b_norm(b), self.c_norm(c)
        elif config.norm_eps is not None:
            dt, b, c = (_normed(v, config.norm_eps) for v in (dt, b, c))
        dt = self.dt_proj(dt.astype(x.dtype), layout.adapter, out_dtype=jnp.float32)
        dt, b, c = jnp.maximum(softplus(dt), LEAST_DT), b.astype(x.dtype), c.astype(x.dtype)
        parameters = {"a": -exp(self.a_log[...]).T, "d": self.d[...]}
        y, new = layout.run(SELECTIVE, (x, b, c, dt), parameters, None if state is None else state["selective"])
        y = self.out_proj(gated(y, z), layout.adapter)
        return y, None if state is None else {"selective": new, "conv_x": window}


def _normed(v: Float[Array, "T size"], eps: float) -> Float[Array, "T size"]:
    """v over its root mean square."""
    return v * jax.lax.rsqrt(row_sum(jnp.square(v)) / v.shape[-1] + eps)


_SHARPNESS = 8.0
"""The factor c of the paper."""


class RGLRU(nnx.Module):
    """out(act(y x) * recurrence(conv(x x))), where x and y are projections.

    For each channel: h = a h + sqrt(1 - a^2) (input gate * x), with a = exp(-8 softplus(parameter) recurrent gate). The
    first token's input has the factor 1. This is the recurrence of Mamba-1 with step sizes of -log(a) and a state of
    one number for each channel. The steering is computed in float32.

    With the weights divided over devices, each has the channels of some of the heads.
    """

    def __init__(self, config: RGLRUConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        inner, heads = config.channels, config.num_heads
        self.config, self.activation = config, activation(config.activation)
        self.x_proj = Linear(hidden_size, inner, bias=True, rngs=rngs, dtype=dtype)
        self.y_proj = Linear(hidden_size, inner, bias=True, rngs=rngs, dtype=dtype)
        self.conv = Conv(inner, config.conv_width, window="conv_x", activation=None, bias=True, rngs=rngs, dtype=dtype)
        size = inner // heads
        self.input_gate, self.recurrent_gate = (Weight(normal(rngs, (heads, size, size), dtype)) for _ in range(2))
        self.input_gate_bias, self.recurrent_gate_bias = (
            nnx.Param(constant(0, (heads, size), dtype)) for _ in range(2)
        )
        # A channel with its gate half open has a decay of 0.95 at each token.
        self.recurrent_param = nnx.Param(constant(-4.35, (inner,), jnp.float32))
        self.out_proj = Linear(inner, hidden_size, bias=True, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        y = self.activation(self.y_proj(x, layout.adapter))
        inputs, names = (self.x_proj(x, layout.adapter),), ("conv_x", "selective")
        gates = self.input_gate.weight, self.input_gate_bias, self.recurrent_gate.weight, self.recurrent_gate_bias
        parameters = *self.conv.own(y.shape[1]), self.recurrent_param[...], *(each[...] for each in gates)
        between = Operation(
            lambda layout, inputs, parameters: self._between(layout, inputs, parameters, (None, None))[0],
            self._between, self._between, self._between, divisible=Divisible(Along(2), Along(0)),
        )  # fmt: skip
        old: Any = (None, None) if state is None else tuple(state[name] for name in names)
        if isinstance(layout, ShareLayout) and layout.prefers_pairs(SELECTIVE, inputs, old[1]):
            out, new = self._between(layout, inputs, parameters, old)
        else:
            out, new = layout.run(between, inputs, parameters, old)
        out = self.out_proj(out * y, layout.adapter)
        return out, None if state is None else dict(zip(names, new, strict=True))

    def _between(
        self, layout: Layout, inputs: Inputs, parameters: Parameters, states: tuple[Any, Any]
    ) -> tuple[Float[Array, "T inner"], tuple[Any, Any]]:
        """Convolution, gates and recurrence."""
        taps, bias, recurrent_param, *gates = parameters
        x, window = layout.run(convolution(None, self.conv.window), inputs, (taps, bias), states[0])
        # A step size of 0 would be padding.
        dt = jnp.maximum(_SHARPNESS * jax.nn.softplus(recurrent_param) * _gate(x, *gates[2:]), LEAST_DT)
        factor = jnp.where(layout.positions[:, None] == 0, 1.0, jnp.sqrt(-jnp.expm1(-2 * dt)))
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        given = (x.astype(jnp.float32) * _gate(x, *gates[:2]) * factor / dt, ones, ones, dt)
        fixed = {"a": -jnp.ones((1, x.shape[1]), jnp.float32), "d": jnp.zeros(x.shape[1], jnp.float32)}
        y, new = layout.run(SELECTIVE, given, fixed, states[1])
        return y.astype(x.dtype), (window, new)


def _gate(
    x: Float[Array, "T inner"], weight: Float[Array, "heads size size"], bias: Float[Array, "heads size"]
) -> Float[Array, "T inner"]:
    """Returns the sigmoid of a product by heads, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    heads = x.reshape(x.shape[0], weight.shape[0], -1)
    out = jnp.einsum("thi,hio->tho", heads, weight, precision=precision, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(out + bias.astype(jnp.float32)).reshape(x.shape)
