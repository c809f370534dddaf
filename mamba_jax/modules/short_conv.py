"""LFM2's mixer: a convolution over a few tokens between two gates."""

from __future__ import annotations

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config.short_conv import ShortConvConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear
from mamba_jax.modules.conv import Conv
from mamba_jax.store import SlotArrays


class ShortConv(nnx.Module):
    """out(c * conv(b * x)), where b, c and x are projections of the input."""

    def __init__(self, config: ShortConvConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        channels, bias = config.channels, config.bias
        self.in_proj = Linear(hidden_size, (3, channels), bias=bias, rngs=rngs, dtype=dtype)
        self.conv = Conv(channels, config.conv_width, window="conv", activation=None, bias=bias, rngs=rngs, dtype=dtype)
        self.out_proj = Linear(channels, hidden_size, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T hidden"], SlotArrays | None]:
        bcx = self.in_proj(x, layout.adapter)
        b, c, x = bcx[:, 0], bcx[:, 1], bcx[:, 2]
        y, window = self.conv(b * x, layout, None if state is None else state["conv"])
        return self.out_proj(c * y, layout.adapter), None if state is None else {"conv": window}
