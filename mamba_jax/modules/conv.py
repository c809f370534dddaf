"""The causal depthwise convolution over a sequence's last few inputs, before a recurrence or as a mixer (LFM2)."""

from functools import cache
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.causal_conv1d import (
    causal_conv1d_prefill,
    causal_conv1d_replay,
    causal_conv1d_sequence,
    causal_conv1d_update,
)
from mamba_jax.config.channel_recurrence import ShortConvConfig
from mamba_jax.layout import (
    Along,
    Anchors,
    DecodeLayout,
    Divisible,
    Hidden,
    Inputs,
    Layout,
    Operation,
    Parameters,
    PrefillLayout,
    ReplayLayout,
    SequenceLayout,
    Transition,
)
from mamba_jax.modules.basic import Linear, constant, normal
from mamba_jax.sharding.axis import axis_index
from mamba_jax.store import SlotArrays

_WINDOW = Transition(lambda _, scan: jnp.zeros(0), lambda _, given, window: jnp.zeros_like(window), copies=True)
"""A share has more tokens (`LEAST_TOKENS`) than a window, which then has nothing of those before."""


@cache
def convolution(activation: str | None, window: str) -> Operation:
    """Returns the operation: input [T, channels]; parameters weight [channels, width] and bias [channels] or None.

    Its state is the window of raw inputs [slots, width - 1, channels]. `activation` is "silu" or None. `window` is the
    name of the state's array.
    """

    def sequences(layout: SequenceLayout, inputs: Inputs, parameters: Parameters) -> Array:
        (x,), (weight, bias) = inputs, parameters
        x, before = layout.by_sequence(x), layout.initial_state(window)
        if before is None:
            return layout.by_token(causal_conv1d_sequence(x, weight, bias, activation=activation))
        seen = jnp.concatenate([before.astype(x.dtype), x], axis=1)
        return layout.by_token(causal_conv1d_sequence(seen, weight, bias, activation=activation)[:, before.shape[1] :])

    def tiles(layout: PrefillLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
        # Packed tokens: inputs of a row lie side by side, and those outside of all rows change nothing.
        (x,), (weight, bias) = inputs, parameters
        return causal_conv1d_prefill(x, weight, bias, state, layout.packed, activation=activation)

    def rows(layout: DecodeLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
        (x,), (weight, bias) = inputs, parameters
        y, state = causal_conv1d_update(layout.by_row(x), weight, bias, state, layout.rows, activation=activation)
        return layout.by_token(y), state

    def replay(layout: ReplayLayout, inputs: Inputs, parameters: Parameters, state: Anchors) -> tuple[Array, Anchors]:
        x, (weight, bias), (old, tail) = layout.by_row(inputs[0]), parameters, state
        ((name, ring),) = tail.items()
        y, old, ring = causal_conv1d_replay(x, weight, bias, old, ring, layout.anchored, activation=activation)
        return layout.by_token(y), (old, {name: ring})

    return Operation(sequences, tiles, rows, replay, divisible=Divisible(Along(2), Along(0), transition=_WINDOW))


class Conv(nnx.Module):
    """Weights of a causal depthwise convolution over `parts` groups of channels of equal size.

    `window` is the name of the array with its state.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        window: str,
        parts: int = 1,
        activation: str | None = "silu",
        bias: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ) -> None:
        self.parts, self.activation, self.window = parts, activation, window
        self.weight = nnx.Param(normal(rngs, (channels, width), dtype))
        self.bias = nnx.Param(constant(0, (channels,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T channels"], layout: Layout, state: Any) -> tuple[Array, Any]:
        return layout.run(convolution(self.activation, self.window), (x,), self.own(x.shape[1]), state)

    def own(self, channels: int) -> tuple[Float[Array, "channels width"], Float[Array, " channels"] | None]:
        """Weight and bias of this number of channels: all, or those of this device."""
        bias = None if self.bias is None else self._own(self.bias[...], channels)
        return self._own(self.weight[...], channels), bias

    def _own(self, value: Array, channels: int) -> Array:
        """Returns the rows of weight [channels, width] or bias [channels] of this device's channels of each part."""
        if value.shape[0] == channels:
            return value
        by_device = value.reshape(self.parts, -1, channels // self.parts, *value.shape[1:])
        return by_device[:, axis_index()].reshape(channels, *value.shape[1:])


class ShortConv(nnx.Module):
    """out(c * conv(b * x)), where b, c and x are projections of the input."""

    def __init__(self, config: ShortConvConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        channels, bias = config.channels, config.bias
        self.in_proj = Linear(hidden_size, (3, channels), bias=bias, rngs=rngs, dtype=dtype)
        self.conv = Conv(channels, config.conv_width, window="conv", activation=None, bias=bias, rngs=rngs, dtype=dtype)
        self.out_proj = Linear(channels, hidden_size, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        bcx = self.in_proj(x, layout.adapter)
        b, c, x = bcx[:, 0], bcx[:, 1], bcx[:, 2]
        y, window = self.conv(b * x, layout, None if state is None else state["conv"])
        return self.out_proj(c * y, layout.adapter), None if state is None else {"conv": window}
