"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import exp, silu
from kernels_pallas.gated_norm import gated, gated_rms_norm
from kernels_pallas.gated_replay import gated_replay
from kernels_pallas.gated_scan import gated_scan
from kernels_pallas.gated_update import gated_update, step_sizes
from kernels_pallas.ssd_scan import ssd_scan, ssd_scan_sequence
from kernels_pallas.state_replay import Tail, state_replay
from kernels_pallas.state_update import state_update
from mamba_jax.config import MambaConfig, need
from mamba_jax.layout import DecodeLayout, Layout, Operation, PrefillLayout, ReplayLayout, SequenceLayout
from mamba_jax.modules.basic import Linear, Weight, constant, initial, scaled
from mamba_jax.modules.conv import Conv, flat, nested
from mamba_jax.sharding.axis import TENSOR, axis_index
from mamba_jax.store import SlotArrays

# A step size of exactly 0 marks padding, so a step size of a token must not underflow to 0.
LEAST_DT = 1e-37

ARRAYS = ("ssm", "conv_x", "conv_bc")
"""Names of the layer's arrays in the store: states, and windows of the convolutions of x and of B and C."""


def _sequences(layout: SequenceLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...]) -> Array:
    x, dt, b, c = map(layout.by_sequence, inputs)
    a, d = parameters
    y, _ = ssd_scan_sequence(x, dt, a, b, c, d, initial_state=layout.initial_state("ssm"))
    return layout.by_token(y)


def _tiles(
    layout: PrefillLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: Array
) -> tuple[Array, Array]:
    x, dt, b, c = inputs
    # The scan recognises padding by its step size of 0; masking x would be one more pass over it.
    x, b, c = map(layout.with_any_padding, (x, b, c))
    dt = layout.by_tile(dt)
    a, d = parameters
    y, state = ssd_scan(
        x,
        dt,
        a,
        b,
        c,
        d,
        state,
        tile_first=layout.tile_first,
        read_slot=layout.tile_read_slot,
        write_slot=layout.tile_write_slot,
    )
    return layout.by_token(y), state


def _rows(
    layout: DecodeLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: Array
) -> tuple[Array, Array]:
    x, dt, b, c = map(layout.by_row, inputs)
    a, d = parameters
    y, state = state_update(x, dt, a, b, c, d, state, read_slot=layout.read_slot, write_slot=layout.write_slot)
    return layout.by_token(y), state


def _replay(
    layout: ReplayLayout,
    inputs: tuple[Array, ...],
    parameters: tuple[Any, ...],
    state: tuple[Array, dict[str, Array]],
) -> tuple[Array, tuple[Array, dict[str, Array]]]:
    x, dt, b, c = map(layout.by_row, inputs)
    (a, d), (states, tail) = parameters, state
    old = Tail(tail["ssm_x"], tail["ssm_b"], tail["ssm_dt"])
    y, states, new = state_replay(states, old, x, dt, a, b, c, d, **layout.places)
    return layout.by_token(y), (states, {"ssm_x": new.x, "ssm_b": new.b, "ssm_dt": new.dt})


SSD = Operation(_sequences, _tiles, _rows, _replay)
"""The Mamba2 recurrence. Inputs: x [T, heads, head_dim], dt [T, heads], B and C [T, groups, state]; parameters: a and d
[heads]; state: [slots, heads, head_dim, state]. A token with dt = 0 is padding and has no effect."""


class Mamba(nnx.Module):
    """Projection, convolution, recurrence, gated norm, projection.

    The input projection and the convolution are split into parts that can be sharded: z and x by heads, B and C by
    groups, dt by heads. The recurrence's parameters (a_log, d, dt_bias) are float32 for any dtype of the model.

    If the weights are divided over devices, each device has some of the heads and the groups that these heads need.
    """

    def __init__(self, config: MambaConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner, group, heads, width = config.inner_size, config.group_size, config.num_heads, config.conv_width

        def project(outputs: tuple[int, ...]) -> Linear:
            return Linear(hidden_size, outputs, bias=config.in_bias, rngs=rngs, dtype=dtype)

        self.in_proj_zx = project((2, inner))
        self.in_proj_bc = project((2, group))
        self.in_proj_dt = project((heads,))
        self.conv_x = Conv(inner, width, window="conv_x", bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.conv_bc = Conv(2 * group, width, window="conv_bc", parts=2, bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(initial_dt_bias(rngs, heads))
        self.a_log = nnx.Param(initial((heads,), jnp.float32, lambda: jnp.log(jnp.arange(1.0, heads + 1))))
        self.d = nnx.Param(constant(1, (heads,), jnp.float32))
        self.norm = Weight(constant(1, (inner,), dtype)) if config.norm else None
        self.out_proj = Linear(inner, hidden_size, bias=config.out_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T hidden"], SlotArrays | None]:
        config = self.config
        times_z, times_x, times_b, times_c, times_dt = config.projection_multipliers

        # Without a store there is no state to return.
        old: SlotArrays | dict[str, None] = dict.fromkeys(ARRAYS) if state is None else state

        x = scaled(x, config.input_multiplier)
        zx, bc = self.in_proj_zx(x, layout.adapter), self.in_proj_bc(x, layout.adapter)
        dt = scaled(self.in_proj_dt(x, layout.adapter, out_dtype=jnp.float32), times_dt)
        if times_z != 1.0 or times_x != 1.0:
            zx = zx * jnp.asarray([times_z, times_x], zx.dtype)[:, None]
        if times_b != 1.0 or times_c != 1.0:
            bc = bc * jnp.asarray([times_b, times_c], bc.dtype)[:, None]
        between = Operation(self._whole, self._tiles, self._rows, self._anchored)
        y, states = layout.run(between, (zx, bc, dt), (), tuple(old[name] for name in ARRAYS))
        new = None if state is None else dict(zip(ARRAYS, states, strict=True))
        return scaled(self.out_proj(y, layout.adapter), config.output_multiplier), new

    # Forms of the operations between the projections. Inputs: zx [T, 2, inner], bc [T, 2, groups * state] and dt
    # [T, heads]; states by `ARRAYS`. The result is [T, inner].

    def _whole(self, layout: SequenceLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...]) -> Array:
        # The compiler divides the layer over devices, each axis for itself.
        zx, bc, dt = inputs
        return self._one_by_one(layout, zx[:, 0], zx[:, 1], bc, dt, dict.fromkeys(ARRAYS))[0]

    def _apart(
        self, layout: Layout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        # Flat: a TPU would change the layout of [T, 2, inner] for each half.
        zx, bc, dt = inputs
        z, x = jnp.split(zx.reshape(len(zx), -1), 2, axis=1)
        return self._one_by_one(layout, z, x, bc, dt, dict(zip(ARRAYS, states, strict=True)))

    def _tiles(
        self, layout: PrefillLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        config, (zx, bc, dt), (ssm, conv_x, conv_bc) = self.config, inputs, states
        if self.norm is not None and config.num_groups % (config.num_heads // dt.shape[1]):
            return self._apart(layout, inputs, parameters, states)  # groups of the norm lie on several devices
        b, c, conv_bc = self._convolved_bc(bc, dt.shape[1], layout, conv_bc)
        a, d = self._decay_and_skip()
        y, ssm, conv_x = gated_scan(
            zx,
            self._step_sizes(dt),
            a,
            b,
            c,
            d,
            *self.conv_x.own(zx.shape[2]),
            self._norm_weight(),
            ssm,
            conv_x,
            eps=config.norm_eps,
            norm_before_gate=config.norm_before_gate,
            **layout.places,
        )
        return y, (ssm, conv_x, conv_bc)

    def _rows(
        self, layout: DecodeLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        if self._divides_groups(inputs[2].shape[1]):
            return self._apart(layout, inputs, parameters, states)
        y, *new = gated_update(
            *self._by_row(layout, inputs),
            *states,
            valid=layout.valid.reshape(layout.shape),
            read_slot=layout.read_slot,
            write_slot=layout.write_slot,
            **self._options(),
        )
        return layout.by_token(y), tuple(new)

    def _anchored(
        self, layout: ReplayLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        if self._divides_groups(inputs[2].shape[1]):
            return self._apart(layout, inputs, parameters, states)
        (ssm, tail), *windows = states
        stores: tuple[Any, ...] = ssm, Tail(tail["ssm_x"], tail["ssm_b"], tail["ssm_dt"]), *flat(windows)
        y, ssm, new, *others = gated_replay(
            *self._by_row(layout, inputs),
            *stores,
            **layout.places,
            **self._options(),
        )
        replayed = ssm, {"ssm_x": new.x, "ssm_b": new.b, "ssm_dt": new.dt}
        return layout.by_token(y), (replayed, *nested(windows, others))

    def _divides_groups(self, heads: int) -> bool:
        """Whether groups lie on several devices, each of which has this number of heads."""
        groups, devices = self.config.num_groups, self.config.num_heads // heads
        return bool(groups % devices) and (self.norm is not None or groups > 1)

    def _by_row(self, layout: DecodeLayout, inputs: tuple[Array, ...]) -> tuple[Any, ...]:
        """The first arguments of `gated_update` and `gated_replay`."""
        zx, bc, dt = inputs
        shape = layout.shape
        return (
            zx.reshape(*shape, *zx.shape[1:]),
            bc.reshape(*shape, 2, -1, self.config.state_size),
            dt.reshape(*shape, -1),
            self.a_log[...],
            self.d[...],
            self.dt_bias[...],
            *self.conv_x.own(zx.shape[2]),
            *self.conv_bc.own(2 * bc.shape[2]),
            self._norm_weight(),
        )

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {"dt_limit": self._dt_limit(), "eps": config.norm_eps, "norm_before_gate": config.norm_before_gate}

    def _one_by_one(
        self, layout: Layout, z: Array, x: Array, bc: Array, dt: Array, states: dict[str, Any]
    ) -> tuple[Array, tuple[Any, ...]]:
        b, c, conv_bc = self._convolved_bc(bc, dt.shape[1], layout, states["conv_bc"])
        x, conv_x = self.conv_x(x, layout, states["conv_x"])
        x = x.reshape(len(x), -1, self.config.head_dim)
        y, ssm = layout.run(SSD, (x, self._step_sizes(dt), b, c), self._decay_and_skip(), states["ssm"])
        return self._gate(y.reshape(z.shape), z), (ssm, conv_x, conv_bc)

    def _convolved_bc(
        self, bc: Float[Array, "T 2 channels"], heads: int, layout: Layout, state: Any
    ) -> tuple[Float[Array, "T groups state"], Float[Array, "T groups state"], Any]:
        """Returns B and C of this device's heads after the convolution, and its new state."""
        bc, state = self.conv_bc(bc.reshape(len(bc), -1), layout, state)
        b, c = (self._own_groups(v, heads) for v in jnp.split(bc, 2, axis=1))
        return b, c, state

    def _decay_and_skip(self) -> tuple[Float[Array, " heads"], Float[Array, " heads"]]:
        return -exp(self.a_log[...]), self.d[...]

    def _dt_limit(self) -> tuple[float, float]:
        low, high = self.config.dt_limit
        return max(low, LEAST_DT), high

    def _step_sizes(self, dt: Float[Array, "T heads"]) -> Float[Array, "T heads"]:
        return step_sizes(dt, self.dt_bias[...], self._dt_limit())

    def _norm_weight(self) -> Float[Array, " inner"] | None:
        return None if self.norm is None else self.norm.weight[...]

    def _own_groups(self, v: Float[Array, "T channels"], heads: int) -> Float[Array, "T groups state"]:
        """B or C by groups. If the device has all groups but few heads: the group of these heads."""
        groups = v.reshape(v.shape[0], -1, self.config.state_size)
        devices = self.config.num_heads // heads
        if groups.shape[1] * devices <= self.config.num_groups or devices == 1:
            return groups
        return jax.lax.dynamic_slice_in_dim(groups, axis_index() * self.config.num_groups // devices, 1, axis=1)

    def _gate(self, y: Float[Array, "T inner"], z: Float[Array, "T inner"]) -> Float[Array, "T inner"]:
        config = self.config
        if self.norm is None:
            return gated(y, z)
        devices = config.inner_size // y.shape[1]
        if config.num_groups % devices:
            return self._norm_over_devices(y, z, devices)
        return gated_rms_norm(
            y,
            z,
            self.norm.weight[...],
            groups=config.num_groups // devices,
            eps=config.norm_eps,
            norm_before_gate=config.norm_before_gate,
        )

    def _norm_over_devices(
        self, y: Float[Array, "T inner"], z: Float[Array, "T inner"], devices: int
    ) -> Float[Array, "T inner"]:
        """As `gated_rms_norm`, for groups whose channels lie on several devices, which add up their squares."""
        config = self.config
        gate = silu(z.astype(jnp.float32))
        value = y.astype(jnp.float32) * (1.0 if config.norm_before_gate else gate)
        own = jnp.arange(config.num_groups) == axis_index() * config.num_groups // devices
        squares = jnp.square(value).sum(-1, keepdims=True)
        squares = jax.lax.psum(jnp.where(own, squares, 0), TENSOR)
        mean = jnp.where(own, squares, 0).sum(-1, keepdims=True) / (config.inner_size // config.num_groups)
        out = value * jax.lax.rsqrt(mean + config.norm_eps) * need(self.norm).weight[...].astype(jnp.float32)
        return (out * gate if config.norm_before_gate else out).astype(y.dtype)


def initial_dt_bias(rngs: nnx.Rngs, heads: int) -> Float[Array, " heads"]:
    """Step sizes log-uniform in [0.001, 0.1], through the inverse of softplus (as in the Mamba2 reference code)."""

    def values() -> Array:
        low, high = math.log(0.001), math.log(0.1)
        dt = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, low, high))
        return dt + jnp.log(-jnp.expm1(-dt))

    return initial((heads,), jnp.float32, values)
