"""The mixer of lightning attention, as MiniMax-01 (MiniMax, 2025) has it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config.linear_recurrence import LightningConfig
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.basic import Linear, RMSNorm
from mamba_jax.modules.recurrence import recurrence
from mamba_jax.sharding.axis import axis_index
from mamba_jax.store import SlotArrays


class Lightning(nnx.Module):
    """Projection, SiLU, recurrence, a norm over all heads, gate, projection.

    With the weights divided over devices, each has some of the heads; the norm adds up their squares.
    """

    def __init__(self, config: LightningConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner = config.inner_size
        self.qkv_proj = Linear(hidden_size, 3 * inner, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, inner, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(inner, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(inner, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        tokens = x.shape[0]
        # Each head has its query, then its key, then its value.
        qkv = jax.nn.silu(self.qkv_proj(x, layout.adapter)).reshape(tokens, -1, 3 * self.config.head_dim)
        q, k, v = jnp.split(qkv, 3, axis=2)
        rates = self._own_rates(v.shape[1])
        strength = jnp.ones(v.shape[:2], jnp.float32)  # the layout makes it 0 where a token is padding
        old = None if state is None else state["ssm"]
        inputs = q, k, v, jnp.broadcast_to(-rates, strength.shape), strength
        y, ssm = layout.run(recurrence("ssm", erase=False), inputs, (None,), old)
        y = self.norm.of_part(y.reshape(tokens, -1), self.config.inner_size)
        gate = jax.nn.sigmoid(self.gate_proj(x, layout.adapter, out_dtype=jnp.float32))
        return self.out_proj((y * gate).astype(x.dtype), layout.adapter), None if state is None else {"ssm": ssm}

    def _own_rates(self, heads: int) -> Float[Array, " heads"]:
        """Returns the decay rates of the heads that this device has."""
        rates = jnp.asarray(self.config.decay_rates(0), jnp.float32)
        if heads == self.config.num_heads:
            return rates
        return jax.lax.dynamic_slice_in_dim(rates, axis_index() * heads, heads)
