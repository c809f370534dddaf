"""The recurrent block of Griffin (De et al., "Griffin", 2024, section 2.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config.rg_lru import RGLRUConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, Weight, activation, constant, normal
from mamba_jax.modules.conv import Conv
from mamba_jax.modules.mamba1 import SELECTIVE
from mamba_jax.modules.recurrence import LEAST_DT
from mamba_jax.store import SlotArrays

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

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T hidden"], SlotArrays | None]:
        y = self.activation(self.y_proj(x, layout.adapter))
        conv = None if state is None else state["conv_x"]
        x, window = self.conv(self.x_proj(x, layout.adapter), layout, conv)
        gate = self._gate(x, self.input_gate, self.input_gate_bias)
        rate = _SHARPNESS * jax.nn.softplus(self.recurrent_param[...])
        # A step size of 0 would be padding.
        dt = jnp.maximum(rate * self._gate(x, self.recurrent_gate, self.recurrent_gate_bias), LEAST_DT)
        factor = jnp.where(layout.positions[:, None] == 0, 1.0, jnp.sqrt(-jnp.expm1(-2 * dt)))
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        inputs = (x.astype(jnp.float32) * gate * factor / dt, dt, ones, ones)
        parameters = -jnp.ones((1, x.shape[1]), jnp.float32), jnp.zeros(x.shape[1], jnp.float32)
        out, new = layout.run(SELECTIVE, inputs, parameters, None if state is None else state["selective"])
        out = self.out_proj(out.astype(y.dtype) * y, layout.adapter)
        return out, None if state is None else {"selective": new, "conv_x": window}

    def _gate(self, x: Float[Array, "T inner"], weight: Weight, bias: nnx.Param) -> Float[Array, "T inner"]:
        """The sigmoid of a product by heads, in float32."""
        value = weight.weight[...]
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        heads = x.reshape(x.shape[0], value.shape[0], -1)
        out = jnp.einsum("thi,hio->tho", heads, value, precision=precision, preferred_element_type=jnp.float32)
        return jax.nn.sigmoid(out + bias[...].astype(jnp.float32)).reshape(x.shape)
